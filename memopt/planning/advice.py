"""The search for the plan of a recorded call, and the advice in its refusal: changes that only the user can make, each
with the budget within which the step would then fit."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from memopt.account.optimizer_trial import GivenOptimizer, fused
from memopt.capture.inputs import Call, on_meta
from memopt.capture.operators import NothingToRewrite, Rewriting
from memopt.capture.tensor_parallel import meta_copy
from memopt.device import hardware, known_hardware
from memopt.device.devices import device_of
from memopt.errors import GIB, CaptureError, Way, round_up, would_do
from memopt.levers.all import EXPANDABLE_SEGMENTS, MICROBATCH, OFFLOAD_PARAMETERS, allow_exactly, may_expand
from memopt.microbatch import samples_of, split
from memopt.planning.call_planner import CallPlanner
from memopt.planning.plan_search import ADAPTERS, CAPTURE, PlanSearch, Tries
from memopt.planning.stages import Priced, Recorded
from memopt.planning.terms import Situation
from memopt.units import size

_log = logging.getLogger("memopt")
_NOT_LOOKED = "the budget is at most 1% too small, so no other optimizer, parameters or batch was tried"
_Suggest = Callable[[], Iterator[Way]]


def _unless_it_fails(suggest: _Suggest) -> list[Way]:
    """The suggestions that `suggest` yields; none where it fails, since the refusal must be raised all the same."""
    try:
        return list(suggest())
    except Exception as failure:  # any exception: it plans models and optimizers that were never tried
        _log.debug("a change that the BudgetError might have named could not be tried", exc_info=failure)
        return []


class _Advice:
    """Finds changes with which a refused call would fit. Each method tries one kind of change and yields those that
    would help; their sentences end before the bytes, which are appended once it is known which ones fit."""

    def __init__(self, recorded: Recorded) -> None:
        self.planner, self.call, self.situation = recorded.planner, recorded.call, recorded.situation
        self.options = recorded.planner.terms.options
        self.budget_bytes = self.options.budget_bytes

    def __call__(self, steps: Sequence[Priced], near: bool, tries: Tries) -> tuple[list[str], list[Way]]:
        """Sentences on what was not tried, and suggestions with which the step fits the budget, or a larger card.

        `steps` has the step under every lever set; changes are tried on the one that needs the smallest budget. With
        `near` (the budget is almost large enough) only changes are tried that need no capture and leave the results
        of the step as they are; otherwise all changes, as far as `tries` allows."""
        lean = min(steps, key=Priced.smallest)
        kinds: tuple[_Suggest, ...] = (
            partial(self.in_growing_segments, lean),
            partial(self.with_parameters_on_host, lean),
            partial(self.by_fused_kernels, lean),
        )
        if not near:
            captured = (partial(kind, lean, tries) for kind in (self.in_microbatches, self.with_low_rank))
            kinds += (partial(self.without_state, lean), *captured)
        found = [way for suggest in kinds for way in _unless_it_fails(suggest)]
        helpful = [
            replace(way, sentence=f"{way.sentence} {would_do(way.peak_bytes, self.budget_bytes)}")
            for way in found
            if way.peak_bytes <= self.budget_bytes
        ]
        return [_NOT_LOOKED] * near, [*helpful, *_unless_it_fails(partial(self.on_a_larger_card, lean))]

    def in_microbatches(self, lean: Priced, tries: Tries) -> Iterator[Way]:
        """Suggests `TrainStep`, with the budget for microbatches of one sample, the smallest that it makes."""
        batch: Any = self.call[0] or self.call[1]
        try:
            samples = samples_of(batch)
        except (TypeError, ValueError):
            return
        held = replace(lean.account, gradients_held=True)
        apart = any(region.has_batch_statistics for region in lean.step.traced.regions)
        if MICROBATCH.name not in self.options.allow or samples < 2 or apart or held.resident_bytes > self.budget_bytes:
            return
        typed = "memopt.TrainStep(model, optimizer)"
        if not tries.allow(f"microbatches by {typed}", CAPTURE, lean):
            return
        piece = split(batch, samples)[0]
        call: Call = (piece, {}) if self.call[0] else ((), piece)
        nbytes = self.least(self.planner, call, replace(self.situation, gradients_held=True), lean)
        sentence = (
            f"with TrainStep, which splits the batch of {samples} samples into microbatches of as little as 1 sample,"
        )
        changes = f"it splits a batch of {samples} samples into as few parts as fit; equal but for rounding"
        yield Way(typed, nbytes, changes, sentence=sentence)

    def in_growing_segments(self, lean: Priced) -> Iterator[Way]:
        """Suggests expandable segments, with which torch's allocator leaves fewer holes, where `allow` lacks them."""
        name, allow = EXPANDABLE_SEGMENTS.name, self.options.allow
        if lean.account.caching and name not in allow and may_expand({name}):
            changes = "expandable segments for torch's allocator: fewer holes between blocks; the same numbers"
            nbytes = lean.under(replace(lean.account, may_expand=True)).smallest()[0]
            yield Way(allow_exactly({*allow, name}), nbytes, changes, 0.0, f"with {name!r} in allow")

    def with_parameters_on_host(self, lean: Priced) -> Iterator[Way]:
        """Suggests the lever that holds frozen parameters in the host's memory, where `allow` lacks it."""
        name = OFFLOAD_PARAMETERS.name
        if name in self.options.allow:
            return
        planner = self.like(self.planner, levers=(*self.options.levers, OFFLOAD_PARAMETERS))
        own = planner.price_settings
        opened = lean.step.priced_for(link=own.link, activations=own.activations, frozen=own.frozen)
        hosting = Priced(opened, lean.account).hosting_all()
        if hosting is not None:
            lying = size(hosting.step.problem.problem.home_bytes)
            changes = (
                "frozen parameters are held in host memory, and copied to the device before each use; the same bits"
            )
            sentence = f"with {name!r} in allow, which holds up to {lying} of frozen parameters on the host,"
            yield Way(allow_exactly({*self.options.allow, name}), hosting.smallest()[0], changes, None, sentence)

    def on_a_larger_card(self, lean: Priced) -> Iterator[Way]:
        """Suggests the smallest card that holds the step, where the one that it is planned for cannot."""
        card, nbytes = self.planner.terms.card, lean.smallest()[0]
        cards = [one for one in map(hardware, known_hardware()) if one.device_type == card.device_type]
        larger = [one for one in cards if one.memory_bytes >= nbytes]
        if card.memory_bytes >= nbytes or not larger or device_of(card).is_host:
            return
        least = min(larger, key=lambda one: one.memory_bytes)
        has = f"{least.memory_bytes / GIB:.4g} GB"
        sentence = f"on {least.name}, which has {has}, it fits in about {round_up(nbytes / GIB)} GB"
        changes = f"another card, which has {has}; the step holds about the same bytes"
        yield Way(f'device="{least.name}"', nbytes, changes, None, sentence)

    def by_fused_kernels(self, lean: Priced) -> Iterator[Way]:
        """Suggests the fused kernels of the same optimizer, which need no temporaries."""
        other = fused(self.options.optimizer)
        if other is not None:
            sentence = "with fused=True in the optimizer, whose step then needs no temporaries,"
            changes = "its step holds no temporaries; equal but for rounding"
            typed = f"{_name_of(self.options.optimizer)}(…, fused=True)"
            yield Way(typed, self.with_optimizer(other, lean), changes, 0.0, sentence)

    def without_state(self, lean: Priced) -> Iterator[Way]:
        """Suggests an optimizer without state."""
        if lean.account.optimizer_state:
            sentence = "with a stateless optimizer, torch.optim.SGD without momentum, which trains differently,"
            nbytes = self.with_optimizer(torch.optim.SGD, lean)
            changes = "no state for each parameter; it trains differently"
            yield Way("torch.optim.SGD(…)", nbytes, changes, sentence=sentence)

    def with_optimizer(self, optimizer: Any, lean: Priced) -> int:
        """The smallest budget in bytes for the step `lean` with another optimizer."""
        planner = self.like(self.planner, given_optimizer=GivenOptimizer.of(optimizer))
        account = planner.accounts.account(self.call, self.situation, reached=self.planner.accounts.reached)
        return lean.under(account).smallest()[0]

    def with_low_rank(self, lean: Priced, tries: Tries) -> Iterator[Way]:
        """Suggests low-rank adapters on the frozen model, where at least half of its parameters are trained now."""
        if isinstance(self.options.optimizer, torch.optim.Optimizer):  # it steps parameters that would be frozen
            return
        model, typed = self.planner.terms.model, f"LoRA (peft.LoraConfig(r={RANK}))"
        parameters = list(model.parameters())
        trained = sum(one.numel() for one in parameters if one.requires_grad)
        if 2 * trained < sum(one.numel() for one in parameters) or not _linear_layers(model):
            return
        if sum(one.nbytes for one in parameters) > self.budget_bytes:
            return
        if not tries.allow(typed, ADAPTERS, lean):
            return
        twin, number = with_low_rank(model)
        planner = self.like(self.planner, twin)
        account = planner.accounts.account(self.call, self.situation)
        if number and account.resident_bytes <= self.budget_bytes:
            nbytes = self.least(planner, self.call, replace(self.situation, hooked=frozenset()), lean)
            changes = f"adapters of rank {RANK} on {number} linear layers are trained, all else is frozen"
            sentence = f"with LoRA (adapters of rank {RANK} on {number} linear layers, all else frozen)"
            yield Way(typed, nbytes, changes, sentence=sentence)

    @staticmethod
    def like(planner: CallPlanner, model: Any = None, **options: Any) -> CallPlanner:
        """A planner for another model, or with other options."""
        other = replace(planner.terms.options, **options)
        return type(planner)(
            model or planner.terms.model, other, planner.loss_fn, planner.plain, planner.accounts.beside
        )

    def least(self, planner: CallPlanner, call: Call, situation: Situation, step: Priced) -> int:
        """The smallest budget in bytes for a call, captured on fake tensors, under the lever set of `step`; where that
        set finds nothing to rewrite, under the last set before it that does."""
        planner, number = self.like(planner), self.planner.terms.lever_sets.index(step.levers)
        with planner.terms.types(), torch.enable_grad():
            captured = planner.capture_on_fakes(on_meta(call), planner.optimizer_choice.narrowed)
            recorded = Recorded(planner, captured, call, situation)
            return next(recorded.from_tightest(planner.terms.lever_sets[: number + 1])).smallest()[0]


