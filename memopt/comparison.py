"""What a comparison of the optimised model with the plain one found."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from rich.table import Table

from memopt.errors import GIB
from memopt.report import as_text
from memopt.units import duration, size

WORST_ROWS = 10


@dataclass(frozen=True)
class Run:
    """One forward and backward: its loss, the most it held at once (everything on the device), the seconds it took."""

    loss: float
    peak_bytes: int
    seconds: float

    @property
    def peak_gb(self) -> float:
        """`peak_bytes` in GB of 1024³."""
        return self.peak_bytes / GIB


@dataclass(frozen=True)
class Difference:
    """How far a tensor of the optimised run is from the plain run's.

    `absolute` is the largest difference of two elements, `relative` that over the largest element of the plain tensor;
    both are infinite where only one of the two tensors exists or is finite.
    """

    name: str
    absolute: float
    relative: float
    bitwise: bool
    """Not one bit differs, NaN and the sign of zero included."""

    @classmethod
    def of(cls, name: str, optimized: torch.Tensor | None, plain: torch.Tensor | None) -> Difference:
        """Compare two tensors of one shape."""
        if optimized is None or plain is None:
            return cls(name, math.inf, math.inf, False)
        optimized, plain = (tensor.to_dense() if tensor.is_sparse else tensor for tensor in (optimized, plain))
        if _same_bits(optimized, plain):
            return cls(name, 0.0, 0.0, True)
        widest = torch.complex128 if plain.is_complex() else torch.float64
        absolute = _largest(optimized.to(widest) - plain.to(widest))
        return cls(name, absolute, _ratio(absolute, _largest(plain.to(widest))), False)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)))


def _largest(tensor: torch.Tensor) -> float:
    largest = float(tensor.abs().max()) if tensor.numel() else 0.0
    return largest if math.isfinite(largest) else math.inf


def _ratio(part: float, whole: float) -> float:
    if part == 0 or math.isinf(part):
        return part
    return part / whole if whole else math.inf


@dataclass(frozen=True)
class Comparison:
    """One step of the optimised model against one of the plain model: same state, same batch, same random numbers."""

    plain: Run
    optimized: Run
    gradients: tuple[Difference, ...]
    """One for each parameter that has a gradient in either run."""
    buffers: tuple[Difference, ...]
    """One for each buffer, as the step leaves it."""
    budget_bytes: int

    @property
    def loss_error(self) -> float:
        """The absolute difference of the two losses; infinite where only one is finite."""
        if self._same_loss:
            return 0.0
        error = abs(self.optimized.loss - self.plain.loss)
        return error if math.isfinite(error) else math.inf

    @property
    def bitwise(self) -> bool:
        """Whether the loss, every gradient and every buffer are the same to the last bit."""
        return self._same_loss and all(each.bitwise for each in (*self.gradients, *self.buffers))

    @property
    def worst(self) -> Difference | None:
        """The gradient or buffer with the largest relative difference; None if there are none at all."""
        return max((*self.gradients, *self.buffers), key=lambda each: (each.relative, not each.bitwise), default=None)

    @property
    def _same_loss(self) -> bool:
        losses = (self.plain.loss, self.optimized.loss)
        return losses[0] == losses[1] or all(map(math.isnan, losses))

    def table(self) -> str:
        """Both runs side by side, then the gradients and buffers that differ, the worst first, as text."""
        differing = sorted(
            (each for each in (*self.gradients, *self.buffers) if not each.bitwise), key=lambda each: -each.relative
        )
        parts: list[str | Table] = [self._verdict(len(differing)), self._runs_table()]
        if differing:
            parts.append(_differences_table(differing))
        return as_text(*parts)

    def __str__(self) -> str:
        return self.table()

    def _verdict(self, differing: int) -> str:
        compared = f"the loss, {len(self.gradients)} gradients and {len(self.buffers)} buffers"
        if self.bitwise:
            return f"bitwise equal: {compared}"
        return (
            f"not bitwise equal: of {len(self.gradients)} gradients and {len(self.buffers)} buffers "
            f"{differing} differ, the losses by {self.loss_error:.3g}"
        )

    def _runs_table(self) -> Table:
        table = Table(title="One forward and backward", title_justify="left")
        table.add_column("")
        for title in ("plain", "optimised"):
            table.add_column(title, justify="right")
        runs = (self.plain, self.optimized)
        table.add_row("loss", *(f"{run.loss:.9g}" for run in runs))
        table.add_row("peak, measured", *(size(run.peak_bytes) for run in runs))
        table.add_row("of the budget", *(f"{run.peak_bytes / self.budget_bytes:.1%}" for run in runs))
        table.add_row("time", *(duration(run.seconds) for run in runs))
        return table


def _differences_table(differing: list[Difference]) -> Table:
    table = Table(title=f"The worst of {len(differing)} that differ", title_justify="left")
    table.add_column("parameter or buffer", overflow="fold")
    for title in ("absolute", "relative"):
        table.add_column(title, justify="right")
    for each in differing[:WORST_ROWS]:
        table.add_row(each.name, f"{each.absolute:.3g}", f"{each.relative:.3g}")
    return table
