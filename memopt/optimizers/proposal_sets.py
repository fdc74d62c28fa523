"""Combinations of proposals that a plan may be made with, with their prices and what each does to the account."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import combinations

from memopt.account.account import Account
from memopt.optimizers.priced_proposal import PricedProposal
from memopt.optimizers.proposals import Proposals
from memopt.optimizers.receipt import price_proposals
from memopt.optimizers.stepping import Stepping
from memopt.optimizers.training_facts import TrainingFacts
from memopt.optimizers.training_price import TrainingPrice

Wanted = Callable[[Collection[str]], bool]
"""Whether a combination of proposals, by their names, is worth its price."""
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
    state_blocks: tuple[int, ...] = ()
    """The bytes of each tensor of the optimiser's state on a GPU, with all of the proposals."""

    @classmethod
    def of(
        cls, facts: TrainingFacts, chosen: Proposals, known: dict[Proposals, TrainingPrice] | None = None
    ) -> ProposalSet:
        """Price `chosen`. `known` is as for `price_proposals`, and so are the errors."""
        known = {} if known is None else known
        priced = price_proposals(facts, chosen, known)
        return cls(chosen, priced, known[chosen].stepping, known[chosen].state_blocks)

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
        return replace(account, **after, state_blocks=self.state_blocks)

    @property
    def narrows(self) -> bool:
        """Whether parameters, and with them the captured step, change their dtype."""
        return BF16_PARAMETERS in self.names


def least_with_proposals(account: Account) -> int:
    """Bytes that are resident whatever proposals are taken: these leave half of the parameters at least."""
    return replace(account, parameters=account.parameters // 2, optimizer_state=0, gradients=0).resident_bytes


def combinations_of(
    facts: TrainingFacts, names: Collection[str], known: dict[Proposals, TrainingPrice] | None = None
) -> tuple[ProposalSet, ...]:
    """All combinations of the named proposals that fit the optimiser, sorted by the time they add, least first; `known`
    is as for `price_proposals`."""
    numbers = range(1, len(names) + 1)
    return _priced(facts, [some for number in numbers for some in combinations(sorted(names), number)], known)


def further_combinations(
    facts: TrainingFacts,
    names: Collection[str],
    allowed: Collection[str],
    wanted: Wanted,
    known: dict[Proposals, TrainingPrice] | None = None,
) -> Iterator[ProposalSet]:
    """The combinations of the named proposals that are not of `allowed` ones alone: the smallest ones first, and of as
    many proposals those that add the least time. Only those that are `wanted` once they come up are priced."""
    known = {} if known is None else known
    for number in range(1, len(names) + 1):
        some = [one for one in combinations(sorted(names), number) if not set(allowed).issuperset(one) and wanted(one)]
        yield from _priced(facts, some, known)


def _priced(
    facts: TrainingFacts, chosen: Iterable[Collection[str]], known: dict[Proposals, TrainingPrice] | None
) -> tuple[ProposalSet, ...]:
    """The combinations that fit the optimiser, sorted by the time they add."""
    found: list[ProposalSet] = []
    known = {} if known is None else known
    for names in chosen:
        try:
            found.append(ProposalSet.of(facts, Proposals.named(names), known))
        except (TypeError, ValueError):  # does not fit this optimiser, as 8 bits fit Adam alone
            continue
    return tuple(sorted(found, key=lambda proposal_set: proposal_set.added_seconds))
