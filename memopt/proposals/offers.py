"""Combinations of proposals about the optimiser that a plan may be made with, and what each does to its account."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import combinations

from memopt.budget.account import Account
from memopt.proposals.levers import Levers
from memopt.proposals.proposal import Proposal
from memopt.proposals.propose import propose
from memopt.proposals.training_facts import TrainingFacts

OPTIMIZER_PROPOSALS = {
    "low_bit_optimizer": "Adam's moments in 8 bits",
    "offload_optimizer": "the optimizer's state in the host's memory",
}
"""What `allow` takes: these leave the captured step as it is."""


@dataclass(frozen=True)
class Offer:
    """Some proposals, taken together."""

    levers: Levers
    proposals: tuple[Proposal, ...]
    """One on top of the other, each with its price."""

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
        """The account of the step with the proposals taken."""
        first, last = self.proposals[0].before, self.proposals[-1].after
        return replace(
            account,
            optimizer_state=account.optimizer_state - first.optimizer_state + last.optimizer_state,
            optimizer_temporaries=account.optimizer_temporaries
            - first.optimizer_temporaries
            + last.optimizer_temporaries,
        )


def offers(facts: TrainingFacts, names: Collection[str]) -> tuple[Offer, ...]:
    """All combinations of the named proposals that fit the optimiser, those that add the least time first."""
    found = []
    for number in range(1, len(names) + 1):
        for chosen in combinations(sorted(names), number):
            levers = Levers.named(chosen)
            try:
                found.append(Offer(levers, propose(facts, levers)))
            except (TypeError, ValueError):  # 8 bits are for Adam alone
                continue
    return tuple(sorted(found, key=lambda offer: offer.added_seconds))