def _name_of(optimizer: Any) -> str:
    """The name of an optimizer's class, also of an instance or a partial of it."""
    made = optimizer if isinstance(optimizer, type) else getattr(optimizer, "func", None) or type(optimizer)
    return optimizer if isinstance(optimizer, str) else str(getattr(made, "__name__", "the optimizer"))


def search_for(recorded: Recorded, *, advise: bool, ahead: bool = False, budget_bytes: int | None = None) -> PlanSearch:
    """The search, yet to be run, for the plan of a recorded call under the options that it was recorded with.

    Args:
        ahead: whether the call is planned before its first run. Then levers on the optimizer may be tried that cast
            parameters to 16 bits, for which the call is captured once more.
        advise: whether a `BudgetError` names levers on the optimizer that `allow` lacks, and with `ahead` other
            changes with which the step would fit.
        budget_bytes: takes the place of the budget in the options."""
    planner = recorded.planner
    options, optimizer_choice = planner.terms.options, planner.optimizer_choice
    found: dict[str, Any] = {"narrowed": _on_narrow_parameters(recorded)} if ahead else {}
    found |= {"advice": _Advice(recorded)} if ahead and advise else {}
    return PlanSearch(
        options.budget_bytes if budget_bytes is None else budget_bytes,
        options.effort,
        optimizer_choice.allowed,
        partial(optimizer_choice.combinations, gradients_held=recorded.situation.gradients_held, further=advise),
        planner.notes,
        options.allow,
        **found,
    )


