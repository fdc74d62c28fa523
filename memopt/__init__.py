"""memopt trains a PyTorch model within a memory budget, with the gradients of the plain model, and shows its plan.

`import memopt` loads almost nothing: each public name loads the module that defines it when it is first used.
"""

from __future__ import annotations

import dis
import inspect
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # isort: off
    from memopt.api import (
        frontier as frontier,
        max_batch as max_batch,
        max_length as max_length,
        optimize as optimize,
        plan as plan,
        plan_of as plan_of,
        remove as remove,
        status as status,
        training_loss as training_loss,
        wrap_optimizer as wrap_optimizer,
    )
    from memopt.checks.compare_step import compare as compare
    from memopt.checks.comparison import Comparison as Comparison
    from memopt.checks.check import AccountCheck as AccountCheck, AccountRow as AccountRow, check as check
    from memopt.errors import (
        BudgetError as BudgetError,
        CaptureError as CaptureError,
        GradientMismatchError as GradientMismatchError,
        PlanFileError as PlanFileError,
        RankError as RankError,
        StaleOutputError as StaleOutputError,
        UnplannedGradientError as UnplannedGradientError,
    )
    from memopt.levers import DEFAULT_LEVERS as DEFAULT_LEVERS, LEVERS as LEVERS
    from memopt.run.safety_net import StepMemoryError as StepMemoryError
    from memopt.meter import measure_peak as measure_peak
    from memopt.planning.frontier import Frontier as Frontier
    from memopt.planning.plan import Plan as Plan
    from memopt.run.status import State as State, Status as Status
    from memopt.train import RunState as RunState, StepResult as StepResult, TrainStep as TrainStep
    # isort: on

    __version__: str


def _imports() -> dict[str, str]:
    """The module that defines each public name, read from the compiled imports above. These run for type checkers only,
    and an installation may be without sources."""
    frame: Any = inspect.currentframe()
    found: dict[str, str] = {}
    module = ""
    for step in dis.get_instructions(frame.f_back.f_code):
        if step.opname == "IMPORT_NAME":
            module = step.argval
        elif step.opname == "IMPORT_FROM" and module.startswith("memopt."):
            found[step.argval] = module
    return found


_MODULES = _imports()
__all__ = [*_MODULES, "__version__"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = _version()
    elif name in _MODULES:
        value = getattr(_imported(_MODULES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def _imported(name: str) -> ModuleType:
    """The module of that name. If it cannot be imported since torch lacks a name, raises the `TorchNamesError` that has
    all names which memopt misses in this torch."""
    try:
        return import_module(name)
    except ImportError as error:
        if not (error.name or "").startswith("torch."):
            raise
        from memopt.compat.check import missing_names

        raise missing_names(error) from error


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
    """Raises `ImportError` if memopt's package `passes` is missing, or another of that name comes before it."""
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
