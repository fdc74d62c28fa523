"""What a plan changes in its captured step, by passes in operator graphs and joint graphs, and by the schedule: a
`Change` for each change to one operator, made from the facts of a graph's nodes."""

from __future__ import annotations

import linecache
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from memopt.capture.joint import JointGraph
from memopt.device.storages import storage_bytes
from memopt.planning.schedule_parts import RegionSchedule, operator_name, scheduled_graph
from memopt.price.price import RETURN_OUTPUTS
from memopt.price.priced_graph import PricedGraph
from memopt.units import size
from passes import SumInFp32, diff_graphs
from passes.graphs.graph_text import format_dtype
from passes.graphs.node_facts import backward_nodes, is_tangent, module_path, tensors
from passes.graphs.op_kinds import follows_input, is_cast, op_name

if TYPE_CHECKING:
    from memopt.planning.joined import Joined
    from memopt.planning.priced_step import TracedStep


DTYPE, CAST, FUSED, CHUNKED, REWRITTEN, REMOVED = "dtype", "cast", "fused", "chunked", "rewritten", "removed"
SAVED, RECOMPUTED, OFFLOADED, FREED = "saved as", "recomputed", "offloaded", "freed early"
IN_PLACE, KEPT, MOVED = "in place", "kept gathered", "moved"
KINDS = (DTYPE, CAST, FUSED, CHUNKED, REWRITTEN, REMOVED, SAVED, RECOMPUTED, OFFLOADED, FREED, IN_PLACE, KEPT, MOVED)
"""The kinds of changes, in the order in which the changes of a module are shown."""


@dataclass(frozen=True)
class Change:
    """A change of one kind (one of `KINDS`) to one operator."""

    kind: str
    op: str
    """Name of the node: in the operator graph for changes that passes made there, else in the captured joint graph."""
    module: str
    """Path of the module that called the operator, or whose call it differentiates; "" outside of submodules."""
    operator: str
    """The operator's name without namespace and overload: "addmm"."""
    number: int = 0
    """Position among the calls of the same operator by the same line in the same module, for comparing blocks."""
    detail: str = ""
    """Details of a change beyond its kind: the dtypes, or the operators that it replaces; part of `meaning`."""
    reason: str = ""
    readers: tuple[str, ...] = ()
    """Operators in whose backward a recomputed or fetched value is first read."""
    nbytes: int = 0
    """Bytes that are recomputed, copied to the host, or saved in fewer bits."""
    seconds: float = 0.0
    """Seconds of all recomputations of the operator, by the time model."""
    times: int = 0
    """How often the operator runs beyond the first time, or how often its value is offloaded."""
    source: str = ""
    """The line of the user's code that called the operator, as "file:line"; "" where none is known."""
    code: str = ""
    """The text of that line."""
    region: int = 0
    """Number of the captured region."""
    sign: str = ""
    """Between two plans: "+" for a change that only the later makes, "-" for one that only the earlier makes."""

    @property
    def meaning(self) -> tuple[object, ...]:
        """The key of the change: equal in two plans for the same change of the same operator."""
        return self.kind, self.module, self.operator, self.code, self.number, self.detail, self.times, self.region


def between(earlier: tuple[Change, ...], later: tuple[Change, ...]) -> tuple[Change, ...]:
    """The changes that only one of two plans makes: those of `earlier` with the sign "-", those of `later` with "+"."""
    old, new = ({change.meaning for change in changes} for changes in (earlier, later))
    gone = (replace(change, sign="-") for change in earlier if change.meaning not in new)
    come = (replace(change, sign="+") for change in later if change.meaning not in old)
    return (*gone, *come)


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_TORCH = os.path.dirname(torch.__file__) + os.sep


