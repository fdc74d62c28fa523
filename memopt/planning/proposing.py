"""Which proposals about the optimiser fit one model's training, and what plans count on once some are pulled."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import nn

from memopt.budget.account import Account
from memopt.capture.fake_model import Narrowed
from memopt.options import Options
from memopt.pricing import Hardware
from memopt.proposals import (
    BF16_PARAMETERS,
    OPTIMIZER_PROPOSALS,
    Levers,
    Offer,
    TrainingFacts,
    kept_wide,
    offers,
    propose,
)


@dataclass
class Proposing:
    """The proposals of one model on one card; `low` is the 16-bit dtype that steps compute in, if any."""

    model: nn.Module
    options: Options
    card: Hardware
    low: torch.dtype | None
    pulled: Offer | None = None
    """Every plan counts on it."""
    decided: bool = False
    """Whether the optimiser may be made already: nothing more is pulled then."""

    def decide(self, names: Collection[str]) -> None:
        """Have every further plan count on these, and on no others."""
        levers = Levers.named(names)
        self.pulled = Offer(levers, propose(self.facts, levers)) if names else None
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

    def offers(self) -> tuple[Offer, ...]:
        """All that may still be taken, allowed or not, in the order of their price."""
        return offers(self.facts, self._possible()) if self.pulled is None else ()

    def offers_allowed(self) -> tuple[Offer, ...]:
        """Those of them that may be pulled."""
        names = self._possible() & self.allowed
        return offers(self.facts, names) if names else ()

    def _possible(self) -> frozenset[str]:
        idle = set()
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
        """Raise `ValueError` where plans count on parameters in another dtype than they have."""
        narrowed = self.narrowed
        if narrowed and any(narrowed.dtype_of(each) != each.dtype for each in self.model.parameters()):
            raise ValueError(
                "the plan counts on parameters in bf16, and they are not yet: memopt.wrap_optimizer(model, optimizer) "
                "turns them; train with what it returns"
            )
