"""Curves for the tests: one that is solved, and one with figures that are easy to read in tables."""

from __future__ import annotations

from functools import cache

from memopt.planning.frontier import Frontier, FrontierPoint, Recipe
from memopt.planning.plan import Plan
from tests.planned import ACCOUNT, captured, make_plan, region


@cache
def roomy() -> Plan:
    """Five layers with nothing recomputed."""
    return make_plan(captured(region(5)), ACCOUNT, 10**6)


@cache
def solved() -> Frontier:
    return roomy().frontier(9)


def made_up() -> Frontier:
    """Figures that are easy to read."""
    return Frontier(
        model="Llama[tiny]",
        hardware="h100",
        step_seconds=0.25,
        plain_gb=4.0,
        smallest_gb=2.0,
        floor_gb=1.5,
        dominated_by="parameters 1 GB, gradients 1 GB (at mm_7)",
        points=(
            FrontierPoint(2.0, 2.0, 0.5, 0.3, "nested chain", 3),
            FrontierPoint(2.5, 2.25, 0.25, 0.2, "minimum cut, polished", 2),
            FrontierPoint(3.0, 3.0, 0.1, 0.1, "minimum cut", 2),
            FrontierPoint(4.0, 4.0, 0.0, 0.0, "save all", 1),
        ),
        recipes=(Recipe("save all", 4.0, 0.0), Recipe("per block", 2.6, 0.3), Recipe("every 2 blocks", 2.62, 0.3)),
        notes=("captured in 2 regions, since [the forward breaks]",),
    )
