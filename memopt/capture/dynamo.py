"""Captures the regions of a training call with Dynamo, through a backend function."""

from __future__ import annotations

import gc
import itertools
import os
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from memopt.capture.inputs import in_dtype, spreads_batch, takes_model, tensors_in
from memopt.compat.dynamo import (
    capture_settings,
    compile_with,
    compiled_several_times,
    drop_compilations,
    fails_to_compile,
    sizes_apart,
    without_propagated_marks,
)
from memopt.compat.dynamo_rules import keeping_requires_grad
from memopt.compat.eager_mode import eager_mask_branches
from memopt.compat.modules import called_plainly, plain_call
from memopt.errors import CaptureError

Backend = Callable[[fx.GraphModule, Sequence[Any]], Any]

_numbers = itertools.count()


def training_call(
    model: nn.Module, loss_fn: Callable[..., Any] | None, floats: torch.dtype | None = None
) -> Callable[..., Any]:
    """The function to capture: the model's own call with its hooks, or the loss as `loss_call` computes it. `floats` is
    as for `loss_call`.

    The function has a code object of its own, because Dynamo keeps and counts compilations by code object."""
    call = loss_call(model, loss_fn, floats, plain_call(model))  # by now, calling the model enters memopt
    if takes_model(loss_fn):
        call.around = partial(called_plainly, model)
    call.__code__ = call.__code__.replace(co_name=f"training_call_{next(_numbers)}")
    return call


