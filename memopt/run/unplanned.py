"""Training that bypasses the planned call: it is noticed when a gradient arrives, and said once, with its mend."""

from __future__ import annotations

import inspect
import warnings
import weakref
from typing import Any

import torch
from torch import nn

from memopt.compat.autograd import WatchingHook, watching_hooks
from memopt.compat.modules import compiled_call


class UnplannedWatch(WatchingHook):
    """Warns where the first gradient reaches a model's parameters and no planned call has begun since `begin()`.

    Nothing but a gradient tells training from other uses of a forward, and a forward that is not called through the
    module leaves no other trace. The hooks are removed as soon as a planned call begins. It warns once at most.
    """

    def __init__(self, model: nn.Module, call: object) -> None:
        self._model, self._call = weakref.ref(model), weakref.ref(call)
        self._handles: list[Any] = []
        self._warned = False

    def begin(self) -> None:
        """Watch all parameters that are trained now."""
        model = self._model()
        if self._handles or self._warned or model is None:
            return
        trained: list[Any] = [value for value in model.parameters() if value.requires_grad and value.is_leaf]
        self._handles = [parameter.register_post_accumulate_grad_hook(self) for parameter in trained]

    def end(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __call__(self, leaf: torch.Tensor) -> None:
        """Called by autograd once the gradient of `leaf` is accumulated."""
        if leaf.grad is None:  # autograd calls hooks also where there is no gradient
            return
        self.end()
        model = self._model()
        if model is not None:
            self._warned = True
            text = f"this backward was not planned by memopt, since {self._reason(model)}"
            warnings.warn(text, stacklevel=_stacklevel_of_user())

    def _reason(self, model: nn.Module) -> str:
        """Why the planned call did not run, and what to do."""
        name = type(model).__name__
        if compiled_call(model) is not self._call():
            return (
                f"{name}.compile() was called after memopt.optimize and replaced the planned call; call optimize after "
                "compile(), or leave compile() out: training calls then run as planned, all others compiled"
            )
        if not model.training:
            return (
                f"{name} is in eval() mode, in which its calls run plain; call train() on it to train, and then eval() "
                "on the submodules that are to stay in that mode (dropout, batch norm)"
            )
        return (
            f"the forward of {name} ran past its planned call: by {name}.forward(…), by a method that calls submodules "
            "(a training_step), or inside of a function or module that torch.compile compiles; call the model itself, "
            "optimise the submodule that is called, or compile nothing around the model's call"
        )


def _stacklevel_of_user() -> int:
    """The `stacklevel` with which a warning by the caller names the innermost line outside of torch and memopt."""
    level, frame = 0, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("memopt", "torch"):
        level, frame = level + 1, frame.f_back
    return level if frame is not None else 1


def unwatch(model: nn.Module) -> None:
    """Remove every watch from a model's parameters."""
    for parameter in model.parameters():
        for hook in watching_hooks(parameter):
            if isinstance(hook, UnplannedWatch):
                hook.end()
