"""The frontier of a step, the curve of peak against added time; and how plans and frontiers are shown and saved."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol

import torch
from typing_extensions import TypeVar

from memopt.disk_cache import DIGEST, LIVE, as_json, opened, sealed, value_from, write_text
from memopt.errors import GIB, BudgetError, PlanFileError
from memopt.planning.options import DEFAULT_EFFORT, Effort, budget_bytes
from memopt.solver import Effort as EffortName

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def shown(name: str) -> Any:
    """The module of `memopt.show` with this name, imported on first use; plans print themselves by it."""
    return import_module(f"memopt.show.{name}")


FORMAT = 1
ValueT = TypeVar("ValueT")


def save(path: str | Path, value: DataclassInstance) -> None:
    """Write a plan or a frontier as JSON, atomically. Raises `OSError` where it cannot be written."""
    write_text(Path(path), json.dumps(sealed({"format": FORMAT, **as_json(value)}), indent=1))


def load(path: str | Path, kind: type[ValueT], called: str, mend: str) -> ValueT:
    """The value of type `kind` that `save` wrote. In messages, `called` says what it is, and `mend` what to do instead.
    Raises `PlanFileError` with path, reason and mend for any other file, and `OSError` where it cannot be read."""
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise ValueError("it is of another format")
        values = opened(values) if DIGEST in values else values  # files of earlier versions have none
        del values["format"]
        return value_from(kind, values)
    except (ValueError, RecursionError) as error:
        text = str(error) or "it is nested too deeply"
        raise PlanFileError(f"{path} is not a memopt {called} of format {FORMAT}; {mend} ({text[:200]})") from error


PlanT = TypeVar("PlanT", default=Any)
MadeT = TypeVar("MadeT", covariant=True)


class _FrontierSource(Protocol[MadeT]):
    """A plan of the frontier's step with its graphs, from which further plans are made."""

    def at(self, budget_gb: float, *, effort: EffortName | None, limit_seconds: float | None) -> MadeT: ...


@dataclass(frozen=True)
class FrontierPoint:
    """The best plan found within one budget. GB are of 1024³ bytes; times are fractions of `Frontier.step_seconds`."""

    budget_gb: float
    peak_gb: float
    """The smallest peak at which this added time was found; never above the budget."""
    added_time: float
    bound: float
    """Lower bound on the added time of any schedule within the budget."""
    method: str
    """The solver that found the schedule."""
    evaluations: int
    """How often the most recomputed operator runs."""


@dataclass(frozen=True)
class Recipe:
    """The result of a well-known way to choose by hand what to recompute, such as checkpointing every block: its name,
    the peak in GB of 1024³ bytes, and the added time as a fraction."""

    name: str
    peak_gb: float
    added_time: float


@dataclass(frozen=True)
class Frontier(Generic[PlanT]):
    """Peak against added time, from the smallest budget that works to the peak with nothing recomputed.

    A peak counts everything that the step holds, as in a plan. A point with a larger budget never adds more time, and
    never has a smaller peak. Data-dependent sizes count at the largest that plans allow for."""

    model: str
    hardware: str
    step_seconds: float
    """Time of the step with nothing recomputed, by the time model."""
    plain_gb: float
    """The peak with nothing recomputed."""
    smallest_gb: float
    """The smallest budget that works."""
    floor_gb: float
    """Lower bound on the peak of any schedule that keeps the order of the step's operators."""
    dominated_by: str
    """The tensors that fill the smallest peak."""
    points: tuple[FrontierPoint, ...]
    """By their budgets, ascending."""
    recipes: tuple[Recipe, ...]
    """The peaks and times that checkpointing by hand reaches on the same step."""
    notes: tuple[str, ...] = ()
    """The notes of a plan of this step."""
    effort: Effort = DEFAULT_EFFORT
    torch_version: str = torch.__version__
    source: _FrontierSource[PlanT] | None = field(default=None, compare=False, repr=False, metadata=LIVE)
    """A plan of the step, with its graphs; None if loaded from a file."""

    def at(self, budget_gb: float) -> FrontierPoint:
        """The point with the least added time within a budget. Raises `BudgetError` below the smallest."""
        budget = budget_bytes(budget_gb)
        fitting = [point for point in self.points if round(point.peak_gb * GIB) <= budget]
        if not fitting:
            raise BudgetError(budget, round(self.smallest_gb * GIB), self.dominated_by)
        return min(fitting, key=lambda point: point.added_time)  # the first of equals

    def plan(self, budget_gb: float) -> PlanT:
        """The plan for a budget; never slower than the frontier's point for it. Raises `BudgetError` where none fits,
        `ValueError` for a frontier that was loaded from a file."""
        if self.source is None:
            raise ValueError("this frontier was loaded from a file and has no graphs; make a plan with memopt.plan")
        limit_seconds = self.effort.limit_seconds if self.effort.name == "best" else None
        return self.source.at(budget_gb, effort=self.effort.name, limit_seconds=limit_seconds)

    def table(self) -> str:
        """The curve at up to sixteen budgets, and the recipes (such as a checkpoint at every block), as text."""
        return shown("frontier").render(self)

    def __str__(self) -> str:
        return self.table()

    def picture(self, path: str | Path) -> None:
        """Draw the curve and the recipes into a file: .svg, .png or .pdf, by its name. Raises `ModuleNotFoundError`
        without matplotlib (`pip install 'memopt[picture]'`), `ValueError` for another kind of file."""
        shown("frontier").draw(self, Path(path))

    def _repr_svg_(self) -> str | None:
        """The picture for notebooks; None without matplotlib."""
        return shown("frontier").as_svg(self)

    def save(self, path: str | Path) -> None:
        """Write the curve as JSON, atomically. Raises `OSError` where the file cannot be written."""
        save(path, self)

    @classmethod
    def load(cls, path: str | Path) -> Frontier[PlanT]:
        """Read a curve that `save` wrote. Raises `PlanFileError`, a `ValueError`, for a file of another kind or format,
        or one that was changed or cut off since; `OSError` where it cannot be read."""
        return load(path, cls, "frontier", "make it again with this version of memopt")
