"""What a training loop is given by those who run it, and how it is told apart from others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor


class Optimize(Protocol):
    """The one line of memopt in a loop: `memopt.optimize` with its budget, or nothing at all for the plain loop."""

    def __call__(self, model: Any, **options: Any) -> Any:
        """Return the model."""


Log = Callable[..., None]
"""Called with the losses at the end of each step, as authors log them, where the gradients are still there; without any
where what went before is no step."""


class Train(Protocol):
    """A whole program: it makes data and models, whose random numbers are seeded, and trains."""

    __name__: str
    __doc__: str | None

    def __call__(self, optimize: Optimize, log: Log) -> None:
        """Train, with one call of `optimize` where an author would put it."""


@dataclass(frozen=True)
class Loop:
    """A training loop, and how close to the plain one it ends."""

    train: Train
    rounding: str = ""
    """Why its exact run may differ from the plain one by rounding; empty where all bits are equal."""
    loss_tolerance: float = 0.05
    """With the default options: the largest difference of a loss, as a share of the largest loss of its name."""
    way_tolerance: float = 0.5
    """With the default options: the difference of the last weights, as a share of the way from the first ones."""
    unforeseen: str = ""
    """A need of later steps that no earlier one shows, so that a budget named before it may be refused once more, in a
    later step."""
    quick: tuple[str, ...] = ()
    """The options and budgets with which `make test` runs it, as in "exact half"."""
    faults: Mapping[str, str] = field(default_factory=dict)
    """By options and budget, what memopt does not do rightly yet, in a sentence."""

    @property
    def name(self) -> str:
        return self.train.__name__

    @property
    def title(self) -> str:
        """The first sentence of the loop's docstring."""
        return " ".join((self.train.__doc__ or "").split()).partition(". ")[0].rstrip(".")


def values(losses: dict[str, Any]) -> dict[str, float]:
    return {name: float(loss.detach() if isinstance(loss, Tensor) else loss) for name, loss in losses.items()}
