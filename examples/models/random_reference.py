"""The numbers of a random model's plain steps, and how far those of a planned one are from them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from examples.models.random_block import Block
from examples.models.random_habits import hook_parameters
from examples.models.random_modules import Case
from examples.models.twins import FLOOR, FUSED_FLOOR, Run, Twin, difference, gradients_apart, scale_weights, verdict_of
from memopt.capture.dynamo_graph import BETWEEN_REGIONS, BITS_DEPART, BUFFERS_WRITTEN_ONCE

STEPPED = 100.0
"""How much larger such rounding may be after the first two steps: optimizers divide gradients by their own size."""
CONDITIONED = 10.0
"""How many times as far from the plain numbers a step may be that is compiled, or whose plan names an operator that
rounds, as plain steps are from weights that are one unit in the last place larger."""
LOW, OF_LOWERED = 0.05, 3.0
"""How far the gradients of a first step in 16 bits may be from the plain ones; and where a model is ill-conditioned, in
multiples of how far those under autocast are, or those from weights that differ by a rounding to bfloat16."""
DRAWS = 4
"""How many such weights are tried: in models this small, one ReLU or one choice that turns out otherwise is seen."""
MakeOptimizer = Callable[..., torch.optim.Optimizer]


@dataclass(frozen=True)
class Reference:
    """The numbers of plain steps."""

    runs: tuple[Run, ...]
    """Those of `steps_of`."""
    written_once: tuple[Run, ...] | None
    """The same where blocks under `torch.utils.checkpoint` run once, without it; None for a model that has none."""
    nudge: Callable[[], tuple[Run, ...]] | None = None
    """Trains the same from weights that are one unit in the last place larger: how ill-conditioned the model is."""
    lowered: Callable[[], Iterator[tuple[Run, ...]]] | None = None
    """Trains the same from several weights that differ by a rounding to bfloat16, and under autocast if it runs
    there."""

    def judge(self, ours: Run, number: int, notes: Collection[str], *, fused: bool = False) -> tuple[str, str]:
        """The verdict on the numbers of a planned run, and where they are farthest apart, by the notes of its plan.
        `fused`: a compiler orders the sums, and rounding is right."""
        runs = self.runs
        if self.written_once is not None and BUFFERS_WRITTEN_ONCE in notes:
            runs = self.written_once
        apart, at = difference(ours, runs[number], FUSED_FLOOR if fused else FLOOR)
        verdict = verdict_of(apart / STEPPED if fused and number else apart)
        rounds = fused or rounding_is_named(notes)
        if rounds and verdict == "wrong" and self.nudge is not None:
            near = apart <= CONDITIONED * difference(self.nudge()[number], runs[number])[0]
            verdict = "rounding" if near else verdict
        if rounds and verdict == "rounding":
            return ("right", "") if fused else ("rounding, named", f"{apart:.1e} apart: {at}")
        return verdict, f"{apart:.1e} apart: {at}" if apart else ""

    def judge_low(self, ours: Run) -> tuple[str, str]:
        """The verdict on a first step in 16 bits, and how far its gradients are from the plain ones."""
        apart = gradients_apart(ours, self.runs[0])
        near = apart <= LOW
        if not near and self.lowered is not None:
            near = apart <= OF_LOWERED * max(gradients_apart(runs[0], self.runs[0]) for runs in self.lowered())
        return "right" if near else "wrong", f"gradients {apart:.1e} apart"


def reference(case: Case, make_optimizer: MakeOptimizer) -> Reference:
    """Train the plain model of a case. Raises `ValueError` where it gives other numbers each time."""

    def train(
        *, directly: bool = False, change: Callable[[nn.Module], None] | None = None, low: bool = False
    ) -> tuple[Run, ...]:
        model = copy.deepcopy(case.model)
        hook_parameters(model)
        if change is not None:
            change(model)
        for block in _checkpointed(model):
            block.direct = directly
        twin = twin_of(model, case, make_optimizer)
        if low:
            twin.call = torch.autocast("cpu", torch.bfloat16)(twin.call)
        return tuple(steps_of(twin))

    def lowered() -> Iterator[tuple[Run, ...]]:
        for number in range(DRAWS):
            yield train(change=partial(scale_weights, share=torch.finfo(torch.bfloat16).eps / 2, number=number))
        with suppress(Exception):
            yield train(low=True)

    runs = train()
    if any(difference(again, first)[0] for again, first in zip(train(), runs, strict=True)):
        raise ValueError("the plain model gives other numbers each time")
    written_once = train(directly=True) if _checkpointed(case.model) else None
    return Reference(runs, written_once, lambda: train(change=nudge), lowered)


def rounding_is_named(notes: Collection[str]) -> bool:
    """Whether the notes of a plan say that numbers may round otherwise than the plain model's."""
    return any(BITS_DEPART in note or note == BETWEEN_REGIONS for note in notes)


def twin_of(model: nn.Module, case: Case, make_optimizer: MakeOptimizer) -> Twin:
    """The model with the batch of a case and an optimizer of its own."""
    twin = Twin(model, case.fresh_batch(), case.call(model))
    twin.optimizer = make_optimizer(model.parameters())
    return twin


def steps_of(twin: Twin) -> Iterator[Run]:
    """Two steps; then one that accumulates the gradients of two forwards."""
    twin.step("step 1")
    twin.step("step 2")
    yield twin.run
    twin.run = Run([], {}, [])
    twin.step("accumulated", 2)
    yield twin.run


def nudge(model: nn.Module) -> None:
    """Make all weights one unit in the last place larger."""
    _change(model, lambda weight: torch.nextafter(weight, torch.full_like(weight, torch.inf)))


def _change(model: nn.Module, changed: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Set each parameter to its changed value; complex ones by their real and imaginary parts."""
    with torch.no_grad():
        for parameter in model.parameters():
            real = torch.view_as_real(parameter) if parameter.is_complex() else parameter
            real.copy_(changed(real))


def _checkpointed(model: nn.Module) -> list[Block]:
    return [module for module in model.modules() if isinstance(module, Block) and hasattr(module, "direct")]