class GraphFacts:
    """The nodes of one graph by name. `change` makes a `Change` of a node, with what the graph tells about it."""

    def __init__(self, graph: fx.Graph, region: int) -> None:
        self.region = region
        self.nodes = {node.name: node for node in graph.nodes}
        self.modules = tuple(dict.fromkeys(module_path(node) for node in graph.nodes if node.op == "call_function"))
        self._number: dict[str, int] = {}
        self._line: dict[str, str] = {}
        calls: Counter[tuple[str, str, str]] = Counter()
        for node in graph.nodes:
            line = self._line[node.name] = source_line(node)
            call = module_path(node), operator_name(node), line
            self._number[node.name] = calls[call]
            calls[call] += 1

    def line(self, node: fx.Node) -> tuple[str, str]:
        """The line of the user's code that called a node, as "file:line" and as text; both "" where none is known."""
        source = self._line[node.name]
        path, _, line = source.rpartition(":")
        return source, linecache.getline(path, int(line)).strip() if source else ""

    def change(self, kind: str, node: fx.Node, **fields: Any) -> Change:
        """The change `kind` of a node, with the node's names, module and source line; `fields` are further fields."""
        source, code = self.line(node)
        named = node.name, module_path(node), operator_name(node), self._number[node.name]
        return Change(kind, *named, source=source, code=code, region=self.region, **fields)


def source_line(node: fx.Node) -> str:
    """The innermost line that called the node's operator, outside of torch if possible: "file:line"; or ""."""
    return _innermost(node.meta.get("stack_trace") or "")


@lru_cache(maxsize=1024)
def _innermost(trace: str) -> str:
    frames = _FRAME.findall(trace)
    own = [frame for frame in frames if not frame[0].startswith(_TORCH)]
    return ":".join((own or frames)[-1]) if frames else ""


_IN_WORDS = {SumInFp32.__name__: "the kernel sums in fp32 anyway"}
"""The words of `PlanDiff` for passes that belong to no lever, by the name of the pass."""
_CLEAN_UP = frozenset({"EliminateDeadCode", "MergeCasts"})
_OUR_CASTS = frozenset({"memopt.fp8_quantize", "memopt.fp8_dequantize"})
_NO_MEANING = frozenset({"detach", "detach_", "alias", "lift_fresh_copy"})


def pass_changes(captured: TracedStep) -> Iterator[Change]:
    """The changes that passes made to the operator graphs and to the joint graphs of all regions."""
    for number, region in enumerate(captured.regions):
        for operators in (region.operators, region.passes):
            if operators is not None and operators.stages:
                for names, reasons, before, after in operators.spans():
                    meant = [name for name in names if name not in _CLEAN_UP]
                    if meant:
                        yield from _Span(before, after, reasons, meant, number).changes()