def _on_narrow_parameters(recorded: Recorded) -> Callable[[Rewriting], Priced | None]:
    """A function that prices the step under a lever set with parameters in bf16; None where that is impossible."""
    planner, call, situation = recorded.planner, recorded.call, recorded.situation

    @cache
    def on_fakes() -> Recorded:
        return replace(recorded, captured=planner.capture_on_fakes(call, planner.optimizer_choice.narrowing()))

    def step(levers: Rewriting) -> Priced | None:
        with contextlib.suppress(NothingToRewrite, CaptureError):
            return on_fakes().trace(levers).price(planner.accounts.account(call, situation))
        return None

    return step


RANK = 16


class _LowRank(nn.Module):
    """A frozen linear layer plus a trained product of two fp32 matrices of rank `rank` (Hu et al. 2021)."""

    def __init__(self, base: nn.Module, in_features: int, out_features: int, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.empty(rank, in_features, device="meta"))
        self.up = nn.Parameter(torch.zeros(out_features, rank, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        low = functional.linear(x, self.down.to(x.dtype))
        result: Tensor = self.base(x) + functional.linear(low, self.up.to(x.dtype))
        return result


def with_low_rank(model: nn.Module, rank: int = RANK) -> tuple[nn.Module, int]:
    """A copy of the model on "meta" in which only low-rank adapters (LoRA) of rank `rank` at its linear layers are
    trained, and the number of these adapters.

    Linear layers that are direct children of the model, such as the output head, get none, as is usual."""
    twin = meta_copy(model).requires_grad_(False)
    layers = _linear_layers(twin)
    for module, name, child, sizes in layers:
        setattr(module, name, _LowRank(child, *sizes, rank))
    return twin, len(layers)


def _linear_layers(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module, tuple[int, int]]]:
    """Each linear layer that is no direct child of the model: its parent, its name there, itself, and its features."""
    return [
        (module, name, child, sizes)
        for module in model.modules()
        if module is not model
        for name, child in module.named_children()
        if (sizes := _linear_sizes(child)) is not None
    ]


def _linear_sizes(module: nn.Module) -> tuple[int, int] | None:
    """The input and output features of a linear layer (torch's, or transformers' `Conv1D`); None for other modules."""
    weight = getattr(module, "weight", None)
    if type(module) is nn.Linear:
        return module.in_features, module.out_features
    if type(module).__name__ == "Conv1D" and isinstance(weight, Tensor) and weight.dim() == 2:
        return weight.shape[0], weight.shape[1]
    return None
