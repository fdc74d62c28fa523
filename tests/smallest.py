"""The smallest budget that a training step fits in, from a refusal without advice."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from torch import nn

from memopt.errors import BudgetError
from memopt.levers import DEFAULT_LEVERS
from memopt.planning.options import check_options
from memopt.run.session import Session


def refusal(
    model: nn.Module,
    example_inputs: Any,
    *,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: Any = torch.optim.AdamW,
    precision: Any = "auto",
    allow: Collection[str] = DEFAULT_LEVERS,
    outputs: Any = "loss",
    device: str | None = None,
    gradients_held: bool = False,
) -> BudgetError:
    """Return the error of a budget that nothing fits, as `memopt.plan` raises it, but without its advice."""
    options = check_options(
        1e-6,
        loss_fn=loss_fn,
        optimizer=optimizer,
        precision=precision,
        allow=allow,
        outputs=outputs,
        device=device,
    )
    with pytest.raises(BudgetError) as error:
        Session(model, options).plan(example_inputs, gradients_held=gradients_held, advise=False)
    return error.value.with_traceback(None)


def smallest_gb(model: nn.Module, example_inputs: Any, **options: Any) -> float:
    """Return the smallest budget in GB, as `refusal` names it."""
    return refusal(model, example_inputs, **options).smallest_gb
