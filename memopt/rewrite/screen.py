"""Finds the operators whose values leave fp16's range on sample batches, on which a model's regions are run; they
compute in fp32."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, TypeAlias

import torch
from torch import fx, nn

from memopt.account.account import distinct_bytes
from memopt.account.eager_bytes import EagerBytes
from memopt.capture.caller_modes import CallerModes
from memopt.capture.data_sizes import is_real, new_symbols
from memopt.capture.dry_run import Between, stand_in
from memopt.capture.dynamo import CallStopped, GraphBreak, compile_call, in_brief, training_call
from memopt.capture.dynamo_graph import forward_of
from memopt.capture.inputs import Call, call_signature, tensors_in
from memopt.capture.operators import Decide, OperatorGraph, Rewriting, Untraceable
from memopt.capture.region import RecordedRegion
from memopt.compat.operators import plain_tensors
from memopt.device.devices import device_of
from memopt.rewrite.dtypes import PrecisionPlan, only_read_by
from memopt.rewrite.trace import rewrite
from memopt.saved_values import values_restored
from memopt.training_state import containers_restored, undone
from memopt.units import size
from passes import format_graph
from passes.graphs.graph_text import format_node
from passes.graphs.node_facts import tensors
from passes.graphs.op_kinds import follows_input, is_view, mutated_arguments, op_name

NO_VALUES = "the plan was made without running the model on real values"
WITHIN = "all values are within range"

LARGEST = 65504.0
"""The largest number in fp16."""
HEADROOM = 2.0
"""Values above half of fp16's range count as beyond it, since another batch may have larger ones."""
ROUNDED_TO_ZERO = 2.0**-25
"""Half of fp16's smallest number, 2^-24: magnitudes up to this are rounded to zero."""
UNIT = 2.0**-11
"""fp16's unit roundoff: a value smaller than this fraction of another one is lost in a sum with it."""
LOST_SHARE = 0.01
"""The largest share of nonzero values that an operator in fp16 may lose."""
_BLOCK_ON_HOST, _BLOCK = 2**15, 2**22
# The position of the mask among the arguments of scaled_dot_product_attention.
_MASK = 3

KeptOut: TypeAlias = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Range:
    """The range of a value on the sample batch: least and largest finite element, and the share that fp16 loses.

    `lost` is the share of nonzero elements that fp16 rounds to zero although they matter: they are larger than the
    rounding error of the largest element in their row (the last dimension)."""

    low: float = 0.0
    high: float = 0.0
    lost: float = 0.0
    inside: float = 0.0
    """A bound on intermediate values of the kernel: attention's scores, by the norms of queries and keys."""

    def joined(self, other: Range) -> Range:
        """The range that covers both, for several tensors or several runs."""
        return Range(
            min(self.low, other.low),
            max(self.high, other.high),
            max(self.lost, other.lost),
            max(self.inside, other.inside),
        )


Ranges: TypeAlias = Mapping[str, Range]
"""Ranges by name of a node."""


def screened(module: fx.GraphModule, inputs: Sequence[Any]) -> tuple[Any, Ranges]:
    """Run an operator graph on real values, unchanged: its results, and the range of every value.

    It runs without gradients and frees each value after its last use. Writes of the graph to its inputs take effect."""
    run = _Screening(module)
    with plain_tensors(), torch.no_grad():
        return run.run(*inputs), run.ranges


