"""Proposals about the optimiser with their prices, one on top of the other."""

from __future__ import annotations

from memopt.optimizers.lever_price import LeverPrice, price_levers
from memopt.optimizers.levers import Levers
from memopt.optimizers.proposal import Proposal
from memopt.optimizers.training_facts import TrainingFacts

_CHANGES = {
    "stochastic": "parameters and gradients in bfloat16, stepped in float32 and rounded by chance",
    "compensated": "parameters and gradients in bfloat16, stepped in float32, with the bits left out kept as state",
    "low_bit_optimizer": "Adam's moments in 8 bits, a scale for each 256; those of small parameters stay in float32",
    "device": "the optimizer's state in the host's memory, brought to the device piece by piece",
    "host": "the optimizer's state in the host's memory, and stepped there",
    "optimizer_in_backward": "each parameter is stepped, and its gradient freed, as soon as the backward is through "
    "with both; no clipping by the norm of all gradients, no GradScaler, no accumulation, and plain operators only "
    "(backend 'aten')",
}
_EXACTNESS = {
    "stochastic": "the forward sees weights of 8 bits, right in expectation",
    "compensated": "the forward sees weights of 8 bits; those stepped are the float32 ones, bit by bit",
    "low_bit_optimizer": "moments rounded to two digits; learns about as in float32",
    "device": "bitwise that of the same optimizer stepped parameter by parameter",
    "host": "the same arithmetic, rounded as the host's units do",
    "optimizer_in_backward": "bitwise that of the same optimizer stepped parameter by parameter",
}


def propose(
    facts: TrainingFacts, levers: Levers, known: dict[Levers, LeverPrice] | None = None
) -> tuple[Proposal, ...]:
    """A receipt: each of `levers`, from the inside out, priced on top of those before it.

    `known` holds prices of combinations with the same facts; those that are new are added.

    Raises `ValueError` for an optimiser that cannot be tried, or that the levers do not fit.
    """
    taken: list[str] = []
    prices = {} if known is None else known

    def price(combination: Levers) -> LeverPrice:
        if combination not in prices:
            prices[combination] = price_levers(facts, combination)
        return prices[combination]

    before, found = price(Levers()), []
    for name in levers.names:
        taken.append(name)
        after = price(levers.only(taken))
        option = getattr(levers, name)
        words = option if isinstance(option, str) else name
        found.append(
            Proposal(
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
