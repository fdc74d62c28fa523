"""The ranges of values that a model's regions had on sample batches, and which operators may therefore compute in
fp16."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from itertools import takewhile
from typing import Any

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
from memopt.rewrite.policy import PrecisionPlan
from memopt.rewrite.screen import KeptOut, Range, Ranges, Screening, kept_out, looking_bytes
from memopt.rewrite.trace import rewrite
from memopt.saved_values import values_restored
from memopt.training_state import containers_restored, undone
from memopt.units import size
from passes import format_graph
from passes.graphs.graph_text import format_node

NO_VALUES = "the plan was made without running the model on real values"
WITHIN = "all values are within range"


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
            screening = Screening(module)
            results, ran = screening.run_all(inputs), True
            self.modules[text] = module
            found = self.found.setdefault(text, {})
            for name, entry in screening.ranges.items():
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
