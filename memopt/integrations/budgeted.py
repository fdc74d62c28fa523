"""What all integrations share: a budget with options for `memopt.optimize`, given before the model is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from typing_extensions import Unpack

from memopt.api import optimize, remove
from memopt.planning.options import DEFAULTS, StepOptions, check_options, takes_options
from memopt.planning.plan import Plan
from memopt.run.session import session_of


class Budgeted:
    """A budget and the options of `memopt.optimize`, applied to a model once the training loop has built it.

    Two defaults differ from those of `memopt.optimize`: the precision is "fp32", so that the loop's own setting (its
    autocast) decides, and the optimizer is the loop's.
    """

    @takes_options(StepOptions, DEFAULTS)
    def __init__(self, budget_gb: float, **options: Unpack[StepOptions]) -> None:
        check_options(budget_gb, **options)
        self.budget_gb = budget_gb
        self.options: dict[str, Any] = {"precision": "fp32", **options}
        self._net: nn.Module | None = None
        self._shown: Plan | None = None

    def optimizer_among(self, optimizers: Sequence[Any]) -> Any:
        """The optimizer whose memory the plan counts: the option `optimizer` if it was given, even as None, else the
        loop's only one.

        Raises `ValueError` where the loop has none or several, and the option was not given."""
        if "optimizer" in self.options:
            return self.options["optimizer"]
        if len(optimizers) != 1:
            raise ValueError(
                f"the training has {len(optimizers)} optimizers, and memopt counts the memory of one; use exactly "
                "one, or name the class of the one that steps the planned model, such as optimizer=torch.optim.AdamW, "
                "or give optimizer=None to count none"
            )
        return inner_optimizer(optimizers[0])

    def begin(self, net: nn.Module, optimizer: Any, **defaults: Any) -> None:
        """Optimise the model `net`, in place, for a training run with `optimizer`. The first training call is planned
        only when it runs. `defaults` are options that apply where the user gave none."""
        optimize(net, self.budget_gb, **{**defaults, **self.options, "optimizer": optimizer})
        self._net, self._shown = net, None

    def end(self) -> None:
        """Remove memopt from the model, which is the plain one from then on."""
        if self._net is not None:
            remove(self._net)
            self._net = None

    def news(self) -> Mapping[str, float] | None:
        """The figures of the plan by which the latest step ran, for a log: "memopt_budget_gb" and "memopt_peak_gb" (GB
        of 1024³ bytes) and "memopt_added_time" (a fraction of the step). None where the step ran plain, or where the
        plan is the same as at the previous call of this method."""
        call = session_of(self._net) if self._net is not None else None
        plan = call.in_use if call is not None else None
        if plan is None or plan is self._shown:
            return None
        self._shown = plan
        return {
            "memopt_budget_gb": plan.budget_bytes / 1024**3,
            "memopt_peak_gb": plan.predicted_peak_gb,
            "memopt_added_time": plan.added_time,
        }


def inner_optimizer(optimizer: Any) -> Any:
    """The optimizer of torch inside the wrappers of Accelerate, Fabric and Lightning, which hold it as `.optimizer`."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer
