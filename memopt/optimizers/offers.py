"""Combinations of proposals about the optimiser that a plan may be made with, and what each does to its account."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from itertools import combinations

from memopt.account.account import Account
from memopt.optimizers.lever_price import LeverPrice
from memopt.optimizers.levers import Levers
from memopt.optimizers.proposal import Proposal
from memopt.optimizers.propose import propose
from memopt.optimizers.stepping import Stepping
from memopt.optimizers.training_facts import TrainingFacts

BF16_PARAMETERS = "bf16_parameters"
OPTIMIZER_IN_BACKWARD = "optimizer_in_backward"
OPTIMIZER_PROPOSALS = {
    BF16_PARAMETERS: "parameters and gradients in bfloat16, rounded by chance when they are stepped",
    "low_bit_optimizer": "Adam's moments in 8 bits",
    "offload_optimizer": "the optimizer's state in the host's memory",
    OPTIMIZER_IN_BACKWARD: "each parameter stepped, and its gradient freed, as soon as the backward has it",
}
"""What `allow` takes. The first changes the captured step, the last what is held in its backward."""


@dataclass(frozen=True)
class Offer:
    """Some proposals, taken together."""

    levers: Levers
    proposals: tuple[Proposal, ...]
    """One on top of the other, each with its price."""
    stepping: Stepping | None = None
    """How parameters are stepped within the backward; None: after it."""

    @classmethod
    def of(cls, facts: TrainingFacts, levers: Levers, known: dict[Levers, LeverPrice] | None = None) -> Offer:
        """`known` and errors are those of `propose`."""
        known = {} if known is None else known
        proposals = propose(facts, levers, known)
        return cls(levers, proposals, known[levers].stepping)

    @property
    def names(self) -> tuple[str, ...]:
        """As in `allow`."""
        return self.levers.names

    @property
    def added_seconds(self) -> float:
        """Of an optimiser's step."""
        return sum(each.added_seconds for each in self.proposals)

    @property
    def host_bytes(self) -> int:
        """What it takes of the host's memory."""
        return sum(each.host_bytes for each in self.proposals)

    def adjusted(self, account: Account) -> Account:
        """The account of the step with the proposals taken, whether the parameters are turned already or not. What is
        stepped within the backward leaves nothing behind it: gradients and temporaries are the problem's then."""
        after = asdict(self.proposals[-1].after)
        if self.stepping is not None:
            after.update(gradients=0, optimizer_temporaries=0)
        return replace(account, **after)

    @property
    def narrows(self) -> bool:
        """Whether parameters, and with them the captured step, change their dtype."""
        return BF16_PARAMETERS in self.names


def offers(facts: TrainingFacts, names: Collection[str]) -> tuple[Offer, ...]:
    """All combinations of the named proposals that fit the optimiser, those that add the least time first."""
    found: list[Offer] = []
    known: dict[Levers, LeverPrice] = {}
    for number in range(1, len(names) + 1):
        for chosen in combinations(sorted(names), number):
            levers = Levers.named(chosen)
            try:
                found.append(Offer.of(facts, levers, known))
            except (TypeError, ValueError):  # 8 bits are for Adam alone
                continue
    return tuple(sorted(found, key=lambda offer: offer.added_seconds))
