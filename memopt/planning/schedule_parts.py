"""A plan's schedule by region; and by module, what it saves, recomputes and offloads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import fx

from memopt.account.account import EAGER, live_versions
from memopt.capture.joint import JointGraph
from memopt.planning.joined import Joined
from memopt.planning.priced_step import PricedStep, TracedStep
from memopt.solver import RematProblem, Schedule
from passes import ApplySchedule, HostStay
from passes.graphs.graph_text import format_target


@dataclass(frozen=True)
class RegionSchedule:
    """The schedule of one region: the order in which its nodes run, some several times, and the values offloaded."""

    fingerprint: str
    """Hash of the joint graph that the schedule is for."""
    evaluations: tuple[str, ...]
    """Node names in the order in which they run; a recomputed node is named once for each time."""
    boundary: int
    """How many of `evaluations` belong to the forward."""
    offloads: tuple[HostStay, ...] = ()
    """Values that are copied to the host and back."""
    steps: tuple[int, ...] = ()
    """Numbers of the inputs that are parameters which the optimizer steps before the end of the backward."""
    hosted: tuple[int, ...] = ()
    """Numbers of the inputs that are parameters which lie on the host."""


def scheduled_graph(joint: JointGraph, schedule: RegionSchedule) -> fx.GraphModule:
    """The joint graph with an extra node for each recomputation and each copy to and from the host in the schedule."""
    order = schedule.evaluations, schedule.boundary, joint.forward_outputs
    return ApplySchedule(*order, schedule.offloads)(joint.module)


def halves(joined: Joined, schedule: Schedule) -> list[tuple[list[int], list[int]]]:
    """By region the positions in the schedule of its evaluations: up to the last one of its forward, and after it."""
    found: list[tuple[list[int], list[int]]] = [([], []) for _ in joined.prices]
    left = [set(range(priced.problem.forward_ops)) for priced in joined.prices]
    for position, index in enumerate(schedule.evaluations):
        region, local = joined.owner[index]
        found[region][0 if left[region] else 1].append(position)
        left[region].discard(local)
    return found


def split(joined: Joined, traced: TracedStep, schedule: Schedule) -> tuple[RegionSchedule, ...]:
    """The schedule of each region, from the one schedule of the joined problem."""
    offloads = _region_offloads(joined, schedule)
    steps = tuple(sorted(joined.steps.values()))
    found = []
    for number, positions in enumerate(halves(joined, schedule)):
        region, priced = traced.regions[number], joined.prices[number]
        names = ([priced.nodes[joined.owner[schedule.evaluations[at]][1]] for at in half] for half in positions)
        forward, backward = (tuple(filter(None, half)) for half in names)
        stays = tuple(offloads.get(number, ()))
        order = (*forward, *backward)
        found.append(RegionSchedule(region.fingerprint, order, len(forward), stays, steps, priced.hosted))
    return tuple(found)


def _region_offloads(joined: Joined, schedule: Schedule) -> dict[int, list[HostStay]]:
    """Region → its offloads, with positions among its own evaluations; regions without offloads are left out. An event
    while another region runs moves to the end of this region's forward or to the start of its backward: the value's
    device memory is then free earlier, and for longer, than planned."""
    if not schedule.offloads:
        return {}
    regions = range(len(joined.prices))
    before = [[0] for _ in regions]  # region → position in the schedule → number of the region's evaluations before it
    for index in schedule.evaluations:
        owner, local = joined.owner[index]
        for region in regions:
            before[region].append(before[region][-1] + (region == owner and bool(joined.prices[owner].nodes[local])))
    values = [(region, value) for region in regions for value in joined.prices[region].values]
    offloads: dict[int, list[HostStay]] = {}
    for offload in schedule.offloads:
        region, value = values[offload.storage]
        own = before[region]
        later = (own[offload.freed_before], own[offload.fetch_from], own[offload.back_before])
        offloads.setdefault(region, []).append(HostStay(value, own[offload.out_after + 1] - 1, *later))
    return offloads


@dataclass(frozen=True)
class ModuleRow:
    """One module's row in a plan's table. Bytes are of a whole step, seconds by the time model."""

    path: str
    """Qualified name of the module; empty for operators outside of any submodule."""
    ops: int = 0
    """Operators that the module's forward runs."""
    saved_bytes: int = 0
    """Bytes that stay on the device from the forward to the backward."""
    recomputed_bytes: int = 0
    """Bytes that recomputation makes a second (or further) time."""
    recomputed_ops: int = 0
    """Operators that recomputation runs, each counted as often as it is recomputed."""
    seconds: float = 0.0
    """Seconds of the module's forward, each operator once."""
    added_seconds: float = 0.0
    """Seconds of recomputation."""
    offloaded_bytes: int = 0
    """Bytes that are copied to the host's memory and back."""


