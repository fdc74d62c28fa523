"""AOTAutograd: the joint graph, its two halves, and modules in its calling convention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import fx
from torch._prims import rng_prims
from torch.fx.graph import _BoxedCodeGen

from memopt.compat.dispatch import without_autocast
from passes.compat import forget_erased, private

PRIVATE_NAMES = (
    *private(
        "torch._functorch.partitioners", "_extract_fwd_bwd_modules", call="joint, saved, symbols, num_fwd_outputs="
    ),
    *private("torch._prims.rng_prims", "run_and_save_rng_state"),
    *private("torch.fx.graph", "_BoxedCodeGen"),
    *private(
        "torch._functorch._aot_autograd.runtime_wrappers",
        "_FirstInvocationContext.__init__",
        since=(2, 13),
        needed=False,
    ),
)

__all__ = ["boxed", "extract_halves", "first_runs_as_later_ones", "mark_boxed"]

Call = TypeVar("Call", bound=Callable[..., Any])

# Importing it registers `torch.ops.higher_order.run_and_save_rng_state`, which emitted graphs call.
assert rng_prims.run_and_save_rng_state is not None


def extract_halves(
    joint: fx.GraphModule,
    saved: list[fx.Node],
    saved_symbols: list[fx.Node],
    saved_objects: list[fx.Node],
    forward_outputs: int,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cuts a tagged joint graph into the forward and backward modules that AOTAutograd connects.

    `saved` are the nodes whose values the forward saves for the backward, `saved_symbols` the symbolic sizes and
    `saved_objects` the objects (device meshes, from torch 2.13) among what it saves, `forward_outputs` the number of
    outputs of the forward itself.
    """
    from torch._functorch.partitioners import _extract_fwd_bwd_modules

    objects: Any = {"saved_opaque_nodes": saved_objects} if saved_objects else {}
    return _extract_fwd_bwd_modules(joint, saved, saved_symbols, num_fwd_outputs=forward_outputs, **objects)


@contextmanager
def first_runs_as_later_ones() -> Iterator[None]:
    """Context in which regions are compiled whose first forward runs as all later ones do.

    AOTAutograd runs it under a dispatch mode that looks for custom operators which return an argument. In a mode some
    kernels compute other values (`memopt.compat.dispatch.kernels_as_in_eager_mode`).
    """
    from torch._functorch._aot_autograd import runtime_wrappers

    context: Any = getattr(runtime_wrappers, "_FirstInvocationContext", None)
    if context is None:
        yield
        return
    make = context.__init__

    def make_later_one(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self._is_first = False

    context.__init__ = make_later_one
    try:
        yield
    finally:
        context.__init__ = make


def boxed(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """The module as a function that empties its list of arguments, so that each is freed after its last use."""
    forget_erased(module.graph)
    module.graph.set_codegen(_BoxedCodeGen())
    module.recompile()
    _: str = module.code  # the modules that AOTAutograd makes are compiled when their code is first asked for
    run = module.forward

    def call(arguments: list[Any]) -> Any:
        with without_autocast():
            return run(arguments)

    return mark_boxed(call)


def mark_boxed(call: Call) -> Call:
    """Tells AOTAutograd that `call` takes a list of arguments and empties it."""
    call._boxed_call = True  # type: ignore[attr-defined]
    return call
