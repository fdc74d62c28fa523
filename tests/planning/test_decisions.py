"""What a plan says of operators that decide, and where they may be recomputed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memopt

WIDTH = 64


class Chosen(nn.Module):
    """Blocks that go on with the larger half of their values, with dropout and activations that have kinks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = F.dropout(F.leaky_relu(layer(x)), 0.1)
            y = F.hardswish(y) + F.softplus(y) + F.elu(y) * (torch.rand_like(y) > 0.2)
            x = x + y * (y > y.topk(WIDTH // 2, -1).values[..., -1:])
        return F.huber_loss(x, torch.zeros_like(x))


def plan(**options: Any) -> memopt.Plan:
    torch.manual_seed(0)
    model = Chosen().train()
    x = torch.randn(256, WIDTH)
    common: dict[str, Any] = {"optimizer": None, "allow": {"recompute"}, "elsewhere_gb": 0, **options}
    roomy = memopt.plan(model, 1, (x,), **common)
    assert roomy.joined is not None
    if "device" in options:  # of a card's smallest budget next to nothing are activations
        return roomy
    least, most = roomy.joined.smallest.peak_bytes, roomy.joined.portfolio.solve(2**40).peak_bytes
    return roomy.at(roomy.predicted_peak_gb - 0.7 * (most - least) / 1024**3)


@pytest.mark.parametrize("options", [{"backend": "inductor"}, {"device": "h100", "backend": "aten"}])
def test_what_decides_is_computed_once(options: dict[str, Any], tmp_path: Path) -> None:
    found = plan(precision="bf16", **options)
    assert found.captured is not None
    (region,), (schedule,) = found.captured.regions, found.regions
    names = {node.name for node in region.decisions}
    assert {(row.operator, row.path, row.calls) for row in found.decisions} == {("topk", "", 3), ("gt", "", 3)}
    assert len(names) == 6
    assert not region.decisions & region.fused_away
    again = {name for name in schedule.evaluations if schedule.evaluations.count(name) > 1}
    assert bool(again) == ("device" not in options)
    assert not again & names
    assert found.joined is not None
    ops = dict(zip(found.joined.prices[0].nodes, found.joined.prices[0].problem.ops, strict=True))
    assert not any(ops[name].recomputable for name in names)
    held = {name: row.saved_bytes for row in found.decisions for name in [row.operator]}
    assert held["gt"] == 3 * 256 * WIDTH, "masks of one byte an element"
    text = " ".join(str(found).split())
    assert "since they make discrete choices that rounding could change: 3 topk, 3 gt in (model); " in text
    found.save(tmp_path / "plan.json")
    assert memopt.Plan.load(tmp_path / "plan.json").decisions == found.decisions


def test_plain_operators_of_a_cpu_give_equal_bits() -> None:
    found = plan(precision="fp32", backend="aten")
    assert found.decisions == ()
    assert found.joined is not None
    ops = [op for op in found.joined.problem.ops if op.name.startswith(("gt", "topk"))]
    assert len(ops) == 9, "and the masks that are drawn"
    assert all(op.recomputable for op in ops)