class _Span:
    """Two graphs, before and after the passes of one decision."""

    def __init__(
        self, before: fx.GraphModule, after: fx.GraphModule, reasons: Mapping[str, str], names: list[str], number: int
    ) -> None:
        self.diff = diff_graphs(before, after)
        self.old, self.new = GraphFacts(before.graph, number), GraphFacts(after.graph, number)
        self.earlier = {new: self.old.nodes[old] for old, new in self.diff.renamed}
        self.added = {self.new.nodes[name] for name in self.diff.added}
        self.late = backward_nodes(after.graph)
        self.reasons, self.names = reasons, names
        self.by = ", ".join(_IN_WORDS.get(name) or f"by {name}" for name in names)

    def changes(self) -> Iterator[Change]:
        saved = [node for node in self.new.nodes.values() if self._is_saved(node)]
        for node in saved:
            yield self._saved(node)
        for node in self.new.nodes.values():
            if node.op == "call_function" and node not in self.added and not is_cast(node):
                yield from self._retyped(node)
        yield from self._replaced(saved)

    def _retyped(self, node: fx.Node) -> Iterator[Change]:
        """The change of a call's dtype, or of its operands' dtypes alone."""
        old = self.earlier.get(node.name) or self.old.nodes[node.name]
        before, after = _dtype(old), _dtype(node)
        reason = self.reasons.get(node.name, "")
        casts = [operand for operand in node.all_input_nodes if operand in self.added and is_cast(operand)]
        casts = [cast for cast in casts if cast not in self.late or node not in self.late]
        if before != after and before is not None and after is not None:
            if reason or casts or not (follows_input(node) or "getitem" in node.name):
                why = reason.removeprefix(f"{format_dtype(after)}: ") or self.by
                dtypes = f"{format_dtype(before)} → {format_dtype(after)}"
                yield self.new.change(DTYPE, node, detail=dtypes, reason=why, times=len(casts))
        elif casts and node not in self.late:
            to = ", ".join(dict.fromkeys(format_dtype(dtype) for cast in casts if (dtype := _dtype(cast))))
            why = reason.removeprefix(f"{to}: ")
            yield self.new.change(CAST, node, detail=f"to {to}", reason=why, times=len(casts))

    def _is_saved(self, node: fx.Node) -> bool:
        """Whether a forward value stands in for a wider one that the backward read before the passes ran."""
        if node in self.late or node.op != "call_function" or not self.late:
            return False
        late = [user for user in node.users if user in self.late]
        return bool(late) and (node in self.added or any(user in self.added and _casts(user) for user in late))

    def _saved(self, node: fx.Node) -> Change:
        value = node
        while value.all_input_nodes and (value in self.added or "getitem" in str(value.target)):
            value = value.all_input_nodes[0]
        narrow, wide = (sum(map(storage_bytes, tensors(one.meta["val"]))) for one in (node, value))
        dtype = _dtype(node)
        detail = format_dtype(dtype) if dtype else ""
        reason = f"{size(narrow)}, not {size(wide)}" if narrow < wide else ""
        return self.new.change(SAVED, value, detail=detail, reason=reason, nbytes=narrow)

    def _replaced(self, saved: list[fx.Node]) -> Iterator[Change]:
        """New operators, with the removed ones of the same module that they replace; and the other removed ones."""
        new = [node for node in self.new.nodes.values() if node in self.added and node not in saved]
        new = [node for node in new if not (_casts(node) or _only_moves(node))]
        gone: dict[str, list[fx.Node]] = {}
        for node in self._removed():
            # A single new operator replaces all that were removed, in whichever module.
            gone.setdefault(module_path(new[0] if len(new) == 1 else node), []).append(node)
        for node in new:
            replaced = dict.fromkeys(map(operator_name, gone.pop(module_path(node), [])))
            yield self.new.change(self._kind(), node, detail=", ".join(replaced), reason=self.by)
        for node in (node for nodes in gone.values() for node in nodes):
            if not is_cast(node):
                yield self.old.change(REMOVED, node, reason=self.by)
            elif not self.late:
                yield self.old.change(CAST, node, detail="removed", reason="not needed any more")

    def _removed(self) -> list[fx.Node]:
        """The removed calls that computed something which another value depended on."""
        dead: set[fx.Node] = set()
        for node in reversed(self.old.nodes.values()):
            if node.op == "call_function" and all(user in dead for user in node.users):
                dead.add(node)
        found = (self.old.nodes[name] for name in self.diff.removed)
        return [
            node for node in found if node not in dead and op_name(node) not in _NO_MEANING and not _only_moves(node)
        ]

    def _kind(self) -> str:
        if any(name.startswith("Fuse") for name in self.names):
            return FUSED
        return CHUNKED if any("Chunk" in name for name in self.names) else REWRITTEN


def _casts(node: fx.Node) -> bool:
    return is_cast(node) or str(node.target).removesuffix(".default") in _OUR_CASTS


def _only_moves(node: fx.Node) -> bool:
    return follows_input(node) or "getitem" in str(node.target) or node.op != "call_function"


def _dtype(node: fx.Node) -> torch.dtype | None:
    """The dtype of a node's first floating-point result."""
    values: Any = node.meta.get("val")
    return next((value.dtype for value in tensors(values) if value.is_floating_point()), None)


def schedule_changes(
    captured: TracedStep, joined: Joined, schedules: Sequence[RegionSchedule], *, order: bool = False
) -> Iterator[Change]:
    """The changes that schedules make to the joint graphs of all regions; with `order`, nodes that only moved too."""
    for number, (region, priced, schedule) in enumerate(zip(captured.regions, joined.prices, schedules, strict=True)):
        yield from _RegionChanges(number, region, priced, schedule).all(order=order)


