"""The whole curve of a step, peak against added time: frozen, readable, serialisable."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from memopt.errors import GIB, BudgetError
from memopt.planning.options import DEFAULT_EFFORT, Effort, budget_bytes
from memopt.planning.planner import Recipe
from memopt.show.picture import as_svg, draw
from memopt.show.table import render

if TYPE_CHECKING:
    from memopt.planning.plan import Plan

FORMAT = 1


@dataclass(frozen=True)
class FrontierPoint:
    """The best plan found within one budget. GB are of 1024³ bytes, times fractions of the plain step's."""

    budget_gb: float
    peak_gb: float
    """Never above the budget; the least at which this added time was found."""
    added_time: float
    bound: float
    """No schedule within the budget adds less than this."""
    method: str
    evaluations: int
    """How many times the op is evaluated that is evaluated most."""


@dataclass(frozen=True)
class Frontier:
    """Peak against added time, from the smallest budget that works to the peak with nothing recomputed.

    A peak is of everything that the step holds, as in a plan. With more budget no point adds more time, and none has a
    smaller peak. Sizes that depend on data count at the largest that plans allow for.
    """

    model: str
    hardware: str
    step_seconds: float
    """Of the plain step, by the time model."""
    plain_gb: float
    """The peak with nothing recomputed."""
    smallest_gb: float
    floor_gb: float
    """No schedule with the backward in this order holds less."""
    dominated_by: str
    """What fills the smallest peak."""
    points: tuple[FrontierPoint, ...]
    """By their budgets, ascending."""
    recipes: tuple[Recipe, ...]
    """What checkpointing by hand would do on the same step."""
    notes: tuple[str, ...] = ()
    """What a plan of this step would say of its capture."""
    effort: Effort = DEFAULT_EFFORT
    torch_version: str = torch.__version__
    source: Plan | None = field(default=None, compare=False, repr=False)
    """A plan of the step, with its graphs; None if loaded."""

    def at(self, budget_gb: float) -> FrontierPoint:
        """The point of the least added time within a budget. Raises `BudgetError` below the smallest."""
        budget = budget_bytes(budget_gb)
        fitting = [point for point in self.points if round(point.peak_gb * GIB) <= budget]
        if not fitting:
            raise BudgetError(budget, round(self.smallest_gb * GIB), self.dominated_by)
        return min(fitting, key=lambda point: point.added_time)  # of equals the first

    def plan(self, budget_gb: float) -> Plan:
        """The plan for a budget; no slower than the point that serves it. Raises `BudgetError`, `ValueError`."""
        if self.source is None:
            raise ValueError("this frontier was loaded from a file and has no graphs; make a plan with memopt.plan")
        return self.source.at(budget_gb, **_told(self.effort))

    def table(self) -> str:
        """The curve at up to sixteen budgets, and the recipes beside it, as text."""
        return render(self)

    def __str__(self) -> str:
        return self.table()

    def picture(self, path: str | Path) -> None:
        """Draw the curve, the bound and the recipes into a file: .svg, .png or .pdf, by its name.

        Raises `ModuleNotFoundError` without matplotlib (`pip install 'memopt[picture]'`), `ValueError` for another kind
        of file.
        """
        draw(self, Path(path))

    def _repr_svg_(self) -> str | None:
        """What notebooks show."""
        return as_svg(self)

    def save(self, path: str | Path) -> None:
        """Write the curve as JSON."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "source"}
        values["effort"] = asdict(self.effort)
        for name in ("points", "recipes"):
            values[name] = [asdict(each) for each in values[name]]
        Path(path).write_text(json.dumps({"format": FORMAT, **values}, indent=1))

    @classmethod
    def load(cls, path: str | Path) -> Frontier:
        """Read a curve that `save` wrote. Raises `ValueError` for another format."""
        try:
            values = json.loads(Path(path).read_text())
            if values.pop("format") != FORMAT:
                raise ValueError(f"another format than {FORMAT}")
            return cls(**_fields_from(values))
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
        ) as error:  # no JSON, no curve, another's fields
            mend = "make it again with this version of memopt"
            raise ValueError(f"{path} is not a memopt frontier of format {FORMAT}; {mend}") from error


def _told(effort: Effort) -> dict[str, Any]:
    best = effort.name == "best"
    return {"effort": effort.name, "limit_seconds": effort.limit_seconds if best else None}


def _fields_from(values: dict[str, Any]) -> dict[str, Any]:
    return {
        **values,
        "points": tuple(FrontierPoint(**row) for row in values["points"]),
        "recipes": tuple(Recipe(**row) for row in values["recipes"]),
        "notes": tuple(values["notes"]),
        "effort": Effort(**values["effort"]),
    }
