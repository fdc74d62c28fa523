"""The time of a planned step on one card of a cluster: compute with the exchanges of FSDP2 beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from memopt.account.account import Account
from memopt.account.sharded import ParameterGroup, Sharding
from memopt.capture.tensor_parallel import is_exchange
from memopt.device.time_model import bound_by_arithmetic
from memopt.planning.joined import Joined
from memopt.planning.priced_step import PricedStep
from memopt.solver import Schedule
from passes.graphs.node_facts import block_of

COMPUTE, MEMORY, GATHER, REDUCE, EXCHANGE = "compute", "memory", "gather", "reduce", "tensor parallel"
Seconds = Counter[str]
"""Seconds by what bounds them (the names above)."""


@dataclass(frozen=True)
class ClusterStep:
    """The time of a whole step, optimizer included, on one card of a cluster, by the time model. Times in seconds."""

    mesh: str
    cards: int
    interconnect: str
    bounds: tuple[tuple[str, float], ...]
    """The seconds of the step by what bounds them, the largest first. "compute": arithmetic; "memory": the card's
    memory traffic and launches; "gather" and "reduce": exchanges of parameters and gradients that take longer than the
    block computes beside which they run; "tensor parallel": exchanges within the layers."""
    gathers_seconds: float
    """Total time of the gathers of parameters, most of which overlap with compute."""
    reductions_seconds: float
    """Total time of the reductions of gradients, most of which overlap too."""
    blocks: tuple[tuple[str, int, float, float, float, float], ...]
    """Each group of parameters: path, bytes gathered, seconds to gather once and to reduce, seconds of its forward and
    of its backward with what is recomputed in it. "" is the root's group."""

    @property
    def seconds(self) -> float:
        """Seconds of the whole step: its parts one after the other."""
        return sum(seconds for _, seconds in self.bounds)

    @property
    def bound(self) -> str:
        """The largest bottleneck of the step's seconds: the first name in `bounds`."""
        return self.bounds[0][0]


@dataclass(frozen=True)
class _GroupTimes:
    """A group of parameters on one card: the seconds that its layers compute, and that its exchanges take."""

    group: ParameterGroup
    forward: Seconds
    backward: Seconds
    gather: float
    reduce: float


def cluster_step(
    joined: Joined, schedule: Schedule, step: PricedStep, account: Account, *, kept: int = 0
) -> ClusterStep:
    """The time of a whole step on one card of a cluster under a schedule; `account` gives the bytes that the
    optimizer's step reads and writes. The blocks are FSDP2's groups of parameters, all but the root module's. The last
    `kept` of them are gathered once and stay; all others are gathered for the forward and for the backward."""
    sharding = step.traced.sharded
    assert sharding is not None
    times = _group_times(joined, schedule, step, sharding)
    root, blocks = times[0], times[1:]
    freed = blocks[: len(blocks) - kept]
    bounds = _forward(root, blocks) + _backward(root, blocks, freed)
    card = step.settings.hardware
    # The optimizer's step reads parameters, gradients and state, and writes parameters and state.
    moved = 2 * account.parameters + account.gradients + 2 * account.optimizer_state
    bounds += Counter({MEMORY: moved / (card.bytes_per_second * card.bandwidth_efficiency)})
    mesh = sharding.cluster.mesh
    rows = (
        (one.group.name, one.group.gathered_bytes, one.gather, one.reduce, one.forward.total(), one.backward.total())
        for one in times
    )
    return ClusterStep(
        str(mesh),
        mesh.cards,
        sharding.cluster.interconnect.name,
        tuple((name, seconds) for name, seconds in bounds.most_common() if seconds),
        root.gather + sum(block.gather for block in (*blocks, *freed)),
        sum(one.reduce for one in times),
        tuple(rows),
    )


def _forward(root: _GroupTimes, blocks: Sequence[_GroupTimes]) -> Seconds:
    """Seconds of the forward: every block but the first is gathered while the block before it computes."""
    total: Seconds = Counter({GATHER: root.gather + (blocks[0].gather if blocks else 0.0)})
    following = [block.gather for block in blocks[1:]] + [0.0]
    for block, gather in zip(blocks, following, strict=True):
        total += _beside(block.forward, gather=gather)
    return total + root.forward


def _backward(root: _GroupTimes, blocks: Sequence[_GroupTimes], freed: Sequence[_GroupTimes]) -> Seconds:
    """Seconds of the backward: while a block computes, the next one's parameters are gathered if it is in `freed`, and
    the gradients of the one before are reduced; those of the first block and of the root are reduced at the end."""
    order = list(reversed(blocks))
    gathers = [block.gather if block in freed else 0.0 for block in order] + [0.0]
    total = _beside(root.backward, gather=gathers[0])
    reduces = [0.0] + [block.reduce for block in order]
    for block, gather, reduce in zip(order, gathers[1:], reduces, strict=False):
        total += _beside(block.backward, gather=gather, reduce=reduce)
    return total + Counter({REDUCE: reduces[-1] + root.reduce})


def _beside(compute: Seconds, *, gather: float = 0.0, reduce: float = 0.0) -> Seconds:
    """The seconds of a block that computes while others exchange: those of what takes longer."""
    if gather + reduce <= compute.total():
        return Counter(compute)
    return Counter({GATHER: gather, REDUCE: reduce})


def _group_times(joined: Joined, schedule: Schedule, step: PricedStep, sharding: Sharding) -> list[_GroupTimes]:
    """The times of every group, the root's first, blocks in the order of their forwards."""
    forward: dict[str, Seconds] = {}
    backward: dict[str, Seconds] = {}
    kinds = _bounds_of_nodes(step)
    names, paths = joined.prices[0].nodes, joined.prices[0].modules
    blocks = {group.name for group in sharding.blocks}
    seen: set[int] = set()
    for index in schedule.evaluations:
        op = joined.problem.ops[index]
        first = index < joined.problem.forward_ops and index not in seen
        seen.add(index)
        local = joined.owner[index][1]
        block = block_of(paths[local])
        of_block = (forward if first else backward).setdefault(block if block in blocks else "", Counter())
        of_block[kinds.get(names[local], MEMORY)] += op.seconds  # type: ignore[assignment]
    in_order = ["", *(name for name in forward if name)]
    by_name = {group.name: group for group in sharding.groups}
    nothing = ParameterGroup("", frozenset(), 0, 0, 0)
    cluster = sharding.cluster
    found = []
    for name in in_order:
        group = by_name.get(name, nothing)
        gather = cluster.dp_shard.gather_seconds(group.gathered_bytes) if group.gathered_bytes else 0.0
        reduce = 0.0
        if group.reduced_bytes:
            share = group.reduced_bytes // cluster.mesh.dp_shard
            reduce = cluster.dp_shard.gather_seconds(group.reduced_bytes) + cluster.dp_replicate.sum_seconds(share)
        computed = forward.get(name, Counter()), backward.get(name, Counter())
        found.append(_GroupTimes(group, *computed, gather, reduce))
    return found


def _bounds_of_nodes(step: PricedStep) -> dict[str, str]:
    """Each node's bottleneck in the only region, by name; nodes that are left out are bound by memory."""
    (region,) = step.traced.regions
    found: dict[str, str] = {}
    for node in region.held_nodes:
        if isinstance(node, fx.Node) and is_exchange(node):
            found[node.name] = EXCHANGE
        elif bound_by_arithmetic(node, step.settings.hardware):
            found[node.name] = COMPUTE
    return found
