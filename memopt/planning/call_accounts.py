"""The account of a training call: what its step holds whatever its schedule, and what lies elsewhere on the device."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn

from memopt.account.account import Account, account_of
from memopt.account.card_snapshot import card_state
from memopt.account.card_state import CardState
from memopt.account.elsewhere import Found
from memopt.account.live_optimizer import LiveOptimizer, the_live_one
from memopt.account.optimizer_account import OptimizerAccount, optimizer_account
from memopt.capture.inputs import Call, tensors_in
from memopt.device.libraries import start_libraries
from memopt.device.workspace_cuda import library_workspaces
from memopt.planning.model_terms import ModelTerms
from memopt.planning.options import Options
from memopt.planning.plan import Plan
from memopt.planning.situation import Buckets, Situation


class Looks(Protocol):
    """Says what lies on the model's device beside its training calls."""

    @property
    def fixed_bytes(self) -> int | None:
        """The bytes to count instead of those that are there; 0 for a plan for another device."""

    @property
    def found(self) -> Found:
        """What the latest look found."""

    @property
    def tolerance_bytes(self) -> int:
        """The bytes that plans leave free for what appears unnoticed, where it is looked for."""

    @property
    def note(self) -> str:
        """A sentence on the bytes elsewhere for plans and refusals; empty where there are next to none."""

    def look(self, call: Call) -> Found:
        """What lies on the device beside a call that begins now."""


class CallAccounts(ModelTerms):
    """The accounts of the training calls of one model."""

    def __init__(self, model: nn.Module, options: Options, beside: Looks) -> None:
        super().__init__(model, options)
        self.beside = beside
        self._found: Found | None = None
        """What was found when the planning that is under way began; None at other times."""
        self.reached: frozenset[int] = frozenset()
        """The `id`s of the parameters that got a gradient in any call that was captured."""
        self.unforeseen_bytes = 0
        """The bytes that plans leave free since an allocation failed in a planned step."""
        self._card_state: CardState | None = None
        """What torch's allocator held when the planning that is under way began; None where that does not matter."""
        self._counted: dict[tuple[str, tuple[int, ...]], OptimizerAccount] | None = None
        """The optimiser's memory by device type and the `id`s of the parameters that it steps, kept while a call is
        being planned; None at other times."""

    def account(self, call: Call, situation: Situation, *, captured: bool = False) -> Account:
        """The bytes of the step that no schedule changes. `captured`: the call is captured, so that it is known which
        parameters get gradients (`reached`)."""
        found = (self._found or self.beside.look(call)) if situation.elsewhere is None else None
        account = account_of(
            self.model,
            tensors_in(call),
            None if self.sharding else self.options.optimizer,
            self.card,
            self._is_reached if captured and self._counts_reached(situation) else lambda parameter: True,
            self.live_optimizer,
            self._optimizer_account,
        )
        held, others = situation.gradients_held, situation.other_forwards
        if self.sharding is not None:
            account = self.sharding.account(
                account,
                self.options.optimizer,
                self.card,
                self._is_reached if captured and self._counts_reached(situation) else lambda parameter: True,
            )
        account = self.proposing.adjusted(
            replace(account, gradients_held=held, other_forwards=others, meanwhile=situation.meanwhile)
        )
        if situation.buckets is not None:
            account = _with_buckets(account, situation.buckets)
        elsewhere = situation.elsewhere or 0
        if found is not None:
            elsewhere = found.beside(account.optimizer_state)
        return replace(
            account,
            elsewhere=elsewhere,
            unforeseen=self.unforeseen_bytes,
            card_state=self._card_state,
            tolerance=self.beside.tolerance_bytes,
        )

    @contextmanager
    def one_look(self, call: Call, situation: Situation) -> Iterator[None]:
        """A block that plans a call: what lies on the device is looked for when it begins only, since planning adds
        nothing that stays, and the optimiser's steps are tried once, since nothing else steps it meanwhile."""
        before, self._card_state = self._card_state, self._card_state_now(call)
        counted, self._counted = self._counted, {}
        found, self._found = self._found, self.beside.look(call) if situation.elsewhere is None else None
        try:
            yield
        finally:
            self._card_state, self._counted, self._found = before, counted, found

    def _optimizer_account(
        self, optimizer: Any, parameters: Iterable[torch.Tensor], device_type: str
    ) -> OptimizerAccount:
        """As `optimizer_account`, for the one optimiser of this planning."""
        stepped = list(parameters)
        if self._counted is None:
            return optimizer_account(optimizer, stepped, device_type)
        key = (device_type, tuple(map(id, stepped)))
        if key not in self._counted:
            self._counted[key] = optimizer_account(optimizer, stepped, device_type)
        return self._counted[key]

    def _card_state_now(self, call: Call) -> CardState | None:
        """What torch's allocator holds now; None for another device than a card that this process uses, and where the
        user says what lies elsewhere."""
        device = self.device()
        if self.beside.fixed_bytes is not None or device.type != "cuda":
            return None
        gc.collect()
        with suppress(torch.OutOfMemoryError):  # a budget with no room for them is refused
            start_libraries(device)
        return card_state(self.model, tensors_in(call), library_workspaces(self.card.major), device)

    @property
    def live_optimizer(self) -> LiveOptimizer | None:
        """The optimiser of the class that is planned for, where one steps the model already."""
        return the_live_one(self.options.optimizer, self.beside.found.optimizers)

    def _is_reached(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self.reached

    def _counts_reached(self, situation: Situation) -> bool:
        """Whether the account leaves out the parameters without gradients: not where other calls may have left
        gradients or state for them."""
        state_unknown = isinstance(self.options.optimizer, torch.optim.Optimizer) or self.proposing.chosen is not None
        return not (state_unknown or situation.gradients_held or situation.buckets is not None)

    def still_fits(self, plan: Plan, call: Call, situation: Situation) -> bool:
        """Whether a plan that was kept on disk fits beside what lies on the device now."""
        now = self.account(call, situation).elsewhere
        return plan.ceiling_bytes - plan.account.elsewhere + now <= self.options.budget_bytes


def _with_buckets(account: Account, buckets: Buckets) -> Account:
    """The account under `DistributedDataParallel`. Gradients that lie in the buckets are counted there, and as held:
    none is kept elsewhere until the backward's end."""
    exchanged = min(account.gradients, buckets.nbytes) if buckets.views else 0
    if not buckets.hold_gradients:
        return replace(account, buckets=buckets.nbytes, into_buckets=exchanged)
    return replace(account, buckets=buckets.nbytes, gradients=account.gradients - exchanged, gradients_held=True)
