"""Accounts against steps that really run."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import memopt
from memopt.checks.check import check, predicted_rows
from tests.planned import ACCOUNT, make_plan, two_regions


class Layers(nn.Module):
    """A frozen layer among those that train, a buffer, and the loss."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.first, self.frozen, self.last = (nn.Linear(width, width) for _ in range(3))
        self.frozen.requires_grad_(False)
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return (self.last(self.frozen(self.first(x).relu()).relu() * self.scale)).square().mean()


BATCH = torch.randn(256, 128)
WHOLE = (128 * 128 + 128) * 4


def checked(make: Any, planned: Any = None, **options: Any) -> Any:
    model = Layers()
    memopt.optimize(model, 1, optimizer=planned or make, precision="fp32")
    return check(model, make(p for p in model.parameters() if p.requires_grad), BATCH, **options)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        partial(optim.AdamW, foreach=True),
        partial(optim.AdamW, fused=True),
        partial(optim.AdamW, foreach=False),
        partial(optim.SGD, lr=0.1),
        optim.Adafactor,
    ],
)
def test_every_row_is_what_is_measured(make: Any, set_to_none: bool) -> None:
    found = checked(make, set_to_none=set_to_none)
    for row in found.rows:
        assert abs(row.difference_bytes) <= 256, row
    assert found.row("parameters").measured_bytes == 3 * WHOLE
    assert found.row("gradients").measured_bytes == 2 * WHOLE
    assert found.row("buffers").measured_bytes == 128 * 4
    assert found.row("inputs").measured_bytes == BATCH.nbytes
    assert found.row("held by the forward").measured_bytes > found.row("outputs").measured_bytes > 0
    assert 0 <= found.total.difference_bytes <= 32 * 1024


def test_foreach_that_was_not_planned_for_shows() -> None:
    found = checked(partial(optim.AdamW, foreach=True), partial(optim.AdamW, fused=True))
    assert found.row("optimizer temporaries").difference_bytes == pytest.approx(-2 * WHOLE, abs=256)
    assert found.worst.name in ("optimizer temporaries", "peak of the step")
    without = checked(partial(optim.AdamW, fused=True), partial(optim.SGD, lr=0.1))
    assert without.row("optimizer state").difference_bytes == pytest.approx(-4 * WHOLE, abs=256)
    assert without.under


def test_nothing_is_left_changed() -> None:
    model = Layers()
    memopt.optimize(model, 1, optimizer=optim.AdamW, precision="fp32")
    optimizer = optim.AdamW(model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradient = model.first.weight.grad = torch.ones_like(model.first.weight)
    random = torch.get_rng_state()
    check(model, optimizer, (BATCH,))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not optimizer.state
    assert model.first.weight.grad is gradient
    assert model.last.weight.grad is None
    assert torch.equal(torch.get_rng_state(), random)


def test_a_loss_function_takes_part() -> None:
    model = nn.Linear(64, 64)
    memopt.optimize(model, 1, loss_fn=nn.functional.mse_loss, optimizer=optim.SGD, precision="fp32")
    found = check(model, optim.SGD(model.parameters()), (torch.randn(512, 64), torch.randn(512, 64)))
    assert found.row("inputs").measured_bytes == 2 * 512 * 64 * 4
    generator_state = torch.get_rng_state().nbytes  # a planned forward keeps it until it ends; the reserve is for such
    assert abs(found.row("forward and backward").difference_bytes) <= generator_state
    assert not found.under


def test_what_is_predicted_of_several_regions() -> None:
    plan = make_plan(two_regions(), replace(ACCOUNT, reserve=90), 1 << 20)
    rows = predicted_rows(plan)
    assert rows["peak of the step"] == plan.predicted_peak_bytes
    fixed = sum(rows[name] for name in ("parameters", "buffers", "inputs", "optimizer state"))
    held_after = rows["gradients"] + rows["outputs"] + rows["optimizer temporaries"]
    moving = max(rows["forward and backward"], held_after)
    assert plan.predicted_peak_bytes == fixed + moving + 90
    assert rows["held by the forward"] == plan.held_bytes


def test_what_the_allocator_does_not_count_is_left_out() -> None:
    plan = make_plan(two_regions(), replace(ACCOUNT, reserve=90, context=90), 1 << 30)
    without = make_plan(two_regions(), replace(ACCOUNT, reserve=0), 1 << 30)
    assert plan.account.fragmentation > 0
    assert plan.predicted_peak_bytes - predicted_rows(plan)["peak of the step"] == 90 + plan.account.fragmentation
    assert predicted_rows(plan)["peak of the step"] >= predicted_rows(without)["peak of the step"]


def test_refusals() -> None:
    model = Layers()
    optimizer = optim.SGD(model.parameters())
    with pytest.raises(ValueError, match="Layers is not optimised"):
        check(model, optimizer, BATCH)
    memopt.optimize(model, 1, precision="fp32")
    with pytest.raises(TypeError, match="must be an instance"):
        check(model, optim.SGD, BATCH)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"call model.train\(\)"):
        check(model.eval(), optimizer, BATCH)
