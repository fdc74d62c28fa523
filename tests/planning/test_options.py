from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import memopt
from memopt.planning.options import Effort, check_effort, check_points


def test_efforts() -> None:
    assert check_effort() == Effort("default", 60.0)
    assert check_effort("fast") == Effort("fast")
    assert check_effort("best") == Effort("best", 60.0)
    assert check_effort("best", 5) == Effort("best", 5.0)
    assert check_effort("best", 0.5).limit_seconds == 0.5


@pytest.mark.parametrize(
    ("effort", "limit_seconds", "kind", "words"),
    [
        ("slow", None, ValueError, "effort must be one of 'fast', 'default', 'best', not 'slow'"),
        (None, None, ValueError, "effort must be one of .* not None"),
        ("default", 5, ValueError, "limit_seconds is for effort='best', not 'default'"),
        ("fast", 5, ValueError, "limit_seconds is for effort='best', not 'fast'"),
        ("best", 0, ValueError, "limit_seconds must be a positive, finite number of seconds, not 0"),
        ("best", -1.5, ValueError, "not -1.5"),
        ("best", float("nan"), ValueError, "not nan"),
        ("best", float("inf"), ValueError, "not inf"),
        ("best", "60", TypeError, "limit_seconds must be a number of seconds, such as 60, not '60'"),
        ("best", True, TypeError, "not True"),
    ],
)
def test_no_efforts(effort: Any, limit_seconds: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        check_effort(effort, limit_seconds)


def test_plans_are_made_with_the_effort_asked_for() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).train()
    batch = torch.zeros(2, 4), torch.zeros(2, 4)
    assert memopt.plan(model, 1, batch, loss_fn=mse_loss, effort="fast", precision="fp32").effort == Effort("fast")
    memopt.optimize(model, 1, example_inputs=batch, loss_fn=mse_loss, effort="best", limit_seconds=2, precision="fp32")
    assert memopt.plan_of(model).effort == Effort("best", 2.0)
    for wrong in ({"effort": "slow"}, {"limit_seconds": 1}):
        with pytest.raises(ValueError, match=r"effort"):
            memopt.optimize(model, 1, **wrong)
        with pytest.raises(ValueError, match=r"effort"):
            memopt.plan(model, 1, batch, **wrong)


def test_points() -> None:
    assert check_points(2) == 2
    for wrong, kind in ((1, ValueError), (-3, ValueError), (40.0, TypeError), (True, TypeError), ("40", TypeError)):
        with pytest.raises(kind, match=f"points must be .* not {wrong!r}"):
            check_points(wrong)  # type: ignore[arg-type]
