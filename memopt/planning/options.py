"""What the user asked for, checked once at the door; gigabytes become bytes here."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, get_args

import torch

from memopt.account.optimizer_account import optimizer_account
from memopt.errors import GIB
from memopt.optimizers import OPTIMIZER_PROPOSALS
from memopt.rewrite import FP8_LEVERS, OFFLOAD_ACTIVATIONS, OPERATOR_LEVERS, REINPLACE
from memopt.rewrite.precision import Policy, check_policy
from memopt.solver import Effort as EffortName

MICROBATCH = "microbatch"
LEVERS = {
    "recompute": "evaluates activations again in the backward instead of keeping them; bitwise exact",
    REINPLACE: "writes results of the backward over operands that die there, and frees before it makes; bitwise exact",
    **OPERATOR_LEVERS,
    MICROBATCH: "has TrainStep split a batch that fits in no other way; exact but for rounding and for which samples "
    "dropout draws what for",
    OFFLOAD_ACTIVATIONS: "has activations wait in the host's memory, copied there and back beside compute, where the "
    "card has a link to it; bitwise exact",
    **FP8_LEVERS,
    **OPTIMIZER_PROPOSALS,
    "plain": "runs the model as it is, unplanned, where its forward cannot be captured",
}
DEFAULT_ALLOW = frozenset({"recompute", REINPLACE, *OPERATOR_LEVERS, MICROBATCH, OFFLOAD_ACTIVATIONS})
OUTPUTS = ("loss", "all", "loss_only")


BACKENDS = ("auto", "aten", "inductor")
"""What `backend` may be: "auto" is inductor on CUDA, plain operators elsewhere."""


@dataclass(frozen=True)
class Effort:
    """How hard to look for a plan."""

    name: EffortName = "default"
    limit_seconds: float = 60.0
    """Of wall time that "best" may take beyond what "default" takes; the others have no use for it."""


DEFAULT_EFFORT = Effort()


@dataclass(frozen=True)
class Options:
    """The arguments of `memopt.optimize`, valid."""

    budget_bytes: int
    loss_fn: Callable[..., Any] | None = None
    optimizer: Any = None
    precision: Policy = "auto"
    allow: frozenset[str] = DEFAULT_ALLOW
    backend: str = "auto"
    outputs: str = "loss"
    hardware: str | None = None
    calibrate: bool = False
    effort: Effort = DEFAULT_EFFORT
    kept: bool = False
    """Whether plans are kept on disk, and looked up there."""


def check_options(
    budget_gb: float,
    loss_fn: Callable[..., Any] | None,
    optimizer: Any,
    precision: Policy,
    allow: Collection[str],
    backend: str,
    outputs: str,
    hardware: str | None = None,
    calibrate: bool = False,
    effort: Effort = DEFAULT_EFFORT,
) -> Options:
    """The arguments as `Options`. Raises `TypeError` or `ValueError` that names the value and what is expected."""
    if loss_fn is not None and not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function of (output, target), not {loss_fn!r}")
    if isinstance(allow, str) or not isinstance(allow, Collection):
        raise TypeError(f"allow must be a set of lever names, such as {{'recompute'}}, not {allow!r}")
    for name in allow:
        if name not in LEVERS:
            raise ValueError(f"allow names an unknown lever {name!r}; known are {', '.join(sorted(LEVERS))}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        optimizer_account(optimizer, [torch.nn.Parameter(torch.empty(1))])  # raises for what is none
    check_policy(precision)
    _check_choice("backend", backend, BACKENDS)
    _check_choice("outputs", outputs, OUTPUTS)
    if calibrate and hardware is not None:
        raise ValueError(f"calibrate measures the device at hand, not {hardware!r}; give one of device and calibrate")
    levers = frozenset(allow)
    return Options(
        budget_bytes(budget_gb), loss_fn, optimizer, precision, levers, backend, outputs, hardware, calibrate, effort
    )


def budget_bytes(budget_gb: float) -> int:
    """Gigabytes of 1024³ bytes as bytes. Raises `TypeError`, `ValueError`."""
    if isinstance(budget_gb, bool) or not isinstance(budget_gb, numbers.Real):
        raise TypeError(f"budget_gb must be a number of gigabytes, such as 12 or 7.5, not {budget_gb!r}")
    gb = float(budget_gb)
    if not math.isfinite(gb) or gb <= 0:
        raise ValueError(
            f"budget_gb must be a positive, finite number of gigabytes (of 1024³ bytes), not {budget_gb!r}"
        )
    return int(gb * GIB)


def check_effort(effort: EffortName = "default", limit_seconds: float | None = None) -> Effort:
    """`limit_seconds` is for "best" only, 60 where it is not given. Raises `TypeError`, `ValueError`."""
    _check_choice("effort", effort, get_args(EffortName))
    if limit_seconds is None:
        return Effort(effort)
    if isinstance(limit_seconds, bool) or not isinstance(limit_seconds, numbers.Real):
        raise TypeError(f"limit_seconds must be a number of seconds, such as 60, not {limit_seconds!r}")
    if not 0 < float(limit_seconds) < math.inf:
        raise ValueError(f"limit_seconds must be a positive, finite number of seconds, not {limit_seconds!r}")
    if effort != "best":
        raise ValueError(f"limit_seconds is for effort='best', not {effort!r}, which takes no longer than it must")
    return Effort(effort, float(limit_seconds))


def check_points(points: int) -> int:
    """Raise `TypeError` or `ValueError` for what is no number of points of a curve."""
    if isinstance(points, bool) or not isinstance(points, int):
        raise TypeError(f"points must be a number of budgets, such as 40, not {points!r}")
    if points < 2:
        raise ValueError(f"points must be at least 2, the smallest budget and the plain peak, not {points!r}")
    return points


def check_share(name: str, value: Any) -> float:
    """`value` as a fraction, 0 or more. Raises `TypeError`, `ValueError`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a fraction, such as 0.3 for 30%, not {value!r}")
    if not 0 <= float(value) < math.inf:
        raise ValueError(f"{name} must be a fraction of 0 or more, such as 0.3 for 30%, not {value!r}")
    return float(value)


def positive_int(name: str, value: Any) -> int:
    """`value`, checked. Raises `TypeError`, `ValueError`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, not {value}")
    return value


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}")
