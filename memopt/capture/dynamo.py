"""Compiles training calls with Dynamo and AOTAutograd, region by region, by a backend of ours."""

from __future__ import annotations

import gc
import itertools
import re
import weakref
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx, nn

from memopt.capture.author_modes import Untraceable, autocast_is_on
from memopt.capture.inputs import in_dtype
from memopt.capture.joint import JointGraph
from memopt.capture.operators import (
    NOTHING,
    Operators,
    Rewriting,
    needs_operators,
    operator_graph,
    rewrite,
    to_differentiate,
)
from memopt.compat import (
    BackendCompilerFailed,
    DynamoError,
    RecompileLimit,
    capture_settings,
    compile_with,
    drop_compilations,
    without_autocast,
)
from memopt.emit import ATEN, Lowered, Lowering, lowering_of_region
from memopt.errors import CaptureError

Backend = Callable[[fx.GraphModule, Sequence[Any]], Any]
Partition = Callable[[JointGraph], tuple[fx.GraphModule, fx.GraphModule]]

_numbers = itertools.count()


def training_call(
    model: nn.Module, loss_fn: Callable[..., Any] | None, floats: torch.dtype | None = None
) -> Callable[..., Any]:
    """The function that is captured: the model's own call, hooks included, or its loss on `(inputs, targets)`.

    It has a code object of its own, since Dynamo keeps and counts compilations by code object. `floats`: as for
    `loss_call`.
    """
    run: Any = model._call_impl  # not the model itself, whose call is memopt's by now
    call = loss_call(run, loss_fn, floats)
    call.__code__ = call.__code__.replace(co_name=f"training_call_{next(_numbers)}")
    return call


def loss_call(run: Callable[..., Any], loss_fn: Callable[..., Any] | None, floats: torch.dtype | None = None) -> Any:
    """What is called in training: `run` itself, or the loss of its output. `floats`, if given, is the dtype that the
    model takes its fp32 inputs in."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = in_dtype((args, kwargs), floats)
        return run(*args, **kwargs)

    def loss(inputs: Any, targets: Any) -> Any:
        assert loss_fn is not None
        inputs = in_dtype(inputs, floats)
        if isinstance(inputs, dict):
            return loss_fn(run(**inputs), targets)
        return loss_fn(run(*inputs) if isinstance(inputs, (tuple, list)) else run(inputs), targets)

    return forward if loss_fn is None else loss


class GraphBreak(CaptureError):
    """The call cannot be captured as one graph."""


class TooManyShapes(CaptureError):
    """Dynamo keeps as many compilations of the call as it may."""


class _Compilations:
    """The compiled regions of a call. They live here and not with Dynamo: what hangs on a code object is invisible to
    the garbage collector, so that a model that its own compiled regions refer to would never die."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.regions: list[Callable[..., Any]] = []


