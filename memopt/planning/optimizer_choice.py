"""The levers on the optimizer that are possible for one model's training, and how the chosen ones change plans."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch

from memopt.account.account import Account
from memopt.capture.on_fakes import ParameterCast
from memopt.device.devices import device_of
from memopt.levers import LEVERS, Lever
from memopt.levers.optimizer_levers import OPTIMIZER_IN_BACKWARD, PricedLevers, TrainingFacts, Wanted, combinations_of
from memopt.optimizers import Stepping, kept_wide, stepping_hooks
from memopt.planning.plan import Plan
from memopt.planning.terms import ModelTerms, has_ranks

_NOT_FUSED = (
    "{!r} is not considered: code that inductor compiles keeps no order between a parameter's "
    "step and the operators that read the parameter; give optimize backend='aten'"
)


@dataclass
class OptimizerChoice:
    """Which levers on the optimizer one model on one device can use, and those that were chosen."""

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
        return any(map(_in_backward, self._named(self.allowed)))

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
