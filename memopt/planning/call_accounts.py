"""The account of a training call: what its step holds whatever its schedule, and what lies elsewhere on the device."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from memopt.account.account import Account, account_of
from memopt.account.card_snapshot import card_state
from memopt.account.card_state import CardState
from memopt.account.elsewhere import Around, Elsewhere
from memopt.account.live_optimizer import LiveOptimizer, the_live_one
from memopt.account.optimizer_account import OptimizerAccount, optimizer_account
from memopt.capture.data_sizes import is_real
from memopt.capture.inputs import Call, tensors_in
from memopt.compat.fsdp import is_fully_sharded
from memopt.device.devices import device_of
from memopt.planning.model_terms import ModelTerms
from memopt.planning.options import Options
from memopt.planning.plan import Plan
from memopt.planning.situation import Buckets, Situation


class CallAccounts(ModelTerms):
    """The accounts of the training calls of one model."""

    def __init__(self, model: nn.Module, options: Options) -> None:
        super().__init__(model, options)
        self.around: Callable[[Call], Around] = lambda call: Around(tuple(tensors_in(call)))
        """Returns the memory that belongs to a call, which `elsewhere` leaves out."""
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
        found = self.elsewhere.now(self.around(call)) if situation.elsewhere is None else None
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
        account = self.proposing.adjusted(replace(account, gradients_held=held, other_forwards=others))
        if situation.buckets is not None:
            account = _with_buckets(account, situation.buckets)
        elsewhere = situation.elsewhere or 0
        if found is not None:
            elsewhere = found.beside(account.optimizer_state)
        return replace(account, elsewhere=elsewhere, unforeseen=self.unforeseen_bytes, card_state=self._card_state)

    @contextmanager
    def one_look(self, call: Call, situation: Situation) -> Iterator[None]:
        """A block that plans a call: what lies on the device is looked for when it begins only, since planning adds
        nothing that stays, and the optimiser's steps are tried once, since nothing else steps it meanwhile."""
        before, self._card_state = self._card_state, self._card_state_now(call)
        counted, self._counted = self._counted, {}
        still = self.elsewhere.held_still(self.around(call)) if situation.elsewhere is None else nullcontext()
        try:
            with still:
                yield
        finally:
            self._card_state, self._counted = before, counted

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
        if self.elsewhere.fixed_bytes is not None or not device_of(device).caching:
            return None
        gc.collect()
        with suppress(torch.OutOfMemoryError):  # a budget with no room for them is refused
            device_of(device).start_libraries(device)
        return card_state(self.model, tensors_in(call), self._libraries, device)

    @property
    def _libraries(self) -> tuple[int, ...]:
        """The bytes of the blocks that the card's libraries keep."""
        return device_of(self.card).library_workspaces(self.card)

    @property
    def live_optimizer(self) -> LiveOptimizer | None:
        """The optimiser of the class that is planned for, where one steps the model already."""
        return the_live_one(self.options.optimizer, self.elsewhere.optimizers)

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

    @cached_property
    def elsewhere(self) -> Elsewhere:
        """Counts what lies on the model's device; nothing for a plan for another device, unless the user says."""
        options = self.options
        here = options.hardware is None and all(map(is_real, self.model.parameters()))
        # What fully_shard gathers and frees lies between the regions, and would be found elsewhere as well.
        looked_for = here and not is_fully_sharded(self.model)
        fixed_bytes = options.elsewhere_bytes if looked_for or options.elsewhere_bytes is not None else 0
        with_state = options.optimizer is not None
        return Elsewhere(
            self.model, options.budget_bytes, fixed_bytes, with_state=with_state, libraries=sum(self._libraries)
        )


def _with_buckets(account: Account, buckets: Buckets) -> Account:
    """The account under `DistributedDataParallel`. Gradients that lie in the buckets are counted there, and as held:
    none is kept elsewhere until the backward's end."""
    exchanged = min(account.gradients, buckets.nbytes) if buckets.views else 0
    if not buckets.hold_gradients:
        return replace(account, buckets=buckets.nbytes, into_buckets=exchanged)
    return replace(account, buckets=buckets.nbytes, gradients=account.gradients - exchanged, gradients_held=True)
