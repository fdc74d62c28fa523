"""Forwards whose backward is still to come, and whether that backward fits the budget when it comes."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from memopt.account.account import distinct_bytes
from memopt.account.breakdown import breakdown, live_versions
from memopt.capture.author_modes import autocast_is_on
from memopt.compat.autograd import Fate, current_backward, fate_of_gradient, keeps_graph
from memopt.emit.gradients import Accumulation, is_hooked
from memopt.errors import BudgetError
from memopt.planning.module_rows import held_after_forward
from memopt.planning.plan import Plan
from memopt.solver import Schedule


@dataclass(eq=False)
class PendingForward:
    """One planned forward. Its backward may come in other company than the plan was made for: see `before_backward`."""

    plan: Plan
    model: weakref.ref[nn.Module]
    hooked: frozenset[int]
    """The `id`s of the parameters whose gradients are planned to be handed to hooks."""
    beside: PendingForwards
    accumulation: Accumulation
    held_bytes: int
    """What it holds until its backward, beside what is held anyway."""
    regions_run: int = 0
    done: bool = False
    _backward: int = -1
    _extra_bytes: int = 0

    def before_backward(self, leaves: Sequence[torch.Tensor]) -> None:
        """Raise `BudgetError` where the backward of a region with these leaves would not fit as things are now."""
        if self._backward != current_backward():
            self._backward, self._extra_bytes = current_backward(), self._held_unplanned()
            self._check_autocast()
        self._extra_bytes += distinct_bytes(each for each in leaves if self._handed_on(each))
        waiting = sum(forward.held_bytes for forward in self.beside.waiting() if forward is not self)
        peak = self.plan.ceiling_bytes
        if keeps_graph():
            assert self.plan.schedule is not None
            peak = retained_peak(self.plan, self.plan.schedule)
        needed = peak - self.plan.account.other_forwards + waiting + self._extra_bytes
        if needed > self.plan.budget_bytes:
            reason = "backward(retain_graph=True)" if keeps_graph() else "the other forwards and gradients held"
            raise BudgetError(self.plan.budget_bytes, self.roomy_bytes(retained=keeps_graph()), reason, least=False)

    def after_backward(self) -> None:
        """The autograd graph may still be there, but nothing is saved in it any more."""
        self.done = True

    def roomy_bytes(self, *, retained: bool = False) -> int:
        """A budget that leaves room for one more such forward in waiting and for gradients both held and made, and for
        a `retained` graph: nothing is recomputed under it."""
        joined, account = self.plan.joined, self.plan.account
        assert joined is not None
        save_all = Schedule.save_all(joined.problem)
        peak = retained_peak(self.plan, save_all) if retained else self.plan.plain.peak_bytes
        waiting = max(1, len(self.beside.waiting()) - 1) * held_after_forward(joined.problem, save_all)
        gradients = account.gradients if account.gradients_held else 2 * account.gradients
        if any(region.steps for region in self.plan.regions) and (model := self.model()) is not None:
            gradients = distinct_bytes(parameter for parameter in model.parameters() if parameter.requires_grad)
        return peak - account.other_forwards + waiting + gradients

    def _held_unplanned(self) -> int:
        """Gradients that were not there when the plan was made, and are now."""
        model = self.model()
        if model is None or self.plan.account.gradients_held:
            return 0
        return distinct_bytes(parameter.grad for parameter in model.parameters() if parameter.grad is not None)

    def _check_autocast(self) -> None:
        """Warn where plain torch would compute something else: it casts in backwards, too, that run within autocast."""
        captured = self.plan.captured
        if autocast_is_on() and captured and any(each.author_typed for each in captured.operators):
            warnings.warn(
                "backward was called within torch.autocast on a model with autocast blocks of its own: plain torch "
                "would compute their gradients in 16 bits, memopt keeps their types; call backward outside of it",
                stacklevel=2,
            )

    def _handed_on(self, leaf: torch.Tensor) -> bool:
        """Whether the leaf's gradient comes beside its `.grad`, where the plan has it added, or is held to the end,
        where the plan may have the leaf stepped by it before."""
        if any(region.steps for region in self.plan.regions) and id(leaf) not in self.hooked:
            fate = fate_of_gradient(leaf)
            free = leaf.grad is None and self.accumulation.allowed and not is_hooked(leaf, stepped=True)
            return fate is Fate.RETURNED or (fate is Fate.ACCUMULATED and not free)
        if leaf.grad is None or not self.plan.account.gradients_held or id(leaf) in self.hooked:
            return False
        fate = fate_of_gradient(leaf)
        added = fate is Fate.ACCUMULATED and self.accumulation.allowed and not is_hooked(leaf)
        return not added and fate is not Fate.DROPPED


@dataclass
class PendingForwards:
    """The forwards of a model that wait for their backward; one that is dropped leaves by itself."""

    _alive: weakref.WeakSet[PendingForward] = field(default_factory=weakref.WeakSet)

    def waiting(self) -> list[PendingForward]:
        return [forward for forward in self._alive if not forward.done]

    def add(self, forward: PendingForward) -> None:
        self._alive.add(forward)


def retained_peak(plan: Plan, schedule: Schedule) -> int:
    """The step's peak where nothing that is saved for the backward is freed before its end.

    What is saved on the device and would go to the host in the backward stays, beside what comes back of it.
    """
    assert plan.joined is not None
    problem = plan.joined.problem
    boundary = schedule.evaluations.index(problem.forward_ops - 1) + 1
    saved = {storage for storage, made in live_versions(problem, schedule, boundary) if made < boundary}
    storages = tuple(replace(each, kept=each.kept or number in saved) for number, each in enumerate(problem.storages))
    late = [stay for stay in schedule.offloads if stay.storage in saved]
    there = replace(schedule, offloads=tuple(stay for stay in schedule.offloads if stay.storage not in saved))
    peak = breakdown(replace(problem, storages=storages), there, plan.account).peak_bytes
    return peak + sum(problem.storages[stay.storage].bytes for stay in late)
