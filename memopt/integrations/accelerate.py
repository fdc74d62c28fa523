"""Plans the training calls of a loop with Accelerate. Tested with Accelerate 1.15."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from typing_extensions import Unpack

from memopt.integrations.budgeted import Budgeted
from memopt.planning.options import StepOptions


def prepare(accelerator: Accelerator, *objects: Any, budget_gb: float, **options: Unpack[StepOptions]) -> Any:
    """Return `accelerator.prepare(*objects)`, with the training calls of the model among them planned within a
    budget.

    Args:
        objects: as for `accelerator.prepare`, with one model that is trained, and its optimizer.
        budget_gb: GB of 1024³ bytes for everything that the step holds on the device.
        options: those of `memopt.optimize` but for two defaults: dtypes are left to Accelerate's `mixed_precision`, and
            the optimizer is the one among `objects`.

    Raises:
        ValueError: for none or several trained models among `objects`; for none or several optimizers, unless
            `options` have `optimizer`.
    """
    budgeted = Budgeted(budget_gb, **options)
    models = [
        number
        for number, given in enumerate(objects)
        if isinstance(given, nn.Module) and any(parameter.requires_grad for parameter in given.parameters())
    ]
    if len(models) != 1:
        raise ValueError(
            f"memopt's prepare takes exactly one trained model, not {len(models)}; call it once for each, and "
            "accelerator.prepare for models that are not trained"
        )
    counted = budgeted.optimizer_among([given for given in objects if isinstance(given, torch.optim.Optimizer)])
    found = accelerator.prepare(*objects)
    model = found if len(objects) == 1 else found[models[0]]
    budgeted.begin(accelerator.unwrap_model(model, keep_torch_compile=False), counted)
    return found
