"""AOTAutograd: the joint graph, its two halves, and modules in its calling convention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import _extract_fwd_bwd_modules
from torch._prims import rng_prims
from torch.fx.graph import _BoxedCodeGen

from memopt.compat.dispatch import without_autocast

__all__ = ["aot_autograd", "boxed", "extract_halves"]

# Importing it registers `torch.ops.higher_order.run_and_save_rng_state`, which the rewritten graphs call.
assert rng_prims.run_and_save_rng_state is not None


def extract_halves(
    joint: fx.GraphModule, saved: list[fx.Node], saved_symbols: list[fx.Node], forward_outputs: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cut a tagged joint graph into the forward and backward modules that AOTAutograd wires together."""
    return _extract_fwd_bwd_modules(joint, saved, saved_symbols, num_fwd_outputs=forward_outputs)


def boxed(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """The module as a function that empties its list of arguments, so that nothing outlives its last use."""
    module.graph.set_codegen(_BoxedCodeGen())
    module.recompile()
    run = module.forward

    def call(arguments: list[Any]) -> Any:
        with without_autocast():
            return run(arguments)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
