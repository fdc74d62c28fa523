"""The receipt of a combination of proposals: each one's bytes and seconds on top of those before it."""

from __future__ import annotations

from memopt.optimizers.priced_proposal import PricedProposal
from memopt.optimizers.proposals import Proposals
from memopt.optimizers.training_facts import TrainingFacts
from memopt.optimizers.training_price import TrainingPrice, price_training

_CHANGES = {
    "stochastic": "parameters and gradients in bfloat16, stepped in float32 and rounded stochastically",
    "compensated": "parameters and gradients in bfloat16, stepped in float32, with the bits left out kept as state",
    "low_bit_optimizer": "Adam's moments in 8 bits, a scale for each 256; those of small parameters stay in float32",
    "device": "the optimizer's state in the host's memory, brought to the device piece by piece",
    "host": "the optimizer's state in the host's memory, and stepped there",
    "optimizer_in_backward": "each parameter is stepped, and its gradient freed, as soon as the backward needs neither "
    "any more; no clipping by the norm of all gradients, no GradScaler, no accumulation, and plain operators only "
    "(backend 'aten')",
}
_EXACTNESS = {
    "stochastic": "the forward sees weights with 8 bits of precision, right in expectation",
    "compensated": "the forward sees weights with 8 bits of precision; those stepped are the float32 ones, bit by bit",
    "low_bit_optimizer": "moments rounded to two digits; learns about as in float32",
    "device": "bitwise that of the same optimizer stepped parameter by parameter",
    "host": "the same arithmetic, rounded as the host's units do",
    "optimizer_in_backward": "bitwise that of the same optimizer stepped parameter by parameter",
}


def price_proposals(
    facts: TrainingFacts, proposals: Proposals, known: dict[Proposals, TrainingPrice] | None = None
) -> tuple[PricedProposal, ...]:
    """Each of `proposals`, from the inside out, priced on top of those before it.

    `known` holds prices of combinations for the same facts; combinations that are new are added to it.

    Raises `ValueError` for an optimiser that cannot be tried on fake tensors, or that the proposals do not fit.
    """
    taken: list[str] = []
    prices = {} if known is None else known

    def price(combination: Proposals) -> TrainingPrice:
        if combination not in prices:
            prices[combination] = price_training(facts, combination)
        return prices[combination]

    before, found = price(Proposals()), []
    for name in proposals.names:
        taken.append(name)
        after = price(proposals.only(taken))
        option = getattr(proposals, name)
        words = option if isinstance(option, str) else name
        found.append(
            PricedProposal(
                name,
                _CHANGES[words],
                before.device,
                after.device,
                after.host_bytes - before.host_bytes,
                round(after.seconds - before.seconds, 9),  # sums of floats differ by their order
                _EXACTNESS[words],
            )
        )
        before = after
    return tuple(found)
