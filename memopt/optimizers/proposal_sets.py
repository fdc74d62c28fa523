"""Combinations of proposals that a plan may be made with, with their prices and what each does to the account."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from itertools import combinations

from memopt.account.account import Account
from memopt.optimizers.priced_proposal import PricedProposal
from memopt.optimizers.proposals import Proposals
from memopt.optimizers.receipt import price_proposals
from memopt.optimizers.stepping import Stepping
from memopt.optimizers.training_facts import TrainingFacts
from memopt.optimizers.training_price import TrainingPrice

BF16_PARAMETERS = "bf16_parameters"
OPTIMIZER_IN_BACKWARD = "optimizer_in_backward"
OPTIMIZER_PROPOSALS = {
    BF16_PARAMETERS: "parameters and gradients in bfloat16, rounded stochastically when they are stepped",
    "low_bit_optimizer": "Adam's moments in 8 bits",
    "offload_optimizer": "the optimizer's state in the host's memory",
    OPTIMIZER_IN_BACKWARD: "each parameter stepped, and its gradient freed, as soon as the backward has it",
}
"""Name in `allow` and one line of explanation. The first changes the captured step, the last what its backward holds.
"""


@dataclass(frozen=True)
class ProposalSet:
    """Some proposals taken together, with their prices."""

    chosen: Proposals
    priced: tuple[PricedProposal, ...]
    """One for each proposal, each priced on top of those before it."""
    stepping: Stepping | None = None
    """How parameters are stepped within the backward; None where they are stepped after it."""

    @classmethod
    def of(
        cls, facts: TrainingFacts, chosen: Proposals, known: dict[Proposals, TrainingPrice] | None = None
    ) -> ProposalSet:
        """Price `chosen`. `known` is as for `price_proposals`, and so are the errors."""
        known = {} if known is None else known
        priced = price_proposals(facts, chosen, known)
        return cls(chosen, priced, known[chosen].stepping)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the proposals in `allow`, from the inside out."""
        return self.chosen.names

    @property
    def added_seconds(self) -> float:
        """Seconds that all of them together add to `optimizer.step()`."""
        return sum(proposal.added_seconds for proposal in self.priced)

    @property
    def host_bytes(self) -> int:
        """Bytes of the host's memory that all of them together hold."""
        return sum(proposal.host_bytes for proposal in self.priced)

    def adjusted(self, account: Account) -> Account:
        """The account of the step once the proposals are taken, whether or not the parameters are narrowed already.

        A parameter that is stepped within the backward leaves no gradient and no temporaries behind; the problem that
        is solved has them, so they are 0 in the account.
        """
        after = asdict(self.priced[-1].after)
        if self.stepping is not None:
            after.update(gradients=0, optimizer_temporaries=0)
        return replace(account, **after)

    @property
    def narrows(self) -> bool:
        """Whether parameters, and with them the captured step, change their dtype."""
        return BF16_PARAMETERS in self.names


def combinations_of(facts: TrainingFacts, names: Collection[str]) -> tuple[ProposalSet, ...]:
    """All combinations of the named proposals that fit the optimiser, sorted by the time they add, least first."""
    found: list[ProposalSet] = []
    known: dict[Proposals, TrainingPrice] = {}
    for number in range(1, len(names) + 1):
        for combination in combinations(sorted(names), number):
            try:
                found.append(ProposalSet.of(facts, Proposals.named(combination), known))
            except (TypeError, ValueError):  # does not fit this optimiser, as 8 bits fit Adam alone
                continue
    return tuple(sorted(found, key=lambda proposal_set: proposal_set.added_seconds))
