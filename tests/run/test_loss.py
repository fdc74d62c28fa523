"""The loss of a batch, whatever the model returns it in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from memopt.run.loss import batch_loss, has_loss_function, scalar_loss
from tests.train import pieces

LOSS = torch.ones((), requires_grad=True) * 3


@pytest.mark.parametrize(
    "output",
    [LOSS, LOSS.reshape(1), (LOSS, torch.ones(3)), [LOSS], {"loss": LOSS, "logits": 1}, SimpleNamespace(loss=LOSS)],
)
def test_where_it_is_found(output: Any) -> None:
    assert scalar_loss(output).shape == ()
    assert float(scalar_loss(output).detach()) == 3


@pytest.mark.parametrize(
    ("output", "error", "message"),
    [
        (3.0, TypeError, "no loss in the float"),
        (None, TypeError, "no loss in the NoneType"),
        ((), TypeError, "no loss in the tuple"),
        ({"logits": LOSS}, TypeError, "no loss in the dict"),
        (SimpleNamespace(loss=None), TypeError, "no loss in the SimpleNamespace"),
        (torch.ones(4, 2, requires_grad=True), ValueError, r"shape is \(4, 2\); take its mean"),
        (torch.ones(()), ValueError, "no gradient; call the step outside of torch.no_grad"),
    ],
)
def test_what_is_no_loss(output: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        scalar_loss(output)


def test_a_loss_function_takes_inputs_of_any_kind() -> None:
    model, x, y = nn.Linear(4, 2), torch.ones(3, 4), torch.ones(3, 2)
    losses = [
        batch_loss(model, (inputs, y), nn.functional.mse_loss) for inputs in (x, (x,), {"input": x}, pieces_dict(x))
    ]
    assert len({float(loss.detach()) for loss in losses}) == 1
    with pytest.raises(TypeError, match=r"pair \(inputs, targets\)"):
        batch_loss(model, x, nn.functional.mse_loss)


def pieces_dict(x: torch.Tensor) -> Any:
    from transformers import BatchEncoding

    return BatchEncoding({"input": x})


@pytest.mark.plans_always
def test_optimised_with_a_loss_function() -> None:
    model, batch = pieces.seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)))(), None
    batch = (torch.ones(3, 4), torch.ones(3, 2))
    expected = nn.functional.mse_loss(model(batch[0]), batch[1])
    memopt.optimize(model, 1, loss_fn=nn.functional.mse_loss, precision="fp32")
    assert has_loss_function(model, None)
    assert torch.equal(batch_loss(model, batch, None), expected)
    assert torch.equal(batch_loss(model, batch, nn.functional.mse_loss), expected)
    with pytest.raises(ValueError, match="leave the loss_fn of the TrainStep out"):
        batch_loss(model, batch, nn.functional.l1_loss)
    with pytest.raises(ValueError, match=r"call model\.train"):
        batch_loss(model.eval(), batch, None)
