"""Combinations of levers on the optimiser: which fit an optimiser, in which order, and what they do to an account."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn, optim

from memopt.account.account import account_of
from memopt.device import hardware
from memopt.levers import OPTIMIZER_LEVERS, levers_named
from memopt.levers.optimizer_levers import (
    BF16_PARAMETERS,
    LOW_BIT_OPTIMIZER,
    OPTIMIZER_IN_BACKWARD,
    PricedLevers,
    TrainingFacts,
    combinations_of,
    least_with_levers,
)

H100 = hardware("h100")
ON_OPTIMIZER = levers_named(OPTIMIZER_LEVERS)


def model() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))


def test_all_combinations_that_fit_come_in_the_order_of_their_time() -> None:
    facts = TrainingFacts.of(model(), optim.SGD, H100)
    found = list(combinations_of(facts, ON_OPTIMIZER, OPTIMIZER_LEVERS))
    assert len(found) == 2**3 - 1, "8 bits are for Adam"
    seconds = [priced.added_seconds for priced in found]
    assert seconds == sorted(seconds)
    assert {priced.names for priced in found if len(priced.names) == 1} == {
        (name,) for name in OPTIMIZER_LEVERS if name != "low_bit_optimizer"
    }


def test_further_combinations_come_smallest_first_and_as_far_as_they_are_wanted() -> None:
    facts = TrainingFacts.of(model(), optim.AdamW, H100)
    found = combinations_of(
        facts,
        ON_OPTIMIZER,
        ["low_bit_optimizer"],
        lambda levers: all(lever.name != "bf16_parameters" for lever in levers) or len(levers) == 1,
    )
    allowed, *seen = [priced.names for priced in found]
    assert allowed == ("low_bit_optimizer",)
    assert [len(names) for names in seen] == [1, 1, 1, 2, 2, 2, 3]
    assert ("low_bit_optimizer",) not in seen
    assert [names for names in seen if "bf16_parameters" in names] == [("bf16_parameters",)]


@pytest.mark.slow
def test_no_combination_holds_less_than_the_least_with_levers() -> None:
    trained = model()
    account = account_of(trained, [], "adamw", H100)
    facts = TrainingFacts.of(trained, "adamw", H100)
    adjusted = [one.adjusted(account).resident_bytes for one in combinations_of(facts, ON_OPTIMIZER, OPTIMIZER_LEVERS)]
    assert least_with_levers(account) <= min(adjusted) < account.resident_bytes


def test_the_account_has_the_rows_of_the_last_price() -> None:
    trained = model()
    account = account_of(trained, [], "adamw", H100)
    narrow = PricedLevers.of(TrainingFacts.of(trained, "adamw", H100), [BF16_PARAMETERS])
    assert narrow.narrows
    assert narrow.adjusted(account).parameters == account.parameters // 2
    assert narrow.adjusted(narrow.adjusted(account)) == narrow.adjusted(account)


def test_what_is_stepped_in_the_backward_leaves_no_gradients_behind() -> None:
    trained = model()
    account = account_of(trained, [], "adamw", H100)
    inside = PricedLevers.of(TrainingFacts.of(trained, "adamw", H100), [OPTIMIZER_IN_BACKWARD])
    adjusted = inside.adjusted(account)
    assert inside.stepping is not None
    assert (adjusted.gradients, adjusted.optimizer_temporaries) == (0, 0)
    assert replace(adjusted, gradients=account.gradients).parameters == account.parameters


def test_moments_in_8_bits_are_blocks_of_codes_and_scales() -> None:
    model = nn.Linear(2**11, 2**13, bias=False, device="meta")
    chosen = PricedLevers.of(TrainingFacts.of(model, "adamw", H100), [LOW_BIT_OPTIMIZER])
    account = chosen.adjusted(account_of(model, [], "adamw", H100))
    codes, scales = 2**24, 2**24 // 256 * 4
    assert account.state_blocks == (codes, scales, codes, scales)