def loss_call(
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    floats: torch.dtype | None = None,
    call: Callable[..., Any] | None = None,
) -> Any:
    """The function called in training: the model's call, or with `loss_fn` a function that computes the loss, from the
    model's output and the targets or from the model and the batch.

    `floats`, if given, is the dtype that fp32 inputs are cast to, and `call` runs the model in place of `model` itself.
    A `loss_fn` that takes the model calls `model` itself, not `call`; `plain_loss_call` makes it run the plain
    forward."""
    run = model if call is None else call
    if loss_fn is None:

        def forward(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = in_dtype((args, kwargs), floats)
            return run(*args, **kwargs)

        return forward
    if not takes_model(loss_fn):

        def loss(inputs: Any, targets: Any) -> Any:
            inputs = in_dtype(inputs, floats)
            if isinstance(inputs, dict):
                return loss_fn(run(**inputs), targets)
            return loss_fn(run(*inputs) if isinstance(inputs, (tuple, list)) else run(inputs), targets)

        return loss
    spreads = spreads_batch(loss_fn)

    def loss_of_model(batch: Any) -> Any:
        batch = in_dtype(batch, floats)
        if not spreads:
            return loss_fn(model, batch)
        return loss_fn(model, **batch) if isinstance(batch, dict) else loss_fn(model, *batch)

    return loss_of_model


def plain_loss_call(
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    floats: torch.dtype | None = None,
    call: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """The function that `loss_call` returns, for eager mode: if `loss_fn` takes the model and calls it, the model's own
    forward runs, not a planned one."""
    run = loss_call(model, loss_fn, floats, call)

    def run_plainly(*args: Any, **kwargs: Any) -> Any:
        with called_plainly(model):
            return run(*args, **kwargs)

    return run_plainly if takes_model(loss_fn) else run


_NO_GRADIENT = "One of the differentiated Tensors does not require grad"
_BEFORE_THE_CALL = "; call requires_grad_() on the input before you call the model, since compiled code cannot do so"


class CallStopped(Exception):
    """Raised within a region to end the call that runs it. A result cannot be returned from there to the code that
    began the call, since frames of Dynamo and of the model lie in between."""


class GraphBreak(CaptureError):
    """Raised where a call cannot be captured as one graph; the message is Dynamo's reason."""


class TooManyShapes(CaptureError):
    """Raised where a call has more sets of shapes than Dynamo keeps compilations for."""


class _Compilations:
    """The compiled regions of a call. The caller owns them rather than Dynamo: the garbage collector does not see
    objects attached to a code object, so a model that its own compiled regions refer to would never be freed."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.regions: list[Callable[..., Any]] = []


def _weak_backend(compilations: _Compilations) -> Backend:
    """A backend for Dynamo that refers to the compiled regions weakly."""
    from memopt.compat.dynamo import DynamoError  # loads torch._dynamo

    owner = weakref.ref(compilations, _freed.append)

    def backend(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        alive = owner()
        assert alive is not None
        alive.regions.append(alive.backend(graph_module, inputs))
        number = len(alive.regions) - 1

        def region(*args: Any) -> Any:
            alive = owner()
            assert alive is not None
            try:
                return alive.regions[number](*args)
            except DynamoError as failure:  # from tracing the backward: Dynamo would take it for a graph break
                raise CaptureError(
                    f"the backward of the captured forward cannot be traced: {in_brief_with_line(failure)}; exclude "
                    "the code that this error names from the capture with torch.compiler.disable"
                ) from failure

        return region

    _owners[backend] = owner
    return backend


_owners: weakref.WeakKeyDictionary[Backend, weakref.ref[_Compilations]] = weakref.WeakKeyDictionary()
_freed: list[weakref.ref[_Compilations]] = []


def may_run_other_regions(backend: Backend) -> bool:
    """Whether a call that was compiled with a backend may run other regions the next time: some code was compiled
    several times, and Dynamo does not always choose the same compilation."""

    def is_ours(compiler: Any) -> bool:
        owned = _owners[compiler]() if compiler in _owners else None
        return owned is not None and owned.backend is backend

    return compiled_several_times(is_ours)


def compile_call(
    call: Callable[..., Any], backend: Backend, *, whole: bool, symbols: bool = False
) -> Callable[..., Any]:
    """`call`, compiled with `backend` region by region, or as one region if `whole` is set; the compiled function
    raises `GraphBreak` where the call cannot be one region.

    With `symbols`, sizes that differ between calls become symbols of one region; otherwise each set of shapes makes
    another region. The compiled function also raises what `backend` raises, and `TooManyShapes` where there are more
    sets of shapes than Dynamo compiles for."""
    from memopt.compat.dynamo import BackendCompilerFailed, DynamoError, RecompileLimit  # loads torch._dynamo

    if _freed:  # the compilations of models that were freed are still in Dynamo's caches
        _freed.clear()
        drop_compilations(lambda backend: backend in _owners and _owners[backend]() is None)
    compilations, sizes = _Compilations(backend), sizes_apart()
    compiled = compile_with(_weak_backend(compilations), call, whole=whole, symbols=symbols)

    def run(*args: Any, **kwargs: Any) -> Any:
        assert compilations.backend is backend  # keeps the regions alive as long as this function
        try:
            with ExitStack() as stack:
                stack.enter_context(_capturing())
                stack.enter_context(capture_settings(sizes))
                stack.enter_context(without_propagated_marks(tensors_in((args, kwargs))))
                stack.enter_context(getattr(call, "around", nullcontext)())
                stack.enter_context(keeping_requires_grad() if whole else nullcontext())
                stack.enter_context(eager_mask_branches(args, kwargs))
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
            reason = in_brief_with_line(failure) + (_BEFORE_THE_CALL if _NO_GRADIENT in str(failure) else "")
        except Exception as failure:
            if not fails_to_compile(failure):
                raise
            reason = f"torch.compile ends in {type(failure).__name__}: {in_brief(failure)}"
            if not whole:
                raise CaptureError(reason) from failure
        gc.collect()  # a failed compilation leaves reference cycles that hold the inputs
        raise GraphBreak(reason)

    return run


_captures = 0
"""The number of captured calls that are running now, nested in each other."""


def is_capturing() -> bool:
    """Whether a captured call is running or being captured now."""
    return _captures > 0


@contextmanager
def _capturing() -> Iterator[None]:
    global _captures
    _captures += 1
    try:
        yield
    finally:
        _captures -= 1


def in_brief(error: BaseException) -> str:
    """An error's message on one line of at most 200 characters, without torch's advice on debugging."""
    text = " ".join(str(error).split()).removeprefix("Consider annotating your code using torch._check*(). ")
    inner = re.search(r"got \w+\((['\"])(.+?)\1\)", text)  # "… failed to run FX node with fake tensors: … got …"
    text = inner[2] if inner else re.split(r"\.(?= |$)| \(unhinted| Explanation:", text)[0]
    return text[:200] or type(error).__name__


def in_brief_with_line(error: BaseException) -> str:
    """As `in_brief`, followed by the innermost line outside of torch and memopt that the error comes from, if any."""
    from memopt.compat.dynamo import user_stack

    for frame in reversed(user_stack(error)):
        if not frame.filename.startswith((*_NOT_USERS, "<")):
            return f"{in_brief(error)} ({short_path(frame.filename)}:{frame.lineno}, in {frame.name})"
    return in_brief(error)


def short_path(path: str) -> str:
    """A file's path relative to the working directory, or to the folder on `sys.path` that it was imported from."""
    folders = [os.path.join(folder, "") for folder in (os.getcwd(), *sys.path) if folder]
    return path.removeprefix(max((folder for folder in folders if path.startswith(folder)), key=len, default=""))


_NOT_USERS = tuple(os.path.join(os.path.dirname(file), "") for file in (torch.__file__, os.path.dirname(__file__)))
