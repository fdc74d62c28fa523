"""Dynamo: its settings, errors and caches, and the context in which a region can be traced again. torch._dynamo takes
more than a second to import, so functions import it; import the error classes inside the function that catches them."""

from __future__ import annotations

import copy
import logging
import os
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import lru_cache
from types import CodeType
from typing import Any, cast

import torch
from torch import fx

from memopt.compat.check import check
from memopt.compat.dynamo_rules import replacements
from memopt.compat.fakes import broadcast_masks
from memopt.compat.tensors import is_wrapper
from passes.compat import Replacement, private, replaced_all

# Dynamo itself refuses settings that it does not have. Attributes that it sets on other objects are seen only there:
# `real_stack` of errors, `_dynamo_source` of nodes, from torch 2.13 on `_dynamo_propagated_dynamic_indices`.
PRIVATE_NAMES = private("""
    torch._dynamo.exc: BackendCompilerFailed FailOnRecompileLimitHit TorchDynamoException
    torch._dynamo.config: _make_closure_patcher
    torch._functorch.config: _make_closure_patcher
    torch.compiler.config: _make_closure_patcher
    torch._dynamo.eval_frame: cached_backends DynamoStance _stance
    torch._dynamo.convert_frame: input_codes.seen
    torch._dynamo: maybe_mark_dynamic
    torch._C._dynamo.eval_frame: _debug_get_cache_entry_list reset_code
    torch._guards: TracingContext.get tracing
    torch._dynamo.pgo: _CODE_STATE CodeState
    torch.compiler: _is_exporting_flag
    torch._dynamo.symbolic_convert: InstructionTranslator.current_tx()
    torch._dynamo.side_effects: SideEffects._get_modified_vars(self)
    torch._dynamo.variables.base: VariableTracker.is_python_constant .as_python_constant AttributeMutationNew
        ValueMutationNew
""")

_ERRORS = {
    "BackendCompilerFailed": "BackendCompilerFailed",
    "RecompileLimit": "FailOnRecompileLimitHit",
    "DynamoError": "TorchDynamoException",
}


def fails_to_compile(failure: BaseException) -> bool:
    """Whether an error was raised while Dynamo compiled, and by torch's own code, not the model's or memopt's."""
    files = [frame.filename.replace(os.sep, "/") for frame in traceback.extract_tb(failure.__traceback__)]
    return any(file.endswith("torch/_dynamo/convert_frame.py") for file in files) and "/torch/" in files[-1]


def changes_objects() -> bool:
    """Whether the code that Dynamo traces changes Python objects that existed before: attributes, elements of
    containers, global variables. To be called in Dynamo's backend; elsewhere it is not known, and True is returned."""
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew

    try:
        effects = InstructionTranslator.current_tx().output.side_effects
    except AttributeError:
        return True
    new = AttributeMutationNew, ValueMutationNew
    changed = [one for one in effects._get_modified_vars() if not isinstance(one.mutation_type, new)]
    return not all(_is_as_before(one, effects.store_attr_mutations.get(one)) for one in changed)


def _is_as_before(changed: Any, attributes: dict[str, Any] | None) -> bool:
    """Whether the attributes that were set on an object have the constant values again that they had before, as a flag
    that is set for a time. False for objects with elements."""
    before = vars(changed).get("value")
    if not attributes or before is None or hasattr(before, "__len__"):
        return False
    for name, value in attributes.items():
        known = vars(before).get(name, attributes) if hasattr(before, "__dict__") else attributes
        if not value.is_python_constant() or type(known) is not type(now := value.as_python_constant()) or known != now:
            return False
    return True


RECOMPILE_LIMIT = 256
"""The most compilations of one code object: one for each set of input shapes."""


def __getattr__(name: str) -> Any:
    if name not in _ERRORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from torch._dynamo import exc

    return getattr(exc, _ERRORS[name])


