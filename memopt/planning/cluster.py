"""A plan for one card of a cluster: its options, what it assumes, and how a call's parameters are spread."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from memopt.account.sharded import Sharding
from memopt.capture.joint import JointGraph
from memopt.capture.tensor_parallel import TensorParallel, exchange_seconds, is_exchange, meta_copy
from memopt.compat.host import HOST
from memopt.device.cluster import CARDS_PER_NODE, Cluster, check_cluster
from memopt.levers import DEFAULT_LEVERS
from memopt.price.priced_graph import NodePrice, Reduction

DTYPES = {"auto": torch.bfloat16, "bf16": torch.bfloat16, "fp32": torch.float32}
"""The dtype in which parameters are gathered and a step computes, by the option `precision`."""


@dataclass(frozen=True)
class ClusterOptions:
    """The cluster to plan for, the dtype in which parameters are gathered, and how layers are split among cards."""

    cluster: Cluster
    dtype: torch.dtype
    tp_plan: Mapping[str, str] | None = None
    """The styles of layers by patterns of their paths; None for the model's own."""

    def one_card(self, model: nn.Module) -> nn.Module:
        """A copy of the model on "meta" as one card has it: parameters that tensor parallelism splits have their local
        shape, all others their full shape, as before `fully_shard`. Raises `ValueError` where tensor
        parallelism cannot split the model."""
        cards, copied = self.cluster.mesh.tp, meta_copy(model)
        return copied if cards == 1 else TensorParallel.of(model, cards, self.tp_plan).part_of(copied)

    def notes(self) -> tuple[str, ...]:
        """What a plan for a cluster assumes, in sentences."""
        mesh, joined = self.cluster.mesh, self.cluster.interconnect
        dtype = str(self.dtype).removeprefix("torch.")
        links = [joined.within] + ([joined.between] if joined.between else [])
        rates = "; ".join(
            f"{link.source}, of which {link.efficiency:.0%} is assumed to be reached, and "
            f"{1e6 * link.step_seconds:g} µs for each step of a ring collective"
            for link in links
        )
        notes = [
            f"planned for one of {mesh.cards:,} cards as FSDP2 runs: a block's parameters are gathered in {dtype} "
            "while the block before computes, and freed after it unless the plan keeps them; those outside of blocks "
            "are one group and stay gathered; gradients are reduced in float32 when a block's backward is done; shards "
            "keep the parameters' dtype",
            f"{joined.name}, {CARDS_PER_NODE} cards in a node: {rates}",
            "NCCL's buffers, which torch's allocator does not hold, are not counted",
        ]
        if mesh.tp > 1:
            notes.append(
                f"each of the {mesh.tp} cards of a 'tp' group has a part of the heads and of the widths of layers, "
                "and between layers a part of the sequence; compute waits for the exchanges"
            )
        return tuple(notes)


def check_cluster_options(
    mesh: Mapping[str, int] | None,
    interconnect: str | None,
    tp_plan: Mapping[str, str] | None,
    *,
    device: str | None,
    precision: Any,
    optimizer: Any,
    allow: Collection[str],
) -> ClusterOptions | None:
    """The cluster to plan for; None where no mesh is given, which means one card. The keyword arguments are checked for
    values that do not work on a cluster. Raises `TypeError` or `ValueError`."""
    cluster = check_cluster(mesh, interconnect)
    if cluster is None:
        if tp_plan is not None:
            raise ValueError("tp_plan needs mesh too, such as mesh={'dp_shard': 8, 'tp': 8}")
        return None
    if device in (None, HOST.type):
        raise ValueError(f"with mesh, device must name the card to plan for, such as device='h100', not {device!r}")
    if not isinstance(precision, str) or precision not in DTYPES:
        known = ", ".join(map(repr, DTYPES))
        raise ValueError(
            f"with mesh, precision must be one of {known}, the dtype of gathered parameters, not {precision!r}"
        )
    if isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"with mesh, optimizer must be a class or its name, since this {type(optimizer).__name__} holds whole "
            f"parameters; give {type(optimizer).__name__}, or functools.partial of it"
        )
    if further := sorted(set(allow) - DEFAULT_LEVERS):
        raise ValueError(f"{further[0]!r} in allow is not planned for a cluster; take it out of allow, or give no mesh")
    if tp_plan is not None and cluster.mesh.tp == 1:
        raise ValueError("tp_plan needs 'tp' in mesh, such as mesh={'dp_shard': 8, 'tp': 8}")
    return ClusterOptions(cluster, DTYPES[precision], tp_plan)


def reductions_of(sharding: Sharding, region: JointGraph, *, accumulating: bool) -> tuple[Reduction, ...]:
    """The reduce-scatters of the gradients that the only graph of a call makes, one for each group of parameters.
    `accumulating`: shards of gradients exist already, and are added to.

    The account counts one buffer, as large as the largest block needs. A reduction's own bytes are those beyond it: 0
    for a block, and for the root module's parameters the bytes by which their buffer is larger."""
    given = {number: region.trace.region.parameter_ids.get(number) for number in region.inputs_with_gradients}
    found = []
    for group in sharding.groups:
        positions = frozenset(region.forward_outputs + at for at, one in given.items() if one in group.numbers)
        beyond = 0 if group.name else max(0, group.reduced_bytes - sharding.exchange_bytes)
        if positions:
            made = 0 if accumulating else group.shard_bytes
            found.append(Reduction(f"reduce_{group.name or 'root'}", positions, beyond, made))
    return tuple(found)


def exchange_prices(sharding: Sharding, nodes: Iterable[fx.Node]) -> dict[fx.Node, NodePrice]:
    """The prices of the exchanges of tensor parallelism among these nodes: seconds on the links between cards."""
    ring = sharding.cluster.tp
    return {node: NodePrice(exchange_seconds(node, ring), 0) for node in nodes if is_exchange(node)}
