"""Training calls that need no plan, because the step of the plain model fits the budget."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import nn

from memopt.account.plain_count import PlainStep, count_plain_step
from memopt.capture.author_modes import autocast_state
from memopt.capture.data_sizes import is_real
from memopt.capture.dynamic_shapes import at_largest
from memopt.capture.inputs import Call, on_meta, tensors_in
from memopt.compat.pytree import tree_flatten, tree_leaves
from memopt.planning.call_planner import CallPlanner
from memopt.planning.situation import Situation
from memopt.recent import Recent
from memopt.run.beside import Beside

MARGIN = 1.02
"""The count of a plain step is taken to be this much too low; on a GPU `CUDA_MARGIN`, where blocks leave gaps."""
CUDA_MARGIN = 1.1
GROWTH = 1.25
"""Sizes above all that were counted are counted with this much in reserve, so that lengths which grow are not counted
one by one."""
_MOST_COUNTS = 12
"""Counts of one kind of call: after so many, sizes that none of them answers for are planned."""

Sizes: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class _Fitting:
    """The count of a step that fits the budget by itself."""

    step: PlainStep
    room_bytes: int
    """What it leaves of the budget."""
    optimizer_state: int

    def fits(self, beside: Beside) -> bool:
        """Whether it fits beside other forwards, and what else lies on the device."""
        return beside.leaves(self.room_bytes, self.optimizer_state)


@dataclass
class _Kind:
    """The counts of calls that differ in their sizes only."""

    fitting: list[tuple[Sizes, _Fitting]] = field(default_factory=list)
    too_large: list[Sizes] = field(default_factory=list)

    def known_too_large(self, sizes: Sizes) -> bool:
        """Whether sizes that no count answers for are not to be counted: smaller ones do not fit, or there are enough
        counts."""
        enough = len(self.fitting) + len(self.too_large) >= _MOST_COUNTS
        return enough or any(_covers(sizes, least) for least in self.too_large)


class PlainCalls:
    """Says which training calls may run as the plain model does, and what their forwards hold until their backward."""

    def __init__(self, model: nn.Module, planner: CallPlanner, plain: Callable[..., Any]) -> None:
        self.model, self.planner, self.plain = model, planner, plain
        self.allowed = os.environ.get("MEMOPT_PLAN") != "always"
        """False once a call was planned ahead: then plans are what the user wants."""
        self.latest: Call | None = None
        """The latest call that was counted and fits, without its values."""
        self._kinds: Recent[Any, _Kind] = Recent(16)
        self._waiting: weakref.WeakSet[_Forward] = weakref.WeakSet()

    @property
    def waiting_bytes(self) -> int:
        """The bytes held by forwards of plain calls whose backward is still to come."""
        return sum(forward.held_bytes for forward in self._waiting if not forward.done)

    def step_if_it_fits(self, call: Call, situation: Situation, beside: Beside) -> PlainStep | None:
        """The count of the step of a call that may run plain; None for one that has to be planned."""
        if not (self.allowed and self._nothing_else_wanted()):
            return None
        leaves, structure = tree_flatten(call)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        sizes = _sizes(call)
        key = repr((
            structure,
            [(tensor.dtype, tensor.dim(), tensor.requires_grad) for tensor in tensors],
            [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)],
            sum(parameter.requires_grad for parameter in self.model.parameters()),
            (situation.gradients_held, autocast_state()),
        ))  # fmt: skip
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = _Kind()
        for most, fitting in kind.fitting:
            if _covers(most, sizes):
                return fitting.step if fitting.fits(beside) else None
        if kind.known_too_large(sizes):
            return None
        counted = self._count(kind, call, sizes, situation)
        return counted.step if counted is not None and counted.fits(beside) else None

    def run(self, call: Call, step: PlainStep) -> Any:
        """Run the plain model, and remember that its forward waits for its backward."""
        result = self.plain(*call[0], **call[1])
        loss = next((leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.grad_fn), None)
        if loss is not None:
            forward = _Forward(step.held_bytes)
            self._waiting.add(forward)
            node: Any = loss.grad_fn
            node.metadata["memopt"] = forward  # lives as long as the graph
            node.register_prehook(forward.end)
        return result

    def _count(self, kind: _Kind, call: Call, sizes: Sizes, situation: Situation) -> _Fitting | None:
        if not all(map(is_real, self.model.parameters())):
            return None
        for batch in (*_grown(call, kind), call):
            step = count_plain_step(
                self.model, self.plain, batch, self.planner.card, gradients_held=situation.gradients_held
            )
            if step is not None and (fitting := self._fitting(step, batch, situation)) is not None:
                kind.fitting.append((_sizes(batch), fitting))
                self.latest = on_meta(call)
                return fitting
        kind.too_large.append(sizes)
        return None

    def _fitting(self, step: PlainStep, call: Call, situation: Situation) -> _Fitting | None:
        """The count with the room that the step leaves beside it; None where it leaves none."""
        account = replace(self.planner.account(call, situation), elsewhere=0)
        margin = MARGIN if self.planner.card.name == "cpu" else CUDA_MARGIN
        peak = account.resident_bytes + int(margin * step.peak_bytes)
        room = self.planner.options.budget_bytes - max(peak, account.optimizer_step_bytes(step.output_bytes))
        return _Fitting(step, room, account.optimizer_state) if room >= 0 else None

    def _nothing_else_wanted(self) -> bool:
        """Whether a plan would only save memory: no precision, passes, compiler or optimiser levers are wanted."""
        planner = self.planner
        rewriting = planner.rewriting
        return not (
            rewriting.autocast is not None
            or rewriting.deciders
            or planner.options.passes
            or planner.options.calibrate
            or planner.options.hardware
            or planner.fuses
            or planner.proposing.chosen
            or planner.proposing.allowed
        )


@dataclass(eq=False)
class _Forward:
    """A forward of a plain call."""

    held_bytes: int
    done: bool = False

    def end(self, *_: Any) -> None:
        """Called when its backward begins."""
        self.done = True


def _sizes(call: Call) -> Sizes:
    return tuple(size for tensor in tensors_in(call) for size in tensor.shape)


def _grown(call: Call, kind: _Kind) -> Iterator[Call]:
    """The call with sizes above all that were counted, and some more, where any size exceeds the last count."""
    if not kind.fitting:
        return
    places = ((number, dim) for number, tensor in enumerate(tensors_in(call)) for dim in range(tensor.dim()))
    changed = {
        place: math.ceil(GROWTH * size)
        for place, size, most in zip(places, _sizes(call), kind.fitting[-1][0], strict=True)
        if size > most
    }
    yield at_largest(call, changed)


def _covers(most: Sizes, sizes: Sizes) -> bool:
    return all(size <= limit for size, limit in zip(sizes, most, strict=True))
