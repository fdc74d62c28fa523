"""The account of a training call: what its step holds whatever its schedule, and what lies elsewhere on the device."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from typing import Any, Protocol

import torch

from memopt.account.account import Account, Trains, account_of
from memopt.account.card_state import CardState, card_state
from memopt.account.elsewhere import Elsewhere
from memopt.account.optimizer_account import OptimizerAccount, optimizer_account
from memopt.account.optimizer_trial import LiveOptimizer, live_optimizer_of, parameters_of
from memopt.capture.inputs import Call, tensors_in
from memopt.compat.card import expandable_segments
from memopt.device.devices import device_of
from memopt.levers.decided_elsewhere import may_expand
from memopt.planning.optimizer_choice import OptimizerChoice
from memopt.planning.plan import Plan
from memopt.planning.terms import Buckets, ModelTerms, Situation


class Looks(Protocol):
    """Finds the bytes on the device that belong to no training step, as `memopt.run.share.Share` does and says."""

    @property
    def fixed_bytes(self) -> int | None: ...
    @property
    def found(self) -> Elsewhere: ...
    @property
    def tolerance_bytes(self) -> int: ...
    @property
    def gradients_may_stay(self) -> bool: ...
    @property
    def keeps_graph(self) -> bool: ...
    @property
    def note(self) -> str: ...
    def until_backward(self, tangent_bytes: int) -> tuple[int, int]: ...
    def look(self, call: Call) -> Elsewhere: ...


class CallAccounts:
    """Makes the accounts of a model's training calls. Bytes elsewhere on the device have a row of their own."""

    def __init__(self, terms: ModelTerms, optimizer_choice: OptimizerChoice, beside: Looks) -> None:
        self.terms, self.optimizer_choice, self.beside = terms, optimizer_choice, beside
        self._found: Elsewhere | None = None
        """The result of `Looks.look` when the current planning began; None outside of planning."""
        self.reached: frozenset[int] = frozenset()
        """The `id`s of the parameters that got a gradient in any call that was captured."""
        self.unforeseen_bytes = 0
        """The bytes that plans leave free since an allocation failed in a planned step."""
        self._card_state: CardState | None = None
        """What torch's allocator held when the current planning began, where `_card_state_now` tells; else None."""
        self._counted: dict[tuple[str, tuple[int, ...]], OptimizerAccount] | None = None
        """The optimizer's memory by device type and the `id`s of its parameters; None outside of planning."""

    def note_reached(self, parameters: Collection[int]) -> None:
        """Count optimizer state for the parameters with these `id`s too from now on, since they have gradients."""
        self.reached |= frozenset(parameters)

    def leave_free(self, nbytes: int) -> None:
        """Have plans leave at least these bytes free from now on, since an allocation failed in a planned step."""
        self.unforeseen_bytes = max(self.unforeseen_bytes, nbytes)

    def account(self, call: Call, situation: Situation, *, reached: frozenset[int] | None = None) -> Account:
        """The account of a call's step: all bytes that do not depend on the schedule. `reached` has the `id`s of the
        parameters that get gradients in the call; None counts gradients and optimizer state of all parameters."""
        found = (self._found or self.beside.look(call)) if situation.elsewhere is None else None
        trains, steps = self._trained(reached, situation)
        terms, live = self.terms, self.live_optimizer
        optimizer = None if terms.sharding else terms.options.optimizer
        account = account_of(
            terms.model, tensors_in(call), optimizer, terms.card, trains, steps, live, self._optimizer_account
        )
        account = self._with_further_optimizers(account, optimizer, steps)
        held, others = situation.gradients_held, situation.other_forwards
        meanwhile = (situation.meanwhile or 0) + (situation.for_other_models or 0)
        if terms.sharding is not None:
            account = terms.sharding.account(account, terms.options.optimizer, terms.card, steps)
        account = self.optimizer_choice.adjusted(
            replace(account, gradients_held=held, other_forwards=others, meanwhile=meanwhile)
        )
        if situation.buckets is not None:
            account = _with_buckets(account, situation.buckets)
        elsewhere = situation.elsewhere or 0
        if found is not None:
            elsewhere = found.beside(account)
            # Rounded down, since the tolerance has room for the rest: small new tensors then refuse no stored plan.
            elsewhere -= elsewhere % max(1, self.beside.tolerance_bytes // 2)
        caching = account.caching
        return replace(
            account,
            expandable=caching and expandable_segments(),
            may_expand=caching and may_expand(self.terms.options.allow),
            elsewhere=elsewhere,
            unforeseen=self.unforeseen_bytes,
            card_state=self._card_state,
            tolerance=self.beside.tolerance_bytes,
        )

    def _with_further_optimizers(self, account: Account, optimizer: Any, steps: Trains) -> Account:
        """The account with what optimizers hold that the user did not give, but which step parameters of the model that
        the given instance does not."""
        if not isinstance(optimizer, torch.optim.Optimizer):
            return account
        trained = {id(one): one for one in self.terms.model.parameters() if one.requires_grad and steps(one)}
        for one in parameters_of(optimizer):
            trained.pop(id(one), None)
        for live in self.beside.found.optimizers:
            stepped = {number: trained.pop(number) for number in live.order if number in trained}
            if stepped and (further := live.instance()) is not None:
                idle = [one for one in parameters_of(further) if id(one) not in stepped]
                with suppress(ValueError):  # of one that no plan counts, such as LBFGS
                    found = self._optimizer_account(further, stepped.values(), device_of(self.terms.card).type, idle)
                    account = replace(
                        account,
                        optimizer_state=account.optimizer_state + found.state_bytes,
                        optimizer_temporaries=max(account.optimizer_temporaries, found.step_temporary_bytes),
                        state_blocks=account.state_blocks + found.state_blocks,
                    )
        return account

    @contextmanager
    def one_look(self, call: Call, situation: Situation) -> Iterator[None]:
        """A context in which all accounts of a call use one search of the device and one trial of the optimizer."""
        before, self._card_state = self._card_state, self._card_state_now(call)
        found, self._found = self._found, self.beside.look(call) if situation.elsewhere is None else None
        try:
            with self.one_trial():
                yield
        finally:
            self._card_state, self._found = before, found

    @contextmanager
    def one_trial(self) -> Iterator[None]:
        """A context in which an optimizer, which must not step in it, is tried once for the bytes that it takes."""
        before = self._counted
        self._counted = {} if before is None else before
        try:
            yield
        finally:
            self._counted = before

    def _optimizer_account(
        self, optimizer: Any, parameters: Iterable[torch.Tensor], device_type: str, idle: Collection[torch.Tensor]
    ) -> OptimizerAccount:
        """The result of `optimizer_account`, computed once in a block of `one_trial`. Warns once if it is a guess."""
        stepped = list(parameters)
        key = (device_type, tuple(map(id, stepped)))
        counted = {} if self._counted is None else self._counted
        if key not in counted:
            counted[key] = optimizer_account(optimizer, stepped, device_type, idle)
            _say_once(counted[key].guess)
        return counted[key]

    def _card_state_now(self, call: Call) -> CardState | None:
        """What torch's caching allocator holds now; None for a device without one, and with `elsewhere_gb`."""
        device = self.terms.device()
        if self.beside.fixed_bytes is not None or not device_of(device).caching:
            return None
        gc.collect()
        with suppress(torch.OutOfMemoryError):  # then the budget has no room for them, and is refused later
            device_of(device).start_libraries(device)
        libraries = device_of(self.terms.card).library_workspaces(self.terms.card)
        return card_state(self.terms.model, tensors_in(call), libraries, device)

    @property
    def live_optimizer(self) -> LiveOptimizer | None:
        """The optimizer that already steps the model, if there is one of the class that is planned for; else None."""
        return live_optimizer_of(self.terms.options.optimizer, self.beside.found.optimizers)

    def _trained(self, reached: frozenset[int] | None, situation: Situation) -> tuple[Trains, Trains]:
        """Two predicates of a parameter: whether it has a gradient after the call's backward; and whether the optimizer
        may step it, which also holds if other calls or code outside of the forward give it a gradient. `reached` are
        the `id`s of the parameters that get a gradient from the call. Both predicates hold for all parameters where it
        is None, with buckets of `DistributedDataParallel`, and once levers on the optimizer are chosen."""
        if reached is None or self.optimizer_choice.chosen is not None or situation.buckets is not None:
            return (lambda parameter: True), (lambda parameter: True)
        stepped = reached | self.reached | self.stepped_elsewhere
        trained = stepped if situation.gradients_held else reached | self.stepped_elsewhere
        return (lambda parameter: id(parameter) in trained), (lambda parameter: id(parameter) in stepped)

    @property
    def stepped_elsewhere(self) -> frozenset[int]:
        """The `id`s of parameters with state in the given optimizer that no captured call gives a gradient."""
        optimizer = self.terms.options.optimizer
        state = optimizer.state if isinstance(optimizer, torch.optim.Optimizer) else ()
        return frozenset([id(parameter) for parameter in state if isinstance(parameter, torch.Tensor)]) - self.reached

    def still_fits(self, plan: Plan, call: Call, situation: Situation) -> bool:
        """Whether a plan from disk fits the budget together with what lies elsewhere on the device now."""
        now = self.account(call, situation).elsewhere
        return plan.ceiling_bytes - plan.account.elsewhere + now <= self.terms.options.budget_bytes


@cache
def _say_once(guess: str) -> None:
    """Warn, once for each text, with `guess`: why an optimizer's memory is guessed; empty where it is counted."""
    if guess:
        warnings.warn(guess, stacklevel=2)


def _with_buckets(account: Account, buckets: Buckets) -> Account:
    """The account under `DistributedDataParallel`. If gradients are views of the buckets as soon as they are computed,
    they count only in the row of the buckets, and gradients outside of the buckets as held. If they become views when
    they are exchanged, `into_buckets` has their bytes."""
    exchanged = min(account.gradients, buckets.nbytes) if buckets.views else 0
    if not buckets.hold_gradients:
        return replace(account, buckets=buckets.nbytes, into_buckets=exchanged)
    return replace(account, buckets=buckets.nbytes, gradients=account.gradients - exchanged, gradients_held=True)
