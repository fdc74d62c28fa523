"""The result of emission: a callable region."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import fx

from memopt.planning.refit import Footprint

Cut: TypeAlias = Callable[[], tuple[fx.GraphModule, fx.GraphModule]]
"""Returns the forward and the backward module of a region."""


@dataclass(frozen=True, eq=False)
class Emitted:
    """A region that can be called with its inputs."""

    run: Callable[..., Any] = field(repr=False)
    footprint: Footprint | None = None
    """The bytes that its compiled halves hold; None where these are the plan's own figures."""
    exchanges: int = 0
    """Equal on two ranks if the region's halves run the same collectives in the same order; 0 if they run none."""
