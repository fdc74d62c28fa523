"""Small values with the figures that tables and pictures show, and nothing else: no plan, no frontier."""

from __future__ import annotations

from dataclasses import dataclass

from memopt.account.account import Breakdown
from memopt.errors import GIB
from memopt.planning.plan import ReceiptRow
from memopt.planning.schedule_parts import ModuleRow

MB = 1024**2
# expecttest accepts new goldens in ASCII only.
IN_ASCII = str.maketrans("┃│–━─┏┡└├┓┩┘┤┳╇┴┼┬", "||-==" + 13 * "+")


PLAIN = Breakdown(3 * GIB, "layers.0", (("saved activations", 2 * GIB), ("parameters", GIB)))
PLANNED = Breakdown(GIB, "mm_1", (("parameters", GIB),))


@dataclass(frozen=True)
class SmallPlan:
    """Two linear layers, of which one is recomputed and one is offloaded."""

    model: str = "Two[tiny]"
    hardware: str = "h100"
    method: str = "min cut"
    budget_bytes: int = 2 * GIB
    plain: Breakdown = PLAIN
    planned: Breakdown = PLANNED
    step_seconds: float = 0.25
    added_time: float = 0.2
    added_seconds: float = 0.05
    bound: float = 0.1
    host_bytes: int = 30 * MB
    decisions: tuple[()] = ()
    moved_bytes: int = 60 * MB
    hosted_bytes: int = 0
    stall_seconds: float = 0.002
    host_share: float = 0.0
    modules: tuple[ModuleRow, ...] = (
        ModuleRow("layers.0", 2, 30 * MB, 0, 0, 0.004, 0.0, 60 * MB),
        ModuleRow("layers.1", 2, 0, 240 * MB, 4, 0.004, 0.008),
    )
    levers: tuple[str, ...] = ("offload_activations",)
    receipt: tuple[ReceiptRow, ...] = (
        ReceiptRow("", 3 * GIB, 0.25),
        ReceiptRow("recompute", 2 * GIB, 0.258),
        ReceiptRow("offload_activations", GIB, 0.26),
    )
    notes: tuple[str, ...] = ("one region",)
    cluster: None = None
    kept: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class SmallPoint:
    """A point of `SmallCurve`, and a recipe beside it."""

    budget_gb: float
    peak_gb: float
    added_time: float
    bound: float = 0.0
    method: str = "by hand"
    evaluations: int = 1
    name: str = "per block"


@dataclass(frozen=True)
class SmallCurve:
    """Two points and a recipe."""

    model: str = "Two[tiny]"
    hardware: str = "h100"
    step_seconds: float = 0.25
    plain_gb: float = 4.0
    smallest_gb: float = 2.0
    floor_gb: float = 1.5
    points: tuple[SmallPoint, ...] = (SmallPoint(2.0, 2.0, 0.5, 0.25, evaluations=3), SmallPoint(4.0, 4.0, 0.0))
    recipes: tuple[SmallPoint, ...] = (SmallPoint(3.0, 3.0, 0.75),)
    notes: tuple[str, ...] = ("one region",)

    def at(self, budget_gb: float) -> SmallPoint:
        """The last point within the budget."""
        return [point for point in self.points if point.peak_gb <= budget_gb][-1]
