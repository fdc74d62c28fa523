"""The search for the plan of a recorded call, with suggestions for its refusal: changes that only the user can make and
with which the step would fit, each with its budget."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from memopt.account.optimizer_trial import fused
from memopt.capture.inputs import Call, on_meta
from memopt.capture.operators import NothingToRewrite, Rewriting
from memopt.errors import CaptureError, would_do
from memopt.levers.microbatch import MICROBATCH
from memopt.microbatch import samples_of, split
from memopt.optimizers.low_rank import RANK, with_low_rank
from memopt.planning.call_planner import CallPlanner
from memopt.planning.on_card import expandable_segments
from memopt.planning.plan_search import PlanSearch
from memopt.planning.stages import Priced, Recorded
from memopt.planning.terms import Situation

_log = logging.getLogger("memopt")
_NOT_LOOKED = "at most 1% is missing, so no other optimizer, parameters or batch was tried"
_Look = Callable[[], Iterator[tuple[str, int]]]


def _unless_it_fails(look: _Look) -> list[tuple[str, int]]:
    """The suggestions of one look; none where it fails, since the refusal must be raised all the same."""
    try:
        return list(look())
    except Exception as failure:  # any exception: it plans models and optimisers that were never tried
        _log.debug("no advice from one look", exc_info=failure)
        return []


class _Advice:
    """Suggestions for one refused call. Each method yields a text and the bytes of the smallest budget with it."""

    def __init__(self, recorded: Recorded) -> None:
        self.planner, self.call, self.situation = recorded.planner, recorded.call, recorded.situation
        self.options = recorded.planner.terms.options

    def __call__(self, steps: Sequence[Priced], near: bool = False) -> list[str]:
        """A sentence for each suggestion that fits the budget; `steps` holds the step under every lever set. `near`:
        only settings with which the step computes the same, which are found without another capture."""
        looks: tuple[_Look, ...] = (partial(self.in_growing_segments, steps), partial(self.by_fused_kernels, steps))
        if not near:
            looks += (partial(self.in_microbatches, steps), partial(self.without_state, steps), self.with_low_rank)
        found = [piece for look in looks for piece in _unless_it_fails(look)]
        budget = self.options.budget_bytes
        helpful = [f"{words} {would_do(nbytes, budget)}" for words, nbytes in found if self.fits(nbytes)]
        return [*[_NOT_LOOKED] * near, *helpful]

    def fits(self, nbytes: int) -> bool:
        """Whether a smallest budget is within the one that was given."""
        return nbytes <= self.options.budget_bytes

    def in_microbatches(self, steps: Sequence[Priced]) -> Iterator[tuple[str, int]]:
        """The batch in microbatches of one sample, the smallest that `TrainStep` can split it into."""
        batch: Any = self.call[0] or self.call[1]
        try:
            samples = samples_of(batch)
        except (TypeError, ValueError):
            return
        held = replace(steps[0].account, gradients_held=True)
        apart = any(region.has_batch_statistics for priced in steps for region in priced.step.traced.regions)
        if MICROBATCH.name not in self.options.allow or samples < 2 or apart or not self.fits(held.resident_bytes):
            return
        piece = split(batch, samples)[0]
        call: Call = (piece, {}) if self.call[0] else ((), piece)
        levers = min(steps, key=lambda priced: priced.smallest()[0]).levers
        nbytes = self.least(self.planner, call, replace(self.situation, gradients_held=True), levers)
        yield f"for TrainStep, in microbatches down to one of its {samples} samples,", nbytes

    def in_growing_segments(self, steps: Sequence[Priced]) -> Iterator[tuple[str, int]]:
        """Expandable segments, with which torch's allocator on a card leaves fewer holes between blocks."""
        if steps[0].account.caching and not expandable_segments():
            words = "with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment"
            yield words, self.smallest_of(steps, expandable=True)

    def by_fused_kernels(self, steps: Sequence[Priced]) -> Iterator[tuple[str, int]]:
        """The fused kernels of the same optimiser, which need no temporaries."""
        other = fused(self.options.optimizer)
        if other is not None:
            words = "with fused=True in the optimizer, whose step then holds nothing beside its state,"
            yield words, self.with_optimizer(other, steps)

    def without_state(self, steps: Sequence[Priced]) -> Iterator[tuple[str, int]]:
        """An optimiser without state."""
        if steps[0].account.optimizer_state:
            words = "with a stateless optimizer, torch.optim.SGD without momentum, which learns otherwise,"
            yield words, self.with_optimizer(torch.optim.SGD, steps)

    def with_optimizer(self, optimizer: Any, steps: Sequence[Priced]) -> int:
        """The smallest budget in bytes with another optimiser."""
        planner = self.like(self.planner, optimizer=optimizer)
        account = planner.accounts.account(self.call, self.situation, reached=self.planner.accounts.reached)
        return self.smallest_of([priced.under(account) for priced in steps])

    @staticmethod
    def smallest_of(steps: Sequence[Priced], *, expandable: bool | None = None) -> int:
        """The smallest budget in bytes of all steps; `expandable` is as for `on_card`."""
        return min(priced.smallest(expandable=expandable)[0] for priced in steps)

    def with_low_rank(self) -> Iterator[tuple[str, int]]:
        """Low-rank adapters on the frozen model."""
        if isinstance(self.options.optimizer, torch.optim.Optimizer):  # over parameters that it would not have then
            return
        twin, number = with_low_rank(self.planner.terms.model)
        if not number:
            return
        planner = self.like(self.planner, twin)
        account = planner.accounts.account(self.call, self.situation)
        if self.fits(account.resident_bytes):
            nbytes = self.least(planner, self.call, replace(self.situation, hooked=frozenset()))
            yield f"with LoRA (adapters of rank {RANK} on {number} linear layers, all else frozen)", nbytes

    @staticmethod
    def like(planner: CallPlanner, model: Any = None, **options: Any) -> CallPlanner:
        """A planner for another model, or with other options."""
        other = replace(planner.terms.options, **options)
        return type(planner)(
            model or planner.terms.model, other, planner.loss_fn, planner.plain, planner.accounts.beside
        )

    def least(self, planner: CallPlanner, call: Call, situation: Situation, levers: Rewriting | None = None) -> int:
        """The smallest budget in bytes for a call, found on fake tensors; under one lever set, if it is given."""
        planner = self.like(planner)
        with planner.terms.types(), torch.enable_grad():
            captured = planner.capture_on_fakes(on_meta(call), planner.proposing.narrowed)
            recorded = Recorded(planner, captured, call, situation)
            if levers is None:
                return self.smallest_of(list(recorded.candidates()))
            traced = recorded.trace(levers)
            return traced.price(traced.account()).smallest()[0]


