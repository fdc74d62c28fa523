"""memopt trains a PyTorch model within a memory budget, with the gradients of the plain model, and shows its plan.

`import memopt` loads almost nothing: each public name loads the module that defines it when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memopt.api import (
        frontier,
        max_batch,
        max_length,
        optimize,
        plan,
        plan_of,
        remove,
        training_loss,
        wrap_optimizer,
    )
    from memopt.checks import Comparison, compare
    from memopt.checks.account_check import AccountCheck, AccountRow
    from memopt.checks.check import check
    from memopt.errors import (
        BudgetError,
        CaptureError,
        GradientMismatchError,
        PlanFileError,
        RankError,
        StaleOutputError,
        UnplannedGradientError,
    )
    from memopt.levers import DEFAULT_LEVERS, LEVERS
    from memopt.memory_error import StepMemoryError
    from memopt.meter import measure_peak
    from memopt.planning.frontier import Frontier
    from memopt.planning.plan import Plan
    from memopt.train import RunState, StepResult, TrainStep

    __version__: str

__all__ = [
    "DEFAULT_LEVERS",
    "LEVERS",
    "AccountCheck",
    "AccountRow",
    "BudgetError",
    "CaptureError",
    "Comparison",
    "Frontier",
    "GradientMismatchError",
    "Plan",
    "PlanFileError",
    "RankError",
    "RunState",
    "StaleOutputError",
    "StepMemoryError",
    "StepResult",
    "TrainStep",
    "UnplannedGradientError",
    "__version__",
    "check",
    "compare",
    "frontier",
    "max_batch",
    "max_length",
    "measure_peak",
    "optimize",
    "plan",
    "plan_of",
    "remove",
    "training_loss",
    "wrap_optimizer",
]

_MODULES = {
    "DEFAULT_LEVERS": "memopt.levers",
    "LEVERS": "memopt.levers",
    "AccountCheck": "memopt.checks.account_check",
    "AccountRow": "memopt.checks.account_check",
    "BudgetError": "memopt.errors",
    "CaptureError": "memopt.errors",
    "Comparison": "memopt.checks",
    "Frontier": "memopt.planning.frontier",
    "GradientMismatchError": "memopt.errors",
    "Plan": "memopt.planning.plan",
    "PlanFileError": "memopt.errors",
    "RankError": "memopt.errors",
    "RunState": "memopt.train",
    "StaleOutputError": "memopt.errors",
    "StepMemoryError": "memopt.memory_error",
    "StepResult": "memopt.train",
    "TrainStep": "memopt.train",
    "UnplannedGradientError": "memopt.errors",
    "check": "memopt.checks.check",
    "compare": "memopt.checks",
    "frontier": "memopt.api",
    "max_batch": "memopt.api",
    "max_length": "memopt.api",
    "measure_peak": "memopt.meter",
    "optimize": "memopt.api",
    "plan": "memopt.api",
    "plan_of": "memopt.api",
    "remove": "memopt.api",
    "training_loss": "memopt.api",
    "wrap_optimizer": "memopt.api",
}
"""The module that defines each public name; the imports above, which type checkers and editors read, say the same."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = _version()
    elif name in _MODULES:
        value = getattr(import_module(_MODULES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__]


def _version() -> str:
    """The version of the installed package, or "0+unknown" for a source tree that is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("memopt")
    except PackageNotFoundError:
        return "0+unknown"


def _check_passes() -> None:
    """Raises `ImportError` if memopt's second package, `passes`, is missing or hidden by another one of that name."""
    home = Path(__file__).resolve().parents[1]
    spec = find_spec("passes")
    found = None if spec is None else spec.origin or next(iter(spec.submodule_search_locations or ()), None)
    if found is None:
        raise ImportError(f"memopt needs its package 'passes', which is missing from {home}; install memopt again")
    if Path(found).resolve().parent != home / "passes":
        raise ImportError(
            f"memopt needs its own package 'passes' in {home}, but {found} comes before it on sys.path; rename that "
            "one, or take its folder off sys.path"
        )


_check_passes()