class _RegionChanges:
    """The changes of one region's schedule."""

    def __init__(self, number: int, region: JointGraph, priced: PricedGraph, schedule: RegionSchedule) -> None:
        self.region, self.schedule, self.problem = region, schedule, priced.problem
        self.facts = GraphFacts(region.module.graph, number)
        self.index = {name: index for index, name in enumerate(priced.nodes) if name}
        self.value = {name: index for index, name in enumerate(priced.values) if name}
        self.returned = {storage for op in self.problem.ops if op.name == RETURN_OUTPUTS for storage in op.reads}
        self.late = backward_nodes(region.module.graph)
        self.forward_of: dict[int, fx.Node] = {}
        for node in region.module.graph.nodes:
            if node not in self.late and node.op == "call_function" and "seq_nr" in node.meta:
                self.forward_of.setdefault(node.meta["seq_nr"], node)

    def all(self, *, order: bool) -> Iterator[Change]:
        yield from self.recomputed()
        yield from self.offloaded()
        yield from self.freed()
        yield from self.in_place()
        if order:
            scheduled = scheduled_graph(self.region, self.schedule)
            for name in diff_graphs(self.region.module, scheduled).moved:
                yield self.facts.change(MOVED, self.facts.nodes[name])

    def recomputed(self) -> Iterator[Change]:
        again: dict[str, list[int]] = defaultdict(list)
        seen: set[str] = set()
        for position, name in enumerate(self.schedule.evaluations):
            if name in seen:
                again[name].append(position)
            seen.add(name)
        for name, positions in again.items():
            op = self.problem.ops[self.index[name]]
            yield self.facts.change(
                RECOMPUTED,
                self.facts.nodes[name],
                nbytes=sum(self.problem.storages[storage].bytes for storage in op.makes),
                seconds=op.seconds * len(positions),
                times=len(positions),
                readers=self._readers(op.makes, [position + 1 for position in positions]),
            )

    def offloaded(self) -> Iterator[Change]:
        backs: dict[str, list[int]] = defaultdict(list)
        for stay in self.schedule.offloads:
            backs[stay.value].append(stay.back_before)
        for name, positions in backs.items():
            storage = self.value[name]
            maker = self.facts.nodes[name]
            while maker.name not in self.index and maker.op != "placeholder":  # an element of an operator's results
                maker = maker.all_input_nodes[0]
            yield self.facts.change(
                OFFLOADED,
                maker,
                detail="" if maker.name == name else name,
                nbytes=self.problem.storages[storage].bytes,
                times=len(positions),
                readers=self._readers((storage,), positions),
            )

    def freed(self) -> Iterator[Change]:
        """A change for each parameter that is stepped within the backward, so that its gradient is freed early."""
        inputs = [node for node in self.facts.nodes.values() if node.op == "placeholder" and not is_tangent(node)]
        for number in self.schedule.steps:
            user = next((user for user in inputs[number].users if module_path(user)), inputs[number])
            nbytes = storage_bytes(inputs[number].meta["val"])
            reason = "its gradient, since the parameter is stepped in the backward"
            yield self.facts.change(FREED, user, detail=inputs[number].name, nbytes=nbytes, reason=reason)

    def in_place(self) -> Iterator[Change]:
        for call, operand in self.region.reuses:
            yield self.facts.change(IN_PLACE, self.facts.nodes[call], detail=operator_name(self.facts.nodes[operand]))

    def _readers(self, storages: Sequence[int], starts: Sequence[int]) -> tuple[str, ...]:
        """For each position in `starts`, the operator in whose backward the storages are first read from there on,
        directly or through what is recomputed from them; "the call's outputs" where only the caller gets them."""
        found = (self._first_reader(set(storages), start) for start in starts)
        return tuple(dict.fromkeys(reader for reader in found if reader))

    def _first_reader(self, storages: set[int], start: int) -> str:
        for position in range(start, len(self.schedule.evaluations)):
            name = self.schedule.evaluations[position]
            op = self.problem.ops[self.index[name]]
            if storages.intersection(op.reads):
                node = self.facts.nodes[name]
                if node in self.late and not is_cast(node):
                    return self._differentiated(node)
                storages.update(op.makes)
        return "the call's outputs" if storages & self.returned else ""

    def _differentiated(self, node: fx.Node) -> str:
        """The name of the forward's operator whose backward a node belongs to; its own name where that is unknown."""
        forward = self.forward_of.get(node.meta.get("seq_nr", -1))
        return operator_name(forward if forward and module_path(forward) == module_path(node) else node)
