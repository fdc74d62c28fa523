"""Suggests changes that only the user can make and with which a refused step would fit, each with its budget."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from memopt.account.optimizer_trial import fused
from memopt.capture.inputs import Call, on_meta
from memopt.capture.operators import Rewriting
from memopt.errors import would_do
from memopt.levers.microbatch import MICROBATCH
from memopt.microbatch import samples_of, split
from memopt.optimizers.low_rank import RANK, with_low_rank
from memopt.planning.call_planner import CallPlanner
from memopt.planning.on_card import expandable_segments
from memopt.planning.plan_search import Candidate
from memopt.planning.planner import smallest
from memopt.planning.situation import Situation

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


class Advice:
    """Suggestions for one refused call. Each method yields a text and the bytes of the smallest budget with it."""

    def __init__(self, planner: CallPlanner, call: Call, situation: Situation) -> None:
        self.planner, self.call, self.situation = planner, call, situation
        self.options = planner.options

    def __call__(self, steps: Sequence[Candidate], near: bool = False) -> list[str]:
        """A sentence for each suggestion that fits the budget; `steps` holds the candidate of every lever set. `near`:
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

    def in_microbatches(self, steps: Sequence[Candidate]) -> Iterator[tuple[str, int]]:
        """The batch in microbatches of one sample, the smallest that `TrainStep` can split it into."""
        batch: Any = self.call[0] or self.call[1]
        try:
            samples = samples_of(batch)
        except (TypeError, ValueError):
            return
        held = replace(steps[0][2], gradients_held=True)
        apart = any(region.has_batch_statistics for _, captured, _ in steps for region in captured.regions)
        if MICROBATCH.name not in self.options.allow or samples < 2 or apart or not self.fits(held.resident_bytes):
            return
        piece = split(batch, samples)[0]
        call: Call = (piece, {}) if self.call[0] else ((), piece)
        levers = min(steps, key=lambda step: self.smallest_of([step]))[0]
        nbytes = self.least(self.planner, call, replace(self.situation, gradients_held=True), levers)
        yield f"for TrainStep, in microbatches down to one of its {samples} samples,", nbytes

    def in_growing_segments(self, steps: Sequence[Candidate]) -> Iterator[tuple[str, int]]:
        """Expandable segments, with which torch's allocator on a card leaves fewer holes between blocks."""
        if steps[0][2].caching and not expandable_segments():
            words = "with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment"
            yield words, self.smallest_of(steps, expandable=True)

    def by_fused_kernels(self, steps: Sequence[Candidate]) -> Iterator[tuple[str, int]]:
        """The fused kernels of the same optimiser, which need no temporaries."""
        other = fused(self.options.optimizer)
        if other is not None:
            words = "with fused=True in the optimizer, whose step then holds nothing beside its state,"
            yield words, self.with_optimizer(other, steps)

    def without_state(self, steps: Sequence[Candidate]) -> Iterator[tuple[str, int]]:
        """An optimiser without state."""
        if steps[0][2].optimizer_state:
            words = "with a stateless optimizer, torch.optim.SGD without momentum, which learns otherwise,"
            yield words, self.with_optimizer(torch.optim.SGD, steps)

    def with_optimizer(self, optimizer: Any, steps: Sequence[Candidate]) -> int:
        """The smallest budget in bytes with another optimiser."""
        planner = self.like(self.planner, optimizer=optimizer)
        account = planner.account(self.call, self.situation, reached=self.planner.reached)
        return self.smallest_of([(levers, captured, account) for levers, captured, _ in steps])

    @staticmethod
    def smallest_of(steps: Sequence[Candidate], *, expandable: bool | None = None) -> int:
        """The smallest budget in bytes of all candidates; `expandable` is as for `on_card`."""
        joined = (
            (captured.joined(accumulating=account.gradients_held, meanwhile=account.meanwhile), account)
            for _, captured, account in steps
        )
        return min(smallest(problem, account, expandable=expandable)[0] for problem, account in joined)

    def with_low_rank(self) -> Iterator[tuple[str, int]]:
        """Low-rank adapters on the frozen model."""
        if isinstance(self.options.optimizer, torch.optim.Optimizer):  # over parameters that it would not have then
            return
        twin, number = with_low_rank(self.planner.model)
        if not number:
            return
        planner = self.like(self.planner, twin)
        account = planner.account(self.call, self.situation)
        if self.fits(account.resident_bytes):
            nbytes = self.least(planner, self.call, replace(self.situation, hooked=frozenset()))
            yield f"with LoRA (adapters of rank {RANK} on {number} linear layers, all else frozen)", nbytes

    @staticmethod
    def like(planner: CallPlanner, model: Any = None, **options: Any) -> CallPlanner:
        """A planner for another model, or with other options."""
        other = replace(planner.options, **options)
        return type(planner)(model or planner.model, other, planner.loss_fn, planner.plain, planner.beside)

    def least(self, planner: CallPlanner, call: Call, situation: Situation, levers: Rewriting | None = None) -> int:
        """The smallest budget in bytes for a call, found on fake tensors; under one lever set, if it is given."""
        planner = self.like(planner)
        with planner.types(), torch.enable_grad():
            captured = planner.capture_on_fakes(on_meta(call), planner.proposing.narrowed)
            search = planner.search(situation, advise=False)
            if levers is None:
                return self.smallest_of(list(planner.candidates(captured, call, situation, search)))
            step = planner.rewrite_and_price(captured, call, situation, levers)
            return self.smallest_of([(levers, step, planner.captured_account(captured, call, situation, step))])
