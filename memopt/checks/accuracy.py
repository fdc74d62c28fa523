"""Errors of runs against a reference: of the loss, and of the gradient of each parameter."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

ROUNDING = 1e-12
"""A gradient whose share of the whole is below this is a zero, up to rounding in float64."""


@dataclass(frozen=True)
class GradientError:
    """The error of one parameter's gradient.

    Both are infinite where only one of the two gradients exists, or where one is not finite.
    """

    name: str
    relative: float
    """The norm of the difference over the norm of the reference: ‖g − r‖ / ‖r‖."""
    largest: float
    """The largest difference of two elements over the largest element of the reference."""
    share: float = 1.0
    """The norm of the reference over the norm of all parameters' reference gradients together."""

    @property
    def counts(self) -> bool:
        """Whether the reference is more than rounding around zero, as the gradient of a key's bias in attention is."""
        return self.share > ROUNDING


@dataclass(frozen=True)
class Accuracy:
    """The errors of one run."""

    loss: float
    """|loss − reference| / |reference|."""
    gradient: float
    """‖g − r‖ / ‖r‖ of all gradients taken as one vector."""
    gradients: tuple[GradientError, ...]

    @property
    def worst(self) -> GradientError | None:
        """The gradient with the largest relative error of those that count; None without any gradient."""
        return next(iter(self.worst_first), None)

    @property
    def worst_first(self) -> tuple[GradientError, ...]:
        """The gradients by their relative error, largest first; those that do not count come last."""
        return tuple(sorted(self.gradients, key=lambda error: (not error.counts, -error.relative)))

    @classmethod
    def of(
        cls, loss: float, gradients: Mapping[str, torch.Tensor], exact_loss: float, exact: Mapping[str, torch.Tensor]
    ) -> Accuracy:
        """Compare a run's loss and gradients with the reference's, by the names of parameters."""
        whole = _length(float(_dense(gradient).norm()) for gradient in exact.values())
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
    """The errors of all runs against the same reference."""

    reference: str
    """"float64", or "fp32" where the plain run is the reference."""
    loss: float
    """The loss of the reference."""
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
    """`part / whole`: 0 where `part` is 0, and infinite where the quotient is not finite."""
    if part == 0:
        return 0.0
    ratio = part / whole if whole else math.inf
    return ratio if math.isfinite(ratio) else math.inf
