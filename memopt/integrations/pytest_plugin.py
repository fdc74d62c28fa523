"""A fixture of pytest that plans a training step and fails the test where it does not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torch import nn

    from memopt.planning.plan import Plan


@pytest.fixture(scope="session")
def assert_fits() -> Callable[..., Plan]:
    """`assert_fits(model, batch, gb=24, **options)`: plans a training step of `model` on `batch` within `gb` GB of
    1024³ bytes, as `memopt.plan` does, with its options (`device="rtx-4090"`), and returns the plan. Nothing runs, and
    no GPU is needed. If no plan fits, the test fails with the `BudgetError`, which lists changes that help."""

    def fits(model: nn.Module, batch: Any, gb: float, **options: Any) -> Plan:
        import memopt

        __tracebackhide__ = True
        try:
            return memopt.plan(model, gb, batch, **options)
        except memopt.BudgetError as refused:
            pytest.fail(str(refused), pytrace=False)

    return fits