def module_rows(joined: Joined, schedule: Schedule) -> tuple[ModuleRow, ...]:
    """For each module, in the order of the forward: what it saves for the backward, recomputes and offloads."""
    problem = joined.problem
    saved = _saved_storages(problem, schedule)
    recomputed = schedule.recomputed()
    moved = Counter(offload.storage for offload in schedule.offloads)
    rows: dict[str, ModuleRow] = {}
    for index, (region, local) in enumerate(joined.owner[: problem.forward_ops]):
        op, times = problem.ops[index], recomputed.get(index, 0)
        if op.is_receipt:
            continue
        path = joined.prices[region].modules[local]
        row = rows.get(path, ModuleRow(path))
        nbytes = {storage: problem.storages[storage].bytes for storage in op.makes}
        rows[path] = ModuleRow(
            path,
            row.ops + 1,
            row.saved_bytes + sum(nbytes[storage] for storage in op.makes if storage in saved),
            row.recomputed_bytes + sum(nbytes.values()) * times,
            row.recomputed_ops + times,
            row.seconds + op.seconds,
            row.added_seconds + op.seconds * times,
            row.offloaded_bytes + sum(nbytes[storage] * moved[storage] for storage in op.makes),
        )
    return tuple(rows.values())


@dataclass(frozen=True)
class DecisionRow:
    """The calls of one operator in one module that are never recomputed, as they make a discrete choice like `topk`."""

    operator: str
    """Name of the operator: "topk"."""
    path: str
    """Qualified name of the module; empty for operators outside of any submodule."""
    calls: int = 0
    saved_bytes: int = 0
    """Bytes of their results that stay on the device from the forward to the backward."""


def decision_rows(joined: Joined, step: PricedStep, schedule: Schedule) -> tuple[DecisionRow, ...]:
    """The operators that are never recomputed as they make a discrete choice (`topk`), with the bytes saved for it."""
    problem, card = joined.problem, step.settings.hardware
    saved = _saved_storages(problem, schedule)
    names = [
        {node.name: operator_name(node) for node in step.traced.decisions(number, card)}
        for number in range(len(step.traced.regions))
    ]
    rows: dict[tuple[str, str], DecisionRow] = {}
    for index, (region, local) in enumerate(joined.owner[: problem.forward_ops]):
        name = names[region].get(joined.prices[region].nodes[local])
        if name is not None:
            key = name, joined.prices[region].modules[local]
            row = rows.get(key, DecisionRow(*key))
            nbytes = sum(problem.storages[storage].bytes for storage in problem.ops[index].makes if storage in saved)
            rows[key] = replace(row, calls=row.calls + 1, saved_bytes=row.saved_bytes + nbytes)
    return tuple(rows.values())


def _saved_storages(problem: RematProblem, schedule: Schedule) -> set[int]:
    """Storages that the backward reads as the forward made them, and that are on the device between the two."""
    boundary = forward_evaluations(problem, schedule)
    read = {storage for index in schedule.evaluations[boundary:] for storage in problem.ops[index].reads}
    remade = {storage for index in schedule.recomputed() for storage in problem.ops[index].makes}
    away = {offload.storage for offload in schedule.offloads if offload.freed_before <= boundary <= offload.fetch_from}
    return read - remade - away


def held_after_forward(problem: RematProblem, schedule: Schedule) -> int:
    """Bytes that the forward leaves for the backward and the caller."""
    return sum(problem.storages[storage].bytes for storage in held_storages(problem, schedule))


def held_storages(problem: RematProblem, schedule: Schedule) -> Iterator[int]:
    """The storages that the forward leaves for the backward and the caller, without gradients of its outputs."""
    boundary = forward_evaluations(problem, schedule)
    for storage, made in live_versions(problem, schedule, boundary):
        given = problem.storages[storage].kept and problem.ops[problem.producer[storage]].is_receipt
        if made < boundary and not given:
            yield storage


def forward_evaluations(problem: RematProblem, schedule: Schedule) -> int:
    """The number of evaluations in the forward: all up to the first evaluation of the last forward op."""
    return schedule.evaluations.index(problem.forward_ops - 1) + 1 if problem.forward_ops else 0


def evaluations_until_return(problem: RematProblem, schedule: Schedule) -> int:
    """How many evaluations come before the forward returns, without ops that only receive the gradients of its outputs
    (`Op.is_receipt`): their workspace includes what the caller's code allocates before the backward."""
    last = problem.forward_ops - 1
    while last >= 0 and problem.ops[last].name != EAGER and problem.ops[last].is_receipt:
        last -= 1
    return schedule.evaluations.index(last) + 1 if last >= 0 else 0


def operator_name(node: fx.Node) -> str:
    """The name of a node's operator without namespace and overload ("addmm"), or of an input itself."""
    if node.op != "call_function":
        return node.name
    name = format_target(node.target)
    return name.split(".")[1] if "." in name else name
