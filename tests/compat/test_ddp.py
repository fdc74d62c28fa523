from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from memopt.compat.ddp import active_wrapper, check_wrapper, shared_store, unwrapped


def test_without_a_wrapper() -> None:
    model = nn.Linear(1, 1)
    assert unwrapped(model) is model
    assert active_wrapper() is None
    assert shared_store() is None


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("mixed_precision", "mixed_precision=…"),
        ("_delay_all_reduce_all_params", "delay_all_reduce_named_params=…"),
        ("_use_python_reducer", "optimize_ddp"),
    ],
)
def test_wrappers_that_cannot_be_planned_are_refused(option: str, named: str) -> None:
    plain = {"mixed_precision": None, "_delay_all_reduce_all_params": False, "_use_python_reducer": False}
    check_wrapper(SimpleNamespace(**plain))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=named):
        check_wrapper(SimpleNamespace(**{**plain, option: True}))  # type: ignore[arg-type]
