"""The smallest budget that a training step fits in, by a refusal that looks for nothing that is not allowed."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from torch import nn

from memopt.errors import BudgetError
from memopt.planning.levers import DEFAULT_LEVERS
from memopt.planning.options import check_options
from memopt.run.planned_call import PlannedCall


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
    """Of a budget that nothing fits, as `memopt.plan` raises it but without the advice, which takes as long again."""
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
        PlannedCall(model, options).plan(example_inputs, gradients_held=gradients_held, advise=False)
    return error.value.with_traceback(None)


def smallest_gb(model: nn.Module, example_inputs: Any, **options: Any) -> float:
    """What `refusal` names."""
    return refusal(model, example_inputs, **options).smallest_gb
