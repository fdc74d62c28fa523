"""Dynamo: its settings, its errors, its caches and the context in which it lowers a region."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
from torch._dynamo.convert_frame import input_codes
from torch._dynamo.eval_frame import cached_backends
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.exc import FailOnRecompileLimitHit as RecompileLimit
from torch._dynamo.exc import TorchDynamoException as DynamoError

__all__ = [
    "BackendCompilerFailed",
    "DynamoError",
    "RecompileLimit",
    "capture_settings",
    "compile_with",
    "drop_compilations",
    "tracing_again",
]

_dynamo: Any = torch._C._dynamo.eval_frame


RECOMPILE_LIMIT = 256
"""Compilations of one code object: sets of shapes of a call, or of what a broken forward calls."""


def capture_settings() -> ExitStack:
    """The Dynamo and AOTAutograd settings under which models are captured and run.

    Sizes and scalars that depend on data stay in the graph; hooks added later are noticed; past the limit of
    recompilations there is an error rather than an eager run, which would break the budget; dropout is repeated from
    saved generator states.
    """
    stack = ExitStack()
    ignored = set(dynamo_config.ignore_logging_functions)
    warn_once = getattr(logging.Logger, "warning_once", None)  # transformers adds it; its cache breaks the graph
    stack.enter_context(
        dynamo_config.patch(
            capture_scalar_outputs=True,
            capture_dynamic_output_shape_ops=True,
            skip_nnmodule_hook_guards=False,
            recompile_limit=RECOMPILE_LIMIT,
            accumulated_recompile_limit=16 * RECOMPILE_LIMIT,
            fail_on_recompile_limit_hit=True,
            suppress_errors=False,
            ignore_logging_functions=ignored | ({warn_once} if warn_once else set()),
        )
    )
    stack.enter_context(
        functorch_config.patch(functionalize_rng_ops=False, graphsafe_rng_functionalization=False, donated_buffer=False)
    )
    return stack


def compile_with(backend: Callable[..., Any], call: Callable[..., Any], *, whole: bool) -> Callable[..., Any]:
    """`call` compiled by `backend`, one graph for each set of shapes; `whole`: as one region or not at all."""
    known = set(cached_backends)
    compiled = torch.compile(call, backend=backend, dynamic=False, fullgraph=whole)
    # Dynamo keeps every backend for good, to reset it with all others; ours has no state of that kind.
    for added in set(cached_backends) - known:
        del cached_backends[added]
    return compiled


def drop_compilations(is_dead: Callable[[Any], bool]) -> None:
    """Empty Dynamo's caches of those code objects for which all compilations are by backends that are dead.

    Nothing else does: the entries of a model's forward belong to its class, and code that was made for one model is
    kept alive by its own entries, which the garbage collector cannot see. Not to be called while Dynamo compiles.
    """
    for code in [code for code in (reference() for reference in input_codes.seen) if code is not None]:
        entries = _dynamo._debug_get_cache_entry_list(code)
        if entries and all(is_dead(getattr(entry.backend, "compiler_fn", None)) for entry in entries):
            _dynamo.reset_code(code)


def tracing_again() -> Callable[[], AbstractContextManager[Any]]:
    """In a Dynamo backend: makes contexts in which the same region can be lowered again, later."""
    context: Any = torch._guards.TracingContext.get()
    return lambda: torch._guards.tracing(context)