@contextmanager
def capture_settings(*further: Replacement) -> Iterator[None]:
    """Context with the Dynamo and AOTAutograd settings under which models are captured and run, and with `further`
    replacements.

    Sizes and scalars that depend on data become symbols, derivatives that the code takes itself calls in the graph.
    Beyond the limit of recompilations an error is raised instead of an eager run, which could exceed the budget.
    Dropout is recomputed from saved generator states. DDP's buckets do not split the forward. Profiles of sizes on disk
    are neither read nor written. Code is compiled also where the user has switched `torch.compile` off.

    Hooks that are added after a capture, and parameters that are unfrozen after it, make Dynamo capture again. By
    default, torch 2.11 skips the guards of parameters, and under Python 3.13 those of whole modules, as long as the
    modules' dicts are unchanged. `requires_grad_` does not change the dicts: the parameter would get no gradient."""
    import torch._dynamo.config as dynamo_config
    from torch._dynamo import eval_frame

    check()
    warn_once = getattr(logging.Logger, "warning_once", None)  # transformers adds it; its cache breaks the graph
    ignored = frozenset(dynamo_config.ignore_logging_functions) | ({warn_once} if warn_once else set())
    with ExitStack() as stack:
        for change in _changes(ignored):
            stack.callback(change())
        stance = eval_frame, "_stance", eval_frame.DynamoStance()
        with replaced_all([*replacements(), broadcast_masks(), stance, *further]):
            yield


@lru_cache(maxsize=4)
def _changes(ignored: frozenset[Any]) -> tuple[Callable[[], Callable[[], None]], ...]:
    """Functions that make the settings and return one that undoes them, where logging functions `ignored` break no
    graph. Made once: `config.patch` makes a context variable each time, which is never freed."""
    import torch._dynamo.config as dynamo_config
    import torch._functorch.config as functorch_config

    derivatives: dict[str, Any] = {"trace_autograd_ops": True} if hasattr(dynamo_config, "trace_autograd_ops") else {}
    dynamo, functorch, compiler = (cast("Any", one) for one in (dynamo_config, functorch_config, torch.compiler.config))
    return (
        dynamo._make_closure_patcher(
            capture_scalar_outputs=True,
            use_numpy_random_stream=True,
            capture_dynamic_output_shape_ops=True,
            skip_nnmodule_hook_guards=False,
            skip_tensor_guards_with_matching_dict_tags=False,
            use_recursive_dict_tags_for_guards=False,
            recompile_limit=RECOMPILE_LIMIT,
            accumulated_recompile_limit=16 * RECOMPILE_LIMIT,
            fail_on_recompile_limit_hit=True,
            disable=False,
            suppress_errors=False,
            allow_rnn=True,
            optimize_ddp=False,
            ignore_logging_functions=set(ignored),
            **derivatives,
        ),
        functorch._make_closure_patcher(
            functionalize_rng_ops=False, graphsafe_rng_functionalization=False, donated_buffer=False
        ),
        compiler._make_closure_patcher(job_id=None),
    )


def is_exporting() -> bool:
    """Whether `torch.export` is running. Unlike `torch.compiler.is_exporting()`, which in torch 2.11 is also True while
    Dynamo traces for `torch.compile`, this is False then."""
    return torch.compiler._is_exporting_flag


def keep_nodes(graph_module: fx.GraphModule) -> None:
    """Prevent Dynamo from erasing the nodes of the graph that it passed to a backend once the compilation is over or
    failed: torch 2.15 then erases all; torch 2.13 did so only where it traced the call again."""
    vars(graph_module.graph)["_clear_nodes"] = _clear_nothing


def _clear_nothing() -> None:
    pass


def compile_with(
    backend: Callable[..., Any], call: Callable[..., Any], *, whole: bool, symbols: bool = False
) -> Callable[..., Any]:
    """`call` compiled by `backend`, also where `TORCHDYNAMO_DISABLE` is set. With `whole`, a graph break is an error.
    Each set of shapes gets a graph; with `symbols`, sizes that differ between calls become symbols of one graph."""
    from torch._dynamo.eval_frame import cached_backends

    known = set(cached_backends)
    off = os.environ.pop(_OFF, None)
    try:
        compiled = torch.compile(call, backend=backend, dynamic=None if symbols else False, fullgraph=whole)
    finally:
        if off is not None:
            os.environ[_OFF] = off
    # Dynamo keeps every backend forever so that torch._dynamo.reset() can reset it; ours has no such state.
    for added in set(cached_backends) - known:
        del cached_backends[added]
    return compiled


_OFF = "TORCHDYNAMO_DISABLE"


def sizes_apart() -> Replacement:
    """A replacement, to be given to `capture_settings` each time, with which Dynamo records the sizes of calls apart;
    those that differ become symbols. By default it records them for the whole process, by the code of a layer or of the
    model's class: sizes would become symbols because another model was called with other ones."""
    from torch._dynamo import pgo

    state: Any = pgo
    return state, "_CODE_STATE", defaultdict(state.CodeState)


