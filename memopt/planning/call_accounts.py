"""The account of a training call: what its step holds whatever its schedule, and what lies elsewhere on the device; and
the levers on the optimizer that are possible for one model's training, and how the chosen ones change plans."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol

import torch

from memopt.account.account import Account, Trains, account_of
from memopt.account.card_state import CardState, card_state
from memopt.account.elsewhere import Elsewhere
from memopt.account.optimizer_account import OptimizerAccount, optimizer_account
from memopt.account.optimizer_trial import LiveOptimizer, live_optimizer_of, parameters_of
from memopt.capture.inputs import Call, tensors_in
from memopt.capture.on_fakes import ParameterCast
from memopt.compat.card import expandable_segments
from memopt.device.devices import device_of
from memopt.levers import LEVERS, Lever
from memopt.levers.all import may_expand
from memopt.levers.optimizer_levers import OPTIMIZER_IN_BACKWARD, PricedLevers, TrainingFacts, Wanted, combinations_of
from memopt.optimizers import Stepping, kept_wide, stepping_hooks
from memopt.planning.plan import Plan
from memopt.planning.terms import Buckets, ModelTerms, Situation, has_ranks


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


_NOT_FUSED = (
    "{!r} is not considered: code that inductor compiles keeps no order between a parameter's "
    "step and the operators that read the parameter; give optimize backend='aten'"
)


@dataclass
class OptimizerChoice:
    """The levers on the optimizer that one model on one device can use, and those chosen."""

    terms: ModelTerms
    chosen: PricedLevers | None = None
    """The chosen levers, on which every plan is based; None where none is chosen."""
    decided: bool = False
    """Whether the choice is final, because the optimizer may exist by now."""

    @property
    def _low(self) -> torch.dtype | None:
        """The 16-bit dtype that steps compute in; None where all is in fp32."""
        return self.terms.rewriting.autocast

    def decide(self, names: Collection[str]) -> None:
        """Choose exactly the levers with these names. The choice is final: every later plan assumes them."""
        self.chosen = self._priced(names) if names else None
        self.decided = True

    def _priced(self, names: Collection[str]) -> PricedLevers:
        return PricedLevers.of(self.facts, self._named(names))

    def _named(self, names: Collection[str] | None = None) -> list[Lever]:
        """The levers on the optimizer, memopt's and the user's own, or those with these names."""
        known = [lever for lever in dict.fromkeys([*LEVERS.values(), *self.terms.options.levers]) if lever.optimizer]
        return known if names is None else [lever for lever in known if lever.name in names]

    @property
    def allowed(self) -> frozenset[str]:
        """The names of the allowed levers on the optimizer that may still be chosen; none once the choice is final."""
        return frozenset() if self.decided else self.terms.options.optimizer_levers

    @property
    def may_step_in_backward(self) -> bool:
        """Whether a lever may still be chosen that steps parameters in the backward."""
        allowed = self.allowed
        return bool(allowed) and any(map(_in_backward, self._named(allowed)))

    def check_allowed(self) -> None:
        """Raise `ValueError` where an allowed lever cannot work with this step's dtype: one that casts parameters to
        bf16 needs a step in bf16, and one that steps in the backward cannot have fp16."""
        requested, card = f"precision={self.terms.options.precision!r}", self.terms.card.name
        for lever in self.terms.options.levers:
            if _narrows(lever) and self._low is not torch.bfloat16:
                raise ValueError(
                    f"{lever.name!r} in allow needs a step in bf16, and {requested} gives none on {card!r}; give "
                    f"precision='bf16', or take {lever.name!r} out of allow"
                )
            if _in_backward(lever) and self._low is torch.float16:
                raise ValueError(
                    f"{lever.name!r} updates each parameter before all gradients are known to be finite, but training "
                    f"in fp16, which {requested} means on {card!r}, must know that first; give precision='fp32', or "
                    f"take {lever.name!r} out of allow"
                )

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence for each allowed lever that cannot be used with the backend that runs the plans."""
        inside = filter(_in_backward, self._named(self.allowed))
        return tuple(_NOT_FUSED.format(lever.name) for lever in inside) if self.terms.fuses else ()

    def combinations(
        self, wanted: Wanted, *, gradients_held: bool = False, further: bool = True
    ) -> Iterator[PricedLevers]:
        """The combinations of levers on the optimizer that are possible, each with its bytes and seconds; none where
        the levers are chosen already (`chosen`). First come those of allowed levers only, the cheapest first. With
        `further`, others follow that would help: they have levers that are not allowed, `wanted` returns True for them,
        and the fewest levers come first.

        `gradients_held`: the call adds to existing gradients, which rules out stepping in the backward."""
        levers = self._possible(gradients_held) if self.chosen is None else []
        levers = [lever for lever in levers if further or lever.name in self.allowed]
        if levers:
            yield from combinations_of(self.facts, levers, self.allowed, wanted)

    def _possible(self, gradients_held: bool) -> list[Lever]:
        """The levers that can work for the model, device and call."""
        whole = self.terms.fuses or gradients_held or self._low is torch.float16 or has_ranks()
        on_host = device_of(self.terms.card).is_host  # its memory is the host's: there is nothing to move
        wide = self._low is not torch.bfloat16
        return [
            lever
            for lever in self._named()
            if not ((whole and _in_backward(lever)) or (wide and _narrows(lever)))
            if not (on_host and lever.optimizer is not None and lever.optimizer.offloads)
        ]

    @property
    def facts(self) -> TrainingFacts:
        """The parameters that the optimizer trains, their device, and what else levers on the optimizer depend on."""
        return TrainingFacts.of(self.terms.model, self.terms.options.optimizer, self.terms.card)

    def adjusted(self, account: Account) -> Account:
        """The account with the chosen levers on the optimizer."""
        return account if self.chosen is None else self.chosen.adjusted(account)

    @property
    def stepping(self) -> Stepping | None:
        """The temporary bytes of stepping within the backward under the chosen levers; None if after it."""
        return None if self.chosen is None else self.chosen.stepping

    def account_of(self, account: Account, plan: Plan) -> Account:
        """The account with the levers on the optimizer that `plan`, a plan from disk, uses."""
        return self._priced(plan.proposals).adjusted(account) if plan.proposals else account

    def stepping_of(self, plan: Plan) -> Stepping | None:
        """As `stepping`, under the levers of `plan`, a plan from disk, if one of these steps within the backward."""
        inside = any(map(_in_backward, self._named(plan.proposals)))
        return self._priced(plan.proposals).stepping if inside else self.stepping

    def narrowed_by(self, plan: Plan) -> ParameterCast | None:
        """The cast of parameters and fp32 inputs to bf16 that the levers of `plan` make; None where they make none."""
        return self.narrowing() if any(map(_narrows, self._named(plan.proposals))) else None

    @property
    def narrowed(self) -> ParameterCast | None:
        """The cast of parameters and fp32 inputs to bf16 that the chosen levers make; None where they make none."""
        return self.narrowing() if self.chosen is not None and self.chosen.narrows else None

    def narrowing(self) -> ParameterCast:
        """The cast to bf16 that a lever on parameters makes, and which parameters it leaves in fp32."""
        return ParameterCast(torch.bfloat16, frozenset(map(id, kept_wide(self.terms.model))))

    @property
    def floats(self) -> torch.dtype | None:
        """The dtype to which the chosen levers cast fp32 inputs of the model; None where these stay in fp32."""
        return None if self.narrowed is None else self.narrowed.dtype

    def check_parameters(self) -> None:
        """Raise `ValueError` where parameters are not in the dtype, or not stepped as early, as plans assume."""
        narrowed = self.narrowed
        if narrowed and any(
            narrowed.dtype_of(parameter) != parameter.dtype for parameter in self.terms.model.parameters()
        ):
            raise ValueError(
                "the plan assumes parameters in bf16, but they are not cast yet: memopt.wrap_optimizer(model, "
                "optimizer) casts them; train with the optimizer that it returns"
            )
        if self.stepping is None:
            return
        trained = [parameter for parameter in self.terms.model.parameters() if parameter.requires_grad]
        after = [parameter for parameter in trained if len(stepping_hooks(parameter)) != 1]
        if after:
            raise ValueError(
                f"the plan relies on {OPTIMIZER_IN_BACKWARD.name}, but {len(after)} of {len(trained)} parameters, the "
                f"first of shape {tuple(after[0].shape)}, are not stepped in the backward: train with the optimizer "
                "that memopt.wrap_optimizer(model, optimizer) returns, for an optimizer of all trained parameters"
            )
        if any(parameter.grad is not None for parameter in trained):
            raise ValueError(
                f"parameters hold gradients already, but the plan relies on {OPTIMIZER_IN_BACKWARD.name}, with which "
                "each backward is a whole step; call optimizer.zero_grad() first"
            )


def _narrows(lever: Lever) -> bool:
    return lever.optimizer is not None and lever.optimizer.narrows


def _in_backward(lever: Lever) -> bool:
    return lever.optimizer is not None and lever.optimizer.in_backward


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
        """The result of `_card_state_now` when the current planning began; None outside of planning."""
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
        held, others = situation.gradients_held, situation.other_forwards
        meanwhile = (situation.meanwhile or 0) + (situation.for_other_models or 0)
        if terms.sharding is not None:
            account = terms.sharding.account(account, terms.options.optimizer, terms.card, steps)
        account = self.optimizer_choice.adjusted(
            replace(account, gradients_held=held, other_forwards=others, meanwhile=meanwhile)
        )
        account = self._with_further_optimizers(account, optimizer, steps)
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
        """The state of torch's caching allocator; None for a device without one, and with `elsewhere_gb`."""
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
