"""The smallest budget that a training step fits in, by a refusal that looks for nothing else."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch import nn

from memopt.calls.planned_call import PlannedCall
from memopt.errors import BudgetError
from memopt.options import DEFAULT_ALLOW, check_options


def smallest_gb(
    model: nn.Module,
    example_inputs: Any,
    *,
    optimizer: Any = torch.optim.AdamW,
    precision: Any = "auto",
    allow: Collection[str] = DEFAULT_ALLOW,
    outputs: str = "loss",
    gradients_held: bool = False,
) -> float:
    """In GB, as `memopt.plan` would find it, without the advice that takes a refusal as long again."""
    options = check_options(1e-6, None, optimizer, precision, allow, "auto", outputs)
    with pytest.raises(BudgetError) as error:
        PlannedCall(model, options).plan(example_inputs, gradients_held=gradients_held, advise=False)
    return error.value.smallest_gb