@contextmanager
def marked_changing(places: Iterable[tuple[torch.Tensor, int]]) -> Iterator[None]:
    """Context in which Dynamo makes symbols of the sizes at `places`, each a tensor and a dimension, unless the code
    requires one value. Afterwards the tensors have the marks (`mark_dynamic`) that they had before."""
    from torch._dynamo import maybe_mark_dynamic

    chosen = list(places)
    parts = {id(part): part for tensor, _ in chosen for part in _parts(tensor)}
    before = {
        key: {name: copy.copy(vars(part)[name]) for name in _MARKS if name in vars(part)}  # marking changes them
        for key, part in parts.items()
    }
    for tensor, dimension in chosen:
        maybe_mark_dynamic(tensor, dimension)
    try:
        yield
    finally:
        for key, part in parts.items():
            for name in _MARKS:
                part.__dict__.pop(name, None)
            part.__dict__.update(before[key])


@contextmanager
def without_propagated_marks(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Context in which `tensors` lack the marks by which Dynamo makes symbols of their sizes. Compiled code leaves them
    on tensors that it saves or returns, inputs included, and they would act in every later capture of any model."""
    hidden = [(tensor, vars(tensor).pop(_PROPAGATED, None)) for tensor in tensors]
    try:
        yield
    finally:
        for tensor, before in hidden:
            vars(tensor).pop(_PROPAGATED, None)
            if before is not None:
                vars(tensor)[_PROPAGATED] = before


_PROPAGATED = "_dynamo_propagated_dynamic_indices"
_MARKS = ("_dynamo_weak_dynamic_indices", "_has_dynamo_dim_marking")


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor, and those that a tensor subclass wraps, at any depth."""
    yield tensor
    if is_wrapper(tensor):
        wrapper: Any = tensor
        for name in wrapper.__tensor_flatten__()[0]:
            yield from _parts(getattr(tensor, name))


def drop_compilations(is_dead: Callable[[Any], bool]) -> None:
    """Empty Dynamo's cache for each code object whose compilations all come from backends for which `is_dead` is true.
    Nothing else frees them: the entries of a model's forward belong to its class, or keep their own code alive, unseen
    by the garbage collector. Not to be called while Dynamo compiles."""
    for code, backends in _compiled_codes():
        if backends and all(map(is_dead, backends)):
            torch._C._dynamo.eval_frame.reset_code(code)


def forget_skipped() -> None:
    """Make Dynamo try again to capture code that it has given up on, as after an exception of the user's code. Not to
    be called while Dynamo compiles."""
    for code, backends in _compiled_codes():
        if not backends:
            torch._C._dynamo.eval_frame.reset_code(code)


def compiled_several_times(is_ours: Callable[[Any], bool]) -> bool:
    """Whether any code object has several compilations by backends for which `is_ours` is true: if the graph broke
    inside of a called function, guards do not cover what that read, and the latest may run in place of another."""
    return any(sum(map(is_ours, backends)) > 1 for _, backends in _compiled_codes())


def _compiled_codes() -> Iterator[tuple[CodeType, list[Any]]]:
    """The code objects that Dynamo has compiled or given up on, each with the backends of its compilations."""
    from torch._dynamo.convert_frame import input_codes

    for code in [code for code in (reference() for reference in input_codes.seen) if code is not None]:
        entries: Any = torch._C._dynamo.eval_frame._debug_get_cache_entry_list(code)
        yield code, [getattr(entry.backend, "compiler_fn", None) for entry in entries]


def tracing_again() -> Callable[[], AbstractContextManager[Any]]:
    """A function that makes contexts in which the region that Dynamo now compiles can be compiled again later. To be
    called inside a Dynamo backend."""
    context: Any = torch._guards.TracingContext.get()
    return lambda: torch._guards.tracing(context)


def user_stack(error: BaseException) -> Sequence[traceback.FrameSummary]:
    """The Python lines that Dynamo was tracing when `error` was raised, innermost last; else the error's traceback."""
    traced = getattr(error, "real_stack", None)
    return traced or traceback.extract_tb(error.__traceback__)


def copy_source(source: fx.Node, copy: fx.Node) -> None:
    """Give the placeholder `copy` the origin (argument, attribute) that Dynamo recorded on the placeholder `source`."""
    copy._dynamo_source = getattr(source, "_dynamo_source", None)
