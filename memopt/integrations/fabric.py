"""Plans the training calls of a loop with Lightning Fabric. Tested with Lightning 2.6."""

from __future__ import annotations

from typing import Any

from lightning.fabric import Fabric
from lightning.fabric.wrappers import is_wrapped
from torch import nn
from typing_extensions import Unpack

from memopt.integrations.budgeted import Budgeted
from memopt.planning.options import StepOptions


def setup(fabric: Fabric, model: nn.Module, *optimizers: Any, budget_gb: float, **options: Unpack[StepOptions]) -> Any:
    """Return `fabric.setup(model, *optimizers)`, with the model's training calls planned within a budget.

    Args:
        budget_gb: GB of 1024³ bytes for everything that the step holds on the device.
        options: those of `memopt.optimize` but for two defaults: dtypes are left to Fabric's `precision`, and the
            optimizer is the one given here.

    Raises:
        ValueError: for none or several optimizers, unless `options` have `optimizer`.
    """
    budgeted = Budgeted(budget_gb, **options)
    counted = budgeted.optimizer_among(optimizers)
    found = fabric.setup(model, *optimizers)
    wrapped = found[0] if optimizers else found
    assert is_wrapped(wrapped)
    budgeted.begin(wrapped.module, counted)
    return found