class _Screening(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.ranges: dict[str, Range] = {}

    def run_node(self, n: fx.Node) -> Any:
        score = 0.0
        if op_name(n) == "scaled_dot_product_attention":
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            score = _largest_score(args[0], args[1], kwargs.get("scale"))
        result = super().run_node(n)
        source = n.all_input_nodes[0] if is_view(n) else None
        if n.op == "output":
            return result
        if source is not None and source.name in self.ranges and _as_many(n, source):
            self.ranges[n.name] = self.ranges[source.name]
            return result
        for tensor in filter(torch.is_floating_point, tensors(result)):
            found = replace(range_of(tensor), inside=score)
            self.ranges[n.name] = found.joined(self.ranges[n.name]) if n.name in self.ranges else found
        return result


def _as_many(view: fx.Node, source: fx.Node) -> bool:
    """Returns whether a view has all elements of its source."""
    sizes = [pair.meta["val"].numel() for pair in (view, source) if isinstance(pair.meta.get("val"), torch.Tensor)]
    return len(sizes) == 2 and sizes[0] == sizes[1]


def range_of(tensor: torch.Tensor) -> Range:
    """Returns the range of a tensor, found block by block, so that a large tensor is never copied whole."""
    low = high = 0.0
    lost = 0
    for block in _blocks(tensor.detach()):
        least, most, largest = _rows(block)
        if not bool(torch.isfinite(largest).all()):
            block = torch.nan_to_num(block, nan=0.0, posinf=0.0, neginf=0.0)
            least, most, largest = _rows(block)
        low, high = min(low, float(least.min())), max(high, float(most.max()))
        # In rows with anything larger, what becomes zero is below their rounding.
        small = (largest > 0) & (largest < ROUNDED_TO_ZERO / UNIT)
        if bool(small.any()):
            size = block[small].abs()
            beside = largest[small] * UNIT if size.dim() < 2 else largest[small].unsqueeze(-1) * UNIT
            lost += int(((size > beside) & (size <= ROUNDED_TO_ZERO)).sum())
    return Range(low, high, lost / int(torch.count_nonzero(tensor)) if lost else 0.0)


def _rows(block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns for every row the least and the largest element and the largest magnitude; a scalar is one row."""
    least, most = torch.aminmax(block, dim=-1) if block.dim() else (block, block)
    return least, most, torch.maximum(most, -least)


def looking_bytes(device_type: str) -> int:
    """The most bytes that `range_of` allocates: copies and masks of a block of the tensor, and results for its rows."""
    return 24 * _largest_block(device_type)


def _largest_block(device_type: str) -> int:
    return _BLOCK_ON_HOST if device_of(device_type).is_host else _BLOCK


def _blocks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields a tensor in blocks of whole rows, each with few elements."""
    if tensor.numel() == 0:
        return
    sizes, largest = tensor.shape[:-1], _largest_block(tensor.device.type)
    if tensor.numel() <= largest or not sizes or max(sizes) == 1:
        yield tensor
        return
    widest = max(range(len(sizes)), key=lambda dim: sizes[dim])
    parts = min(sizes[widest], math.ceil(tensor.numel() / largest))
    for part in tensor.chunk(parts, widest):
        yield from _blocks(part)


def _largest_score(query: torch.Tensor, key: torch.Tensor, scale: float | None) -> float:
    """Returns a bound on attention's scores: the largest norm of a query times that of a key."""
    if not query.numel() or not key.numel():
        return 0.0
    longest = [float(operand.detach().norm(dim=-1).max()) for operand in (query, key)]
    return math.prod(longest) * (1 / math.sqrt(query.shape[-1]) if scale is None else abs(scale))


def kept_out(module: fx.GraphModule, ranges: Ranges, decide: Callable[[KeptOut], PrecisionPlan]) -> KeptOut:
    """Returns the operators that must not compute in fp16, each with the reason, since their values leave fp16's range.

    `ranges` has the range of each value on sample data. `decide` returns the plan of dtypes when given operators are
    kept out of fp16; it is called again, with more of them, until no fp16 value of its plan leaves the range."""
    kept: dict[str, str] = {}
    while True:
        choices = decide(tuple(kept.items())).choices
        low = [node for node in module.graph.nodes if node.name in choices]
        low = [node for node in low if choices[node.name].dtype == torch.float16]
        # Results are checked before operands: a reader may be in fp32 without a reason of its own.
        for reason_of in (_because_of_results, _because_of_operands):
            found = {_origin(node): reason for node in low if (reason := reason_of(node, ranges))}
            new = {name: reason for name, reason in found.items() if name not in kept}
            if new:
                kept.update(new)
                break
        else:
            return tuple(kept.items())


def _because_of_results(node: fx.Node, ranges: Ranges) -> str:
    """Returns why a node's results need fp32, or ""."""
    found = ranges.get(node.name, Range())
    largest = max(found.high, 0.0 if _masks(node) else -found.low)
    if largest > LARGEST / HEADROOM:
        return f"its values reached {largest:.3g} on the sample batch, and fp16 ends at {LARGEST:.0f}"
    if found.inside > LARGEST / HEADROOM:
        return f"its attention scores may reach {found.inside:.3g} on the sample batch, and fp16 ends at {LARGEST:.0f}"
    if found.lost > LOST_SHARE:
        return f"{found.lost:.0%} of its nonzero values on the sample batch are too small for fp16"
    return ""


def _because_of_operands(node: fx.Node, ranges: Ranges) -> str:
    """Returns why a node's operands must not be cast to fp16, or ""."""
    mask = node.args[_MASK] if op_name(node) == "scaled_dot_product_attention" and len(node.args) > _MASK else None
    for operand in node.all_input_nodes:
        found = ranges.get(operand.name, Range())
        masked = operand is mask or op_name(node) == "softmax" or _masks(operand)
        largest = max(found.high, 0.0 if masked else -found.low)
        if largest > LARGEST / HEADROOM:
            return (
                f"reads {operand.name}, which reached {largest:.3g} on the sample batch, and fp16 ends at {LARGEST:.0f}"
            )
        if found.lost > LOST_SHARE:
            return f"reads {operand.name}: {found.lost:.0%} of its nonzero values are too small for fp16"
    return ""


def _masks(node: fx.Node) -> bool:
    """Returns whether only softmax reads a value, so that its large negative elements become zeros in any dtype."""
    return only_read_by(node, {"softmax"})


def _origin(node: fx.Node) -> str:
    """Returns the name of the node that decides the dtype: for an in-place call, the one that made the value."""
    while written := mutated_arguments(node):
        node = written[0]
        while follows_input(node) and node.all_input_nodes:
            node = node.all_input_nodes[0]
    return node.name


class _NotRun(Exception):
    """Raised where a graph must not be run on the sample batch; the reason follows "since" in a note of the plan."""


class Screenings:
    """The ranges of the values in each region's graph, as measured on the sample batch when the region was first run;
    later captures of a region use the same ranges."""

    def __init__(self) -> None:
        self._ranges: dict[str, Ranges] = {}
        self._lines: dict[str, dict[str, Range]] = {}
        """By the text of a region's inputs, then by the text of a node, the range of its value: graphs that other
        rewritings make of the region have some of these nodes."""
        self._looked: set[str] = set()
        """Signatures of calls that have been run, with the state of autocast."""
        self._why_not = NO_VALUES

    def look(
        self,
        model: nn.Module,
        call: Call,
        loss_fn: Callable[..., Any] | None,
        rewritings: Sequence[Rewriting],
        *,
        room_bytes: int | None,
        differentiate_all: bool,
    ) -> None:
        """Runs the forward of a training call in fp32, without gradients, to record the ranges of its values, unless a
        call of the same shapes, dtypes and other arguments was run before, with autocast in the same state.

        The forward runs once for each way in which `rewritings` change the graphs before dtypes are decided. It may
        hold `room_bytes` (None: any) besides the model and the inputs. If it would hold more, if parameters or inputs
        have no values (fake or meta tensors), or if it fails, the plan says why values were not checked.
        `differentiate_all` is as for `RecordedRegion.record`."""
        signature = f"{call_signature(call)} {CallerModes.now()}"
        if signature in self._looked:
            return
        if not all(map(is_real, (*model.parameters(), *tensors_in(call)))):
            self._why_not = NO_VALUES
            return
        self._looked.add(signature)
        others = [takewhile(self._is_not_of, rewriting.deciders) for rewriting in rewritings]
        befores = list(dict.fromkeys(map(tuple, others)))
        look = _Look(befores, rewritings[0].planned_for, room_bytes, [*model.buffers(), *tensors_in(call)])
        try:
            look.run_forward(model, call, loss_fn, differentiate_all=differentiate_all)
        except _NotRun as reason:
            self._why_not = str(reason)
        except Exception as failure:  # planning the model reports what is wrong with it
            self._why_not = f"the forward failed: {in_brief(failure)}"
        else:
            self._why_not = look.why_not or self._why_not
            for text, ranges in look.found.items():
                self._ranges.setdefault(text, ranges)
                lines = self._lines.setdefault(_inputs(look.modules[text]), {})
                for node in look.modules[text].graph.nodes:
                    if node.name in ranges:
                        lines.setdefault(format_node(node), ranges[node.name])

    def _is_not_of(self, decide: Decide) -> bool:
        """Returns whether a decider decides without these screenings."""
        return getattr(decide, "screenings", None) is not self

    def decide(self, graph: OperatorGraph, decide: Callable[[KeptOut], PrecisionPlan]) -> tuple[PrecisionPlan, str]:
        """The plan of dtypes that `decide` makes when it is given the operators to keep out of fp16, since their
        values leave its range; and a note on these operators."""
        ranges, part = self._ranges.get(_fingerprint(graph.module)), ""
        if ranges is None:
            lines = self._lines.get(_inputs(graph.module), {})  # of nodes that other rewritings of its region share
            texts = {node.name: format_node(node) for node in graph.module.graph.nodes}
            ranges = {name: lines[text] for name, text in texts.items() if text in lines}
            part = f" in part, since {self._why_not};"
        if not ranges:
            return decide(()), f"values were not checked against fp16's range, since {self._why_not}; they may overflow"
        kept = kept_out(graph.module, ranges, decide)
        found = f"{len(kept)} ops have values beyond the range of fp16 and stay in fp32" if kept else WITHIN
        return decide(kept), f"values on a sample batch were checked against fp16's range:{part} {found}"


class _Look:
    """Runs the operator graphs of a sample batch, as several rewritings leave them; records ranges of values."""

    def __init__(
        self,
        befores: Sequence[tuple[Decide, ...]],
        planned_for: str,
        room_bytes: int | None,
        known: Collection[torch.Tensor],
    ) -> None:
        self.befores, self.planned_for, self.room_bytes = befores, planned_for, room_bytes
        self.known = {id(tensor) for tensor in known}
        self.found: dict[str, dict[str, Range]] = {}
        self.modules: dict[str, fx.GraphModule] = {}
        self.why_not = ""
        """Why a graph was not run; "" if all were."""

    def run_forward(
        self, model: nn.Module, call: Call, loss_fn: Callable[..., Any] | None, *, differentiate_all: bool
    ) -> None:
        """Run the forward of a training call without gradients, each region that has an operator graph by this graph.

        The operator graphs are those that planning captures for the same call; other code runs as it is. Buffers,
        random generators, inputs and module attributes are restored afterwards. Raises what the model raises, and
        `CaptureError` where the forward cannot be captured."""

        def whole(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
            if run := self._runner(graph_module, inputs, differentiate_all=differentiate_all):
                run(*inputs)
            raise CallStopped  # the rest of the model's Python code does not run

        def region(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            run = self._runner(graph_module, inputs, differentiate_all=True) or forward_of(graph_module)
            return lambda *given: stand_in(graph_module, run, Between(), 0, given)

        args, kwargs = call
        with undone(model), values_restored(tensors_in(call)), containers_restored(call):
            try:
                compile_call(training_call(model, loss_fn), whole, whole=True)(*args, **kwargs)
            except CallStopped:
                return
            except GraphBreak:
                pass
            compile_call(training_call(model, loss_fn), region, whole=False)(*args, **kwargs)

    def _runner(
        self, graph_module: fx.GraphModule, inputs: Sequence[Any], *, differentiate_all: bool
    ) -> Callable[..., Any] | None:
        """A function that runs a region's operator graph; None where it has none."""
        region = RecordedRegion.record(graph_module, inputs, differentiate_all=differentiate_all)
        if not torch.is_grad_enabled():
            return None
        try:
            graph = region.operator_graph(self.planned_for)
        except Untraceable:
            return None
        return lambda *given: self._run_region(graph, given)

    def _run_region(self, graph: OperatorGraph, inputs: Sequence[Any]) -> Any:
        modules = [rewrite(graph, before).stages[-1] for before in self.befores]
        results, ran = None, False
        for text, module in {_fingerprint(module): module for module in modules}.items():
            try:
                self.check_room(module, inputs)
            except _NotRun as reason:
                self.why_not = str(reason)
                continue
            results = None  # freed before the next run
            results, ranges = screened(module, inputs)
            ran = True
            self.modules[text] = module
            found = self.found.setdefault(text, {})
            for name, entry in ranges.items():
                found[name] = entry.joined(found[name]) if name in found else entry
        if not ran:
            raise _NotRun(self.why_not)
        return results

    def check_room(self, module: fx.GraphModule, inputs: Sequence[Any]) -> None:
        if self.room_bytes is None:
            return
        given = [one for one in inputs if isinstance(one, torch.Tensor) and not isinstance(one, nn.Parameter)]
        needed = held_bytes(module) + distinct_bytes(value for value in given if id(value) not in self.known)
        if needed > self.room_bytes:
            raise _NotRun(
                f"the forward in fp32 would hold {size(needed)} where the budget leaves {size(max(0, self.room_bytes))}"
            )


def held_bytes(module: fx.GraphModule) -> int:
    """The peak bytes, besides its inputs, of running an operator graph without gradients while recording ranges.

    Found on fake tensors. Raises `_NotRun` where sizes depend on data."""
    if any(True for _ in new_symbols(module.graph)):
        raise _NotRun("sizes depend on data, so that the bytes which the forward would hold are not known")
    fakes = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    tensors = [fake for fake in fakes if isinstance(fake, torch.Tensor)]
    if not tensors:
        return 0
    mode: Any = tensors[0].fake_mode  # type: ignore[attr-defined]
    home = tensors[0].device.type
    live = EagerBytes(home, home)
    mixes, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True  # constants, and single numbers, are real
    try:
        with plain_tensors(), torch.no_grad(), mode, live:
            fx.Interpreter(module).run(*fakes)
    finally:
        mode.allow_non_fake_inputs = mixes
    return live.peak_bytes + looking_bytes(home)


def _inputs(module: fx.GraphModule) -> str:
    return "\n".join(map(format_node, module.graph.find_nodes(op="placeholder")))


def _fingerprint(module: fx.GraphModule) -> str:
    return hashlib.sha256(format_graph(module.graph).encode()).hexdigest()[:16]
