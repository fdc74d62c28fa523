"""What memopt reports about the training calls of an optimised model: its state, a line in the log for each plan, and a
warning about training that bypasses the plan."""

from __future__ import annotations

import inspect
import logging
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from memopt.capture.inputs import Call, call_signature
from memopt.compat.hooks import WatchingHook, watching_hooks
from memopt.compat.modules import compiled_call
from memopt.compat.operators import tree_leaves
from memopt.errors import Refusal
from memopt.lru import LruCache
from memopt.planning.plan import Plan
from memopt.progress import tell
from memopt.units import duration, size


class State(Enum):
    """The states of an optimised model; only `Session` changes them."""

    NEW = "new"
    """No training call has come yet, and nothing is planned."""
    RECORDING = "recording"
    """A call is being recorded and planned."""
    PLAIN = "plain"
    """The latest call ran as the plain model does, since its step fits the budget."""
    PLANNED = "planned"
    """The latest call ran by its plan, or was planned ahead of its run."""
    CHECKPOINTED = "checkpointed"
    """The latest call ran with activation checkpoints: its forward breaks and its regions cannot be planned within the
    budget, or its sizes, smaller than planned ones, are too rare for a plan of their own."""
    UNPLANNED = "unplanned"
    """Calls run as the plain model does, whatever memory they need, as "plain" in `allow` permits."""
    REFUSED = "refused"
    """The latest call was refused, and no step was taken."""


@dataclass(frozen=True)
class Status:
    """The state of an optimised model after its latest training call; `str()` of it is one line."""

    model: str
    """The name of the model's class."""
    state: State = State.NEW
    reason: str = "no training call has come yet"
    """Why the model is in that state, in words; for PLANNED, the shapes and figures of the plan."""
    plan: Plan | None = None
    """The plan of the latest call, or the latest plan before it; None before any. Its receipt has the plain step only
    if that was counted in advance: `memopt.plan_of` counts it."""

    def __str__(self) -> str:
        return f"{self.model}: {self.state.value}, " + self.reason.partition("\n")[0]


def planned_in_words(plan: Plan, shapes: str) -> str:
    """The text of the state PLANNED: the shapes of the call's tensors and the figures of its plan."""
    peak, budget = size(plan.predicted_peak_bytes), size(plan.budget_bytes)
    return f"{shapes}: peak {peak} of {budget}, added time {plan.added_time:.1%}"


_MOST = 512
"""The number of signatures that are remembered to be logged."""


class PlanningLog:
    """Logs the beginning and the end of planning to the logger "memopt": at level INFO, or DEBUG for shapes planned
    before."""

    def __init__(self) -> None:
        self._known: LruCache[str, bool] = LruCache(_MOST)

    def begins(self, model: str, call: Call) -> None:
        """Log that a call of a model begins to be planned."""
        self._tell(f"planning {model} for {shapes_of(call)}, which takes some seconds", call, ends=False)

    def planned(self, plan: Plan, call: Call, seconds: float) -> None:
        """Log a plan. `seconds` is the time from the beginning of the call to the plan's first use, or to the end of
        planning if the call does not run yet."""
        words = planned_in_words(plan, shapes_of(call))
        self._tell(f"planned {plan.model} in {duration(seconds)} for {words}", call)

    def checkpointed(self, model: str, call: Call, planning_seconds: float) -> None:
        """Log that a call runs with activation checkpoints, since a plan for its sizes takes about `planning_seconds`
        to make."""
        why = f"a plan for these sizes takes about {duration(planning_seconds)} to make"
        self._tell(f"running {model} with activation checkpoints for {shapes_of(call)}: {why}", call)

    def refused(self, error: Refusal) -> Refusal:
        """Log the error of a call that was refused, with all that its text says would help, and return it."""
        logging.getLogger("memopt").info("%s", error)
        return error

    def _tell(self, text: str, call: Call, *, ends: bool = True) -> None:
        """Log a text on a call; `ends`: later texts on calls like it are for level DEBUG."""
        signature = call_signature(call)
        tell(text, logging.DEBUG if signature in self._known else logging.INFO)
        if ends:
            self._known[signature] = True


def shapes_of(call: Call) -> str:
    """The shapes of a call's tensors as text, each with the keyword or attribute that it was passed as."""
    named = [*(("", value) for value in call[0]), *call[1].items()]
    shapes = [f"{name} {shape}".strip() for given, value in named for name, shape in _shapes(given, value)]
    return ", ".join(shapes) or "no tensors"


def _shapes(name: str, value: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield name, tuple(leaf.shape)
        else:
            for attribute, tensor in getattr(leaf, "__dict__", {}).items():
                if isinstance(tensor, torch.Tensor):
                    yield f"{name or type(leaf).__name__}.{attribute}", tuple(tensor.shape)


class UnplannedWatch(WatchingHook):
    """Warns once if a gradient reaches a model's parameters although no planned call has begun since `begin()`.

    A forward that is not called through the module (`model.forward(…)`) can be noticed only by its gradients; forwards
    for evaluation or generation have none. The hooks are removed as soon as a planned call begins."""

    def __init__(self, model: nn.Module, call: object) -> None:
        self._model, self._call = weakref.ref(model), weakref.ref(call)
        self._handles: list[Any] = []
        self._warned = False

    def begin(self) -> None:
        """Watch all parameters that are trainable now."""
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
            text = f"no plan of memopt held this step to its budget: {self._reason(model)}"
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
            f"the forward of {name} ran without its planned call: by {name}.forward(…), by a method that calls "
            "submodules (a training_step), or inside of a function or module that torch.compile compiles; call the "
            "model itself, optimise the submodule that is called, or compile nothing around the model's call"
        )


def _stacklevel_of_user() -> int:
    """The `stacklevel` for a warning by the caller that points to the innermost line outside of torch and memopt."""
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
