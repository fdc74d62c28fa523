"""Which proposals about the optimiser fit one model's training, and what plans count on once some are pulled."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import nn

from memopt.account.account import Account
from memopt.capture.fake_model import Narrowed
from memopt.device import Hardware
from memopt.optimizers import (
    BF16_PARAMETERS,
    OPTIMIZER_IN_BACKWARD,
    OPTIMIZER_PROPOSALS,
    Proposals,
    ProposalSet,
    Stepping,
    TrainingFacts,
    combinations_of,
    kept_wide,
    stepping_hooks,
)
from memopt.planning.captured import Captured
from memopt.planning.options import Options
from memopt.planning.plan import Plan

_NOT_FUSED = (
    f"{OPTIMIZER_IN_BACKWARD!r} is not weighed: code that inductor compiles keeps no order between a parameter's step "
    "and what reads the parameter; give optimize backend='aten'"
)


@dataclass
class Proposing:
    """The proposals of one model on one card; `low` is the 16-bit dtype that steps compute in, if any."""

    model: nn.Module
    options: Options
    card: Hardware
    low: torch.dtype | None
    fused: bool = False
    """Whether calls are compiled by a backend that orders kernels itself."""
    pulled: ProposalSet | None = None
    """Every plan counts on it."""
    decided: bool = False
    """Whether the optimiser may be made already: nothing more is pulled then."""

    def decide(self, names: Collection[str]) -> None:
        """Have every further plan count on these, and on no others."""
        levers = Proposals.named(names)
        self.pulled = ProposalSet.of(self.facts, levers) if names else None
        self.decided = True

    @property
    def allowed(self) -> frozenset[str]:
        """What may still be pulled."""
        return frozenset() if self.decided else frozenset(OPTIMIZER_PROPOSALS) & self.options.allow

    def check_allowed(self) -> None:
        """Raise `ValueError` where a proposal is allowed that makes no sense here."""
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
        """Why something that is allowed is not weighed."""
        return (_NOT_FUSED,) if self.fused and OPTIMIZER_IN_BACKWARD in self.allowed else ()

    def combinations(self, *, gradients_held: bool = False) -> tuple[ProposalSet, ...]:
        """All that may still be taken, allowed or not, in the order of their price; `gradients_held`: in a call that
        adds to gradients."""
        return combinations_of(self.facts, self._possible(gradients_held)) if self.pulled is None else ()

    def allowed_combinations(self, *, gradients_held: bool = False) -> tuple[ProposalSet, ...]:
        """Those of them that may be pulled."""
        names = self._possible(gradients_held) & self.allowed
        return combinations_of(self.facts, names) if names else ()

    def _possible(self, gradients_held: bool) -> frozenset[str]:
        idle = set()
        if self.fused or gradients_held or self.low is torch.float16 or _has_ranks():
            idle.add(OPTIMIZER_IN_BACKWARD)
        if self.card.name == "cpu":  # its memory is the host's: there is nothing to move
            idle.add("offload_optimizer")
        if self.low is not torch.bfloat16:
            idle.add(BF16_PARAMETERS)
        return frozenset(OPTIMIZER_PROPOSALS) - idle

    @property
    def facts(self) -> TrainingFacts:
        """What the optimiser trains, on which device."""
        return TrainingFacts.of(self.model, self.options.optimizer, self.card)

    def adjusted(self, account: Account) -> Account:
        """The account of the step with what was pulled."""
        return account if self.pulled is None else self.pulled.adjusted(account)

    @property
    def stepping(self) -> Stepping | None:
        """How the optimiser steps within the backward by what was pulled; None: after it."""
        return None if self.pulled is None else self.pulled.stepping

    def as_kept(self, captured: Captured, plan: Plan) -> Captured:
        """A captured call with what a plan that was made before had pulled."""
        stepping = self.stepping
        if OPTIMIZER_IN_BACKWARD in plan.proposals:
            stepping = ProposalSet.of(self.facts, Proposals.named(plan.proposals)).stepping
        return captured.stepping_by(stepping).stepping_as([region.steps for region in plan.regions])

    @property
    def narrowed(self) -> Narrowed | None:
        """How parameters and inputs are turned by what was pulled; None: they stay."""
        return self.narrowing() if self.pulled is not None and self.pulled.narrows else None

    def narrowing(self) -> Narrowed:
        """How bf16 parameters turn them."""
        return Narrowed(torch.bfloat16, frozenset(map(id, kept_wide(self.model))))

    @property
    def floats(self) -> torch.dtype | None:
        """What the model takes its fp32 inputs in; None: they stay."""
        return None if self.narrowed is None else self.narrowed.dtype

    def check_parameters(self) -> None:
        """Raise `ValueError` where plans count on parameters in another dtype than they have, or on an optimiser that
        steps them in the backward and does not."""
        narrowed = self.narrowed
        if narrowed and any(narrowed.dtype_of(each) != each.dtype for each in self.model.parameters()):
            raise ValueError(
                "the plan counts on parameters in bf16, and they are not yet: memopt.wrap_optimizer(model, optimizer) "
                "turns them; train with what it returns"
            )
        if self.stepping is not None:
            self._check_stepping()

    def _check_stepping(self) -> None:
        trained = [each for each in self.model.parameters() if each.requires_grad]
        after = [each for each in trained if len(stepping_hooks(each)) != 1]
        if after:
            raise ValueError(
                f"the plan counts on {OPTIMIZER_IN_BACKWARD}, and {len(after)} of {len(trained)} parameters, the first "
                f"of shape {tuple(after[0].shape)}, are not stepped in the backward: train with what "
                "memopt.wrap_optimizer(model, optimizer) returns, for an optimizer of all trained parameters"
            )
        if any(each.grad is not None for each in trained):
            raise ValueError(
                f"gradients are held from before, and the plan counts on {OPTIMIZER_IN_BACKWARD}, with which each "
                "backward is a whole step; call optimizer.zero_grad() first"
            )


def _has_ranks() -> bool:
    """Whether other processes train the same model: each would step by gradients of its own."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
