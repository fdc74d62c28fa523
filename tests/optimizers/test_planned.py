"""Plans over optimisers with proposals around them: counted as they are, and true."""

from __future__ import annotations

import pytest
import torch
from torch import optim

import memopt
from tests.optimizers.pieces import Choice, large_gpt2, text

CASES = {
    "narrow": Choice(True),
    "low-bit": Choice(low_bit_optimizer=True),
    "both": Choice(True, True),
}


@pytest.mark.slow
@pytest.mark.parametrize("proposals", CASES.values(), ids=CASES.keys())
def test_the_account_of_a_plan_is_that_of_a_step(proposals: Choice) -> None:
    model, batch = large_gpt2(), text(8192, samples=2, length=32)
    optimizer = proposals.apply(model, optim.AdamW(model.parameters(), lr=1e-3))
    precision = "bf16" if proposals.bf16_parameters else "fp32"
    memopt.optimize(model, 0.5, example_inputs=batch, optimizer=optimizer, precision=precision)
    found = memopt.check(model, optimizer, batch)
    assert all(
        row.measured_bytes <= row.predicted_bytes <= 1.02 * row.measured_bytes
        for row in found.rows
        if row.measured_bytes
    )
    assert found.total.measured_bytes <= found.total.predicted_bytes <= 1.01 * found.total.measured_bytes
    step = memopt.TrainStep(model, optimizer)
    losses = [float(step(batch).loss) for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    assert {parameter.dtype for parameter in model.parameters()} == {
        torch.bfloat16 if proposals.bf16_parameters else torch.float32
    }
