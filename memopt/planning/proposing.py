"""The optimiser proposals that are possible for one model's training, and the effect on plans of those that were
chosen."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from memopt.account.account import Account
from memopt.capture.fake_model import Narrowed
from memopt.device import Hardware
from memopt.device.devices import device_of
from memopt.optimizers import (
    BF16_PARAMETERS,
    OPTIMIZER_IN_BACKWARD,
    OPTIMIZER_PROPOSALS,
    Proposals,
    ProposalSet,
    Stepping,
    TrainingFacts,
    TrainingPrice,
    Wanted,
    combinations_of,
    further_combinations,
    kept_wide,
    stepping_hooks,
)
from memopt.planning.captured import Captured
from memopt.planning.options import Options
from memopt.planning.plan import Plan

_NOT_FUSED = (
    f"{OPTIMIZER_IN_BACKWARD!r} is not considered: code that inductor compiles keeps no order between a parameter's "
    "step and the operators that read the parameter; give optimize backend='aten'"
)


@dataclass
class Proposing:
    """The optimiser proposals for one model on one device; `low` is the 16-bit dtype that steps compute in, or None."""

    model: nn.Module
    options: Options
    card: Hardware
    low: torch.dtype | None
    fused: bool = False
    """Whether calls are compiled by a backend that orders kernels itself."""
    chosen: ProposalSet | None = None
    """The chosen proposals, on which every plan is based; None where none is chosen."""
    decided: bool = False
    """Whether the choice is final, because the optimiser may exist by now."""

    def decide(self, names: Collection[str]) -> None:
        """Base every further plan on exactly these proposals."""
        levers = Proposals.named(names)
        self.chosen = ProposalSet.of(self.facts, levers) if names else None
        self.decided = True

    @property
    def allowed(self) -> frozenset[str]:
        """The proposals that may still be chosen."""
        return frozenset() if self.decided else frozenset(OPTIMIZER_PROPOSALS) & self.options.allow

    def check_allowed(self) -> None:
        """Raise `ValueError` where an allowed proposal cannot work with this step."""
        if BF16_PARAMETERS in self.options.allow and self.low is not torch.bfloat16:
            raise ValueError(
                f"{BF16_PARAMETERS!r} in allow needs a step in bf16, which precision={self.options.precision!r} is not "
                f"on {self.card.name!r}; give precision='bf16', or leave it out"
            )
        if OPTIMIZER_IN_BACKWARD in self.options.allow and self.low is torch.float16:
            raise ValueError(
                f"{OPTIMIZER_IN_BACKWARD!r} in allow steps before it is known whether all gradients are finite, which "
                f"training in fp16 asks, as precision={self.options.precision!r} is on {self.card.name!r}; give "
                "precision='fp32', or leave it out"
            )

    @property
    def notes(self) -> tuple[str, ...]:
        """Why an allowed proposal is not considered."""
        return (_NOT_FUSED,) if self.fused and OPTIMIZER_IN_BACKWARD in self.allowed else ()

    def combinations(self, wanted: Wanted, *, gradients_held: bool = False) -> Iterator[ProposalSet]:
        """All possible combinations: those of allowed proposals, the cheapest first, and then those with others as far
        as they are `wanted`, the smallest first; none once some are chosen. `gradients_held`: for a call that adds to
        existing gradients."""
        if self.chosen is not None:
            return
        known: dict[Proposals, TrainingPrice] = {}
        names = self._possible(gradients_held)
        yield from combinations_of(self.facts, names & self.allowed, known)
        yield from further_combinations(self.facts, names, self.allowed, wanted, known)

    def allowed_combinations(self, wanted: Wanted, *, gradients_held: bool = False) -> tuple[ProposalSet, ...]:
        """The combinations of allowed proposals, the cheapest first, whichever are `wanted`."""
        names = self._possible(gradients_held) & self.allowed
        return combinations_of(self.facts, names) if names else ()

    def _possible(self, gradients_held: bool) -> frozenset[str]:
        """The proposals that can work for the model, device and call."""
        idle = set()
        if self.fused or gradients_held or self.low is torch.float16 or _has_ranks():
            idle.add(OPTIMIZER_IN_BACKWARD)
        if device_of(self.card).is_host:  # its memory is the host's: there is nothing to move
            idle.add("offload_optimizer")
        if self.low is not torch.bfloat16:
            idle.add(BF16_PARAMETERS)
        return frozenset(OPTIMIZER_PROPOSALS) - idle

    @property
    def facts(self) -> TrainingFacts:
        """The parameters that the optimiser trains, and on which device."""
        return TrainingFacts.of(self.model, self.options.optimizer, self.card)

    def adjusted(self, account: Account) -> Account:
        """The account of the step with the chosen proposals."""
        return account if self.chosen is None else self.chosen.adjusted(account)

    @property
    def stepping(self) -> Stepping | None:
        """How the optimiser steps within the backward under the chosen proposals; None where it steps after it."""
        return None if self.chosen is None else self.chosen.stepping

    def account_as_kept(self, account: Account, plan: Plan) -> Account:
        """The account of a call with the proposals of `plan`, a plan from the cache."""
        if not plan.proposals:
            return account
        return ProposalSet.of(self.facts, Proposals.named(plan.proposals)).adjusted(account)

    def as_kept(self, captured: Captured, plan: Plan) -> Captured:
        """A captured call with the proposals of `plan`, a plan from the cache."""
        stepping = self.stepping
        if OPTIMIZER_IN_BACKWARD in plan.proposals:
            stepping = ProposalSet.of(self.facts, Proposals.named(plan.proposals)).stepping
        return captured.stepping_by(stepping).stepping_as([region.steps for region in plan.regions])

    @property
    def narrowed(self) -> Narrowed | None:
        """The cast of parameters and inputs under the chosen proposals; None where they keep their dtype."""
        return self.narrowing() if self.chosen is not None and self.chosen.narrows else None

    def narrowing(self) -> Narrowed:
        """The cast of parameters and inputs under the proposal for bf16 parameters."""
        return Narrowed(torch.bfloat16, frozenset(map(id, kept_wide(self.model))))

    @property
    def floats(self) -> torch.dtype | None:
        """The dtype in which the model takes its fp32 inputs; None where they keep it."""
        return None if self.narrowed is None else self.narrowed.dtype

    def check_parameters(self) -> None:
        """Raise `ValueError` where plans assume parameters in another dtype than they have, or an optimiser that steps
        them in the backward and does not."""
        narrowed = self.narrowed
        if narrowed and any(narrowed.dtype_of(parameter) != parameter.dtype for parameter in self.model.parameters()):
            raise ValueError(
                "the plan counts on parameters in bf16, and they are not yet: memopt.wrap_optimizer(model, optimizer) "
                "casts them; train with the optimizer that it returns"
            )
        if self.stepping is not None:
            self._check_stepping()

    def _check_stepping(self) -> None:
        """Raise `ValueError` where a trained parameter is not stepped in the backward, or holds a gradient."""
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        after = [parameter for parameter in trained if len(stepping_hooks(parameter)) != 1]
        if after:
            raise ValueError(
                f"the plan counts on {OPTIMIZER_IN_BACKWARD}, and {len(after)} of {len(trained)} parameters, the first "
                f"of shape {tuple(after[0].shape)}, are not stepped in the backward: train with the optimizer that "
                "memopt.wrap_optimizer(model, optimizer) returns, for an optimizer of all trained parameters"
            )
        if any(parameter.grad is not None for parameter in trained):
            raise ValueError(
                f"gradients are held from before, and the plan counts on {OPTIMIZER_IN_BACKWARD}, with which each "
                "backward is a whole step; call optimizer.zero_grad() first"
            )


def _has_ranks() -> bool:
    """Whether several processes train the model together: each would step with its own gradients."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
