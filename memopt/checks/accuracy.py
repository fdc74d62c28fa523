"""How far runs are from a reference: their losses, and the gradient of each parameter."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

ROUNDING = 1e-12
"""Parts of the whole gradient below this are what float64's rounding leaves of a zero."""


@dataclass(frozen=True)
class GradientError:
    """How far the gradient of one parameter is from the reference's.

    Both are infinite where only one of the two gradients exists, or where one is not finite.
    """

    name: str
    relative: float
    """The norm of the difference over the norm of the reference: ‖g − r‖ / ‖r‖."""
    largest: float
    """The largest difference of two elements over the largest element of the reference."""
    share: float = 1.0
    """The norm of the reference over that of all parameters' together."""

    @property
    def counts(self) -> bool:
        """Whether the reference is more than a zero with rounding (attention's gradient of a key's bias is such)."""
        return self.share > ROUNDING


@dataclass(frozen=True)
class Accuracy:
    """How far one run is from the reference."""

    loss: float
    """|loss − reference| / |reference|."""
    gradient: float
    """‖g − r‖ / ‖r‖ of all gradients taken as one vector."""
    gradients: tuple[GradientError, ...]

    @property
    def worst(self) -> GradientError | None:
        """The gradient with the largest relative error of those that count; None if there are none at all."""
        return next(iter(self.worst_first), None)

    @property
    def worst_first(self) -> tuple[GradientError, ...]:
        """The gradients by their relative error, those that are zeros with rounding last."""
        return tuple(sorted(self.gradients, key=lambda each: (not each.counts, -each.relative)))

    @classmethod
    def of(
        cls, loss: float, gradients: Mapping[str, torch.Tensor], exact_loss: float, exact: Mapping[str, torch.Tensor]
    ) -> Accuracy:
        """Compare a run's loss and gradients with the reference's, by the names of parameters."""
        whole = _length(float(_dense(each).norm()) for each in exact.values())
        errors, off = [], []
        for name in dict.fromkeys([*exact, *gradients]):
            if name not in exact or name not in gradients:
                errors.append(GradientError(name, math.inf, math.inf))
                off.append(math.inf)
                continue
            theirs = _dense(exact[name])
            difference = _dense(gradients[name]) - theirs
            norms = float(difference.norm()), float(theirs.norm())
            largest = _ratio(_largest(difference), _largest(theirs))
            errors.append(GradientError(name, _ratio(*norms), largest, _ratio(norms[1], whole)))
            off.append(norms[0])
        return cls(_ratio(abs(loss - exact_loss), abs(exact_loss)), _ratio(_length(off), whole), tuple(errors))


@dataclass(frozen=True)
class Accuracies:
    """The runs side by side, each against one reference."""

    reference: str
    """"float64", or "fp32": the plain run itself."""
    loss: float
    """The reference's."""
    plain: Accuracy | None
    """None where the plain run is the reference."""
    autocast: Accuracy | None
    optimized: Accuracy


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    gradient = gradient.to_dense() if gradient.is_sparse else gradient
    return gradient.to(torch.complex128 if gradient.is_complex() else torch.float64)


def _length(parts: Iterable[float]) -> float:
    return math.sqrt(sum(part * part for part in parts))


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _ratio(part: float, whole: float) -> float:
    """`part / whole`; infinite where that is no number, but for nothing of nothing."""
    if part == 0:
        return 0.0
    ratio = part / whole if whole else math.inf
    return ratio if math.isfinite(ratio) else math.inf