def search_for(
    recorded: Recorded,
    *,
    ahead: bool = False,
    advise: bool = True,
    budget_bytes: int | None = None,
) -> PlanSearch:
    """The search for the plan of a recorded call.

    Args:
        ahead: the call is planned before its first run: proposals may be tried that need narrower parameters, for which
            it is captured once more, and a refusal names further changes.
        advise: a refusal also names proposals that are not allowed, and looks for those changes.
        budget_bytes: instead of the budget of the options.
    """
    planner = recorded.planner
    options, proposing = planner.terms.options, planner.proposing
    found: dict[str, Any] = {"narrowed": _on_narrow_parameters(recorded)} if ahead else {}
    found |= {"advice": _Advice(recorded)} if ahead and advise else {}
    return PlanSearch(
        options.budget_bytes if budget_bytes is None else budget_bytes,
        options.effort,
        proposing.allowed,
        partial(proposing.combinations, gradients_held=recorded.situation.gradients_held, further=advise),
        planner.notes,
        **found,
    )


def _on_narrow_parameters(recorded: Recorded) -> Callable[[Rewriting], Priced | None]:
    """A function that returns the step under a lever set with parameters in bf16; None where the model's code cannot be
    captured so."""
    planner, call, situation = recorded.planner, recorded.call, recorded.situation

    @cache
    def on_fakes() -> Recorded:
        return replace(recorded, captured=planner.capture_on_fakes(call, planner.proposing.narrowing()))

    def step(levers: Rewriting) -> Priced | None:
        with contextlib.suppress(NothingToRewrite, CaptureError):
            return on_fakes().trace(levers).price(planner.accounts.account(call, situation))
        return None

    return step
