"""A dispatch mode of the user's own around training steps, as torch's counter of operations is: the plain model runs
there, if that fits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import memopt
from memopt.errors import GIB
from memopt.run.status import State

EXACT: dict[str, Any] = {"precision": "fp32", "allow": {"recompute", "reinplace"}}


class Counting(TorchDispatchMode):
    """A mode as people write them: it counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def counting() -> tuple[Any, Any]:
    mode = Counting()
    return mode, lambda: mode.count


def counting_flops() -> tuple[Any, Any]:
    mode = FlopCounterMode(display=False)
    return mode, mode.get_total_flops


def made() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1))]
    return nn.Sequential(*layers, nn.Linear(64, 1)).train()


def step(model: nn.Module, optimizer: Any, seed: int) -> float:
    torch.manual_seed(seed)
    loss = model(torch.randn(512, 64)).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def trained(model: nn.Module, make_mode: Any) -> tuple[list[float], Any]:
    """The losses of three steps, the second of them within the mode, and what the mode counted."""
    optimizer = torch.optim.AdamW(model.parameters())
    losses = [step(model, optimizer, 0)]
    mode, result = make_mode()
    with mode:
        losses.append(step(model, optimizer, 1))
    return [*losses, step(model, optimizer, 2)], result()


@pytest.mark.parametrize("make_mode", [counting, counting_flops])
@pytest.mark.parametrize("options", [EXACT, {"precision": "bf16"}], ids=["exact", "bf16"])
@pytest.mark.plans_always
def test_the_step_within_it_runs_plain(make_mode: Any, options: dict[str, Any]) -> None:
    expected, count = trained(made(), make_mode)
    model = memopt.optimize(made(), 1, **options)
    with pytest.warns(UserWarning, match="Sequential is called within a dispatch mode") as warned:
        losses, found = trained(model, make_mode)
    assert len([one for one in warned if "dispatch mode" in str(one.message)]) == 1
    assert found == count, "the mode sees the step, and nothing else"
    assert memopt.status(model).state is State.PLANNED
    assert losses == (expected if options is EXACT else pytest.approx(expected, rel=0.05))


def test_a_step_that_fits_as_a_plan_alone_is_refused_within_it() -> None:
    plan = memopt.plan(made(), 1, (torch.randn(512, 64),), **EXACT)
    model = memopt.optimize(made(), (plan.smallest_gb() + plan.plain_peak_gb) / 2, **EXACT)
    optimizer = torch.optim.AdamW(model.parameters())
    before = step(model, optimizer, 0)
    with (
        Counting(),
        pytest.raises(memopt.BudgetError, match=r"dispatch mode \(Counting\).*that mode") as refused,
    ):
        step(model, optimizer, 1)
    assert before > 0
    assert plan.plain.peak_bytes / GIB <= refused.value.smallest_gb <= 1.3 * plan.plain_peak_gb
    roomy = memopt.optimize(made(), refused.value.smallest_gb, **EXACT)
    with Counting(), pytest.warns(UserWarning, match="runs? as the plain model"):
        step(roomy, torch.optim.AdamW(roomy.parameters()), 1)
    step(model, optimizer, 2)
    assert memopt.status(model).state is State.PLANNED
