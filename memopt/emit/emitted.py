"""What emission gives: a region that can be called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import fx

from memopt.planning.footprint import Footprint

Cut: TypeAlias = Callable[[], tuple[fx.GraphModule, fx.GraphModule]]
"""Gives the forward and the backward module of a region."""


@dataclass(frozen=True, eq=False)
class Emitted:
    """A region that can be called with its inputs."""

    run: Callable[..., Any] = field(repr=False)
    footprint: Footprint | None = None
    """What its halves hold as compiled; None where that is what the plan says."""