def _as_seen_by_dynamo(compilations: _Compilations) -> Backend:
    owner = weakref.ref(compilations, _died.append)

    def backend(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        kept = owner()
        assert kept is not None
        kept.regions.append(kept.backend(graph_module, inputs))
        number = len(kept.regions) - 1

        def region(*args: Any) -> Any:
            alive = owner()
            assert alive is not None
            return alive.regions[number](*args)

        return region

    _owners[backend] = owner
    return backend


_owners: weakref.WeakKeyDictionary[Backend, weakref.ref[_Compilations]] = weakref.WeakKeyDictionary()
_died: list[weakref.ref[_Compilations]] = []


def _drop_the_dead() -> None:
    """Have Dynamo forget what belonged to models that are gone."""
    if _died:
        _died.clear()
        drop_compilations(lambda backend: backend in _owners and _owners[backend]() is None)


def compile_call(call: Callable[..., Any], backend: Backend, *, whole: bool) -> Callable[..., Any]:
    """`call`, compiled region by region by `backend`; `whole`: as one region or not at all (`GraphBreak`).

    Raises what `backend` raises, and `TooManyShapes`.
    """
    _drop_the_dead()
    compilations = _Compilations(backend)
    compiled = compile_with(_as_seen_by_dynamo(compilations), call, whole=whole)

    def run(*args: Any, **kwargs: Any) -> Any:
        assert compilations.backend is backend  # keeps the regions alive as long as this function
        try:
            with capture_settings():
                return compiled(*args, **kwargs)
        except BackendCompilerFailed as failure:
            cause = getattr(failure, "inner_exception", None) or failure.__cause__ or failure
            raise cause from None
        except RecompileLimit as limit:
            raise TooManyShapes(
                "the model was called with more sets of shapes than torch.compile keeps; pad inputs to fewer lengths"
            ) from limit
        except DynamoError as failure:
            if not whole:
                raise
            reason = in_brief(failure)
        gc.collect()  # what Dynamo leaves of a failed compilation refers to itself and to the inputs
        raise GraphBreak(reason)

    return run


def in_brief(error: BaseException) -> str:
    """What an error says, without torch's advice on debugging."""
    text = " ".join(str(error).split()).removeprefix("Consider annotating your code using torch._check*(). ")
    inner = re.search(r"got \w+\((['\"])(.+?)\1\)", text)  # "… failed to run FX node with fake tensors: … got …"
    text = inner[2] if inner else re.split(r"\.(?= |$)| \(unhinted| Explanation:", text)[0]
    return text[:200] or type(error).__name__


def lower(
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    parameters: frozenset[int],
    partition: Partition,
    rewriting: Rewriting = NOTHING,
    lowering: Lowering = ATEN,
) -> Lowered:
    """Trace a captured region's joint graph, have it cut by `partition`, and make both halves callable by `lowering`.

    What `rewriting` decides is done to the region's operator graph before. A region without gradients has no joint
    graph: `partition` is not called then. Raises `PassError`, `NothingToRewrite`.
    """
    backend = lowering_of_region(graph_module, lowering)
    operators = _operators(graph_module, inputs, rewriting)
    decide_joint = None if autocast_is_on() else rewriting.joint
    rewritten = operators is not None and bool(operators.stages)

    def partition_traced(
        traced: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **_: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        joint = JointGraph.of(
            traced,
            num_fwd_outputs,
            parameters,
            operators,
            decide_joint,
            fused=backend.fuses,
            reinplace=rewriting.reinplace,
        )
        return partition(joint)

    if operators is not None and rewritten:
        graph_module = to_differentiate(operators)
    # An operator graph has the casts of autocast in it.
    with without_autocast() if rewritten else _autocast_in_place(inputs, rewriting):
        return backend.compile(graph_module, inputs, partition_traced)


def _operators(graph_module: fx.GraphModule, inputs: Sequence[Any], rewriting: Rewriting) -> Operators | None:
    """The region's operator graph, rewritten; None where nothing asks for one."""
    if not torch.is_grad_enabled() or not (rewriting or needs_operators(graph_module)):
        return None
    try:
        graph = operator_graph(graph_module, inputs, parameter_numbers(inputs, ()), rewriting.planned_for)
    except Untraceable as reason:
        instead = f"; it runs under torch.autocast with {rewriting.autocast}" if rewriting.autocast else ""
        operators = Operators(notes=(f"a region is not rewritten by passes, since {reason}{instead}",))
    else:
        operators = rewrite(graph, rewriting.deciders, rewriting.needed)
    operators.check_needed(rewriting.needed)
    return operators


def _autocast_in_place(inputs: Sequence[Any], rewriting: Rewriting) -> AbstractContextManager[Any]:
    """Autocast instead of casts of our own, for a region that stays at Dynamo's level."""
    if rewriting.autocast is None or not torch.is_grad_enabled() or autocast_is_on():
        return nullcontext()
    device = next((each.device.type for each in inputs if isinstance(each, torch.Tensor)), "cpu")
    return torch.autocast(device, dtype=rewriting.autocast)


def example_inputs(graph_module: fx.GraphModule) -> list[Any]:
    """The fakes that Dynamo captured a region with."""
    return [node.meta["example_value"] for node in graph_module.graph.nodes if node.op == "placeholder"]


def parameter_numbers(inputs: Sequence[Any], hooked: Container[int]) -> frozenset[int]:
    """Which of a region's inputs are parameters, less those whose `id` is in `hooked`."""
    return frozenset(
        number
        for number, value in enumerate(inputs)
        if isinstance(value, nn.Parameter) and value.requires_grad and id(value) not in hooked
    )
