"""The result of comparing a step of the optimised model with one of the plain model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from memopt.checks.reference import Accuracies, Accuracy, dense, largest_of, ratio_of
from memopt.compat.tensors import same_bits
from memopt.errors import GIB
from memopt.planning.plan_graphs import in_columns
from memopt.show.report import as_text, new_table
from memopt.terminal import Column, Table
from memopt.training_state import Tensors
from memopt.units import duration, size

_WORST_ROWS = 10


@dataclass(frozen=True)
class StepRun:
    """One forward and backward: its loss, the most bytes on the device at once, and its seconds."""

    loss: float
    peak_bytes: int
    seconds: float
    loss_scale: float = 1.0
    """The factor by which the loss was multiplied for the backward, and gradients divided after it, as fp16 needs
    it."""

    @property
    def peak_gb(self) -> float:
        """`peak_bytes` in GB of 1024³."""
        return self.peak_bytes / GIB


@dataclass(frozen=True)
class Difference:
    """How far a tensor of the optimised run differs from that of the plain run.

    `absolute` is the largest difference of two elements; `relative` divides it by the largest element of the plain
    tensor. Both are 0 for tensors with the same bits. Of other tensors both are infinite if one is missing or has an
    element that is not finite; `relative` also if the plain tensor is all zeros and the other is not.
    """

    name: str
    absolute: float
    relative: float
    bitwise: bool
    """Whether all bits are the same, those of NaN and of the sign of zero included."""

    @classmethod
    def of(cls, name: str, optimized: torch.Tensor | None, plain: torch.Tensor | None) -> Difference:
        """Compare two tensors of the same shape; None stands for a tensor that a run does not have."""
        if optimized is None or plain is None:
            return cls(name, math.inf, math.inf, False)
        optimized, plain = (tensor.to_dense() if tensor.is_sparse else tensor for tensor in (optimized, plain))
        if same_bits(optimized, plain):
            return cls(name, 0.0, 0.0, True)
        absolute = largest_of(dense(optimized) - dense(plain))
        return cls(name, absolute, ratio_of(absolute, largest_of(dense(plain))), False)


def differences_of(ours: Sequence[Tensors], plain: Tensors) -> tuple[Difference, ...]:
    """The difference of each tensor from the plain run's, the largest relative one of several runs (`ours`)."""
    names = dict.fromkeys(name for tensors in (plain, *ours) for name in tensors)
    return tuple(
        max(
            (Difference.of(name, tensors.get(name), plain.get(name)) for tensors in ours),
            key=lambda found: (found.relative, not found.bitwise),
        )
        for name in names
    )


@dataclass(frozen=True)
class Comparison:
    """A step of the optimised model compared with one of the plain model. Both start from the same state, batch and
    random numbers. `accuracies` has the errors of these steps, and of one under torch.autocast, against a reference."""

    plain: StepRun
    optimized: StepRun
    gradients: tuple[Difference, ...]
    """The differences of the gradients, one for each parameter that has a gradient in either run."""
    buffers: tuple[Difference, ...]
    """The differences of the buffers after the step."""
    budget_bytes: int
    accuracies: Accuracies
    """The errors of each run against the reference, of its loss and of every gradient."""
    autocast: StepRun | None = None
    """The plain model under `torch.autocast` in the 16-bit dtype of the plan; None for fp32, or if it fails."""
    autocast_dtype: str = ""
    """"bf16" or "fp16"; empty without `autocast`."""
    notes: tuple[str, ...] = ()
    """Remarks on the runs, such as one that could not be made, and why."""

    @property
    def loss_error(self) -> float:
        """The absolute difference of the two losses: 0 where they are equal or both NaN, infinite where they differ and
        one is not finite."""
        if self._same_loss:
            return 0.0
        error = abs(self.optimized.loss - self.plain.loss)
        return error if math.isfinite(error) else math.inf

    @property
    def bitwise(self) -> bool:
        """Whether the loss, every gradient and every buffer are the same to the last bit."""
        return self._same_loss and all(difference.bitwise for difference in (*self.gradients, *self.buffers))

    @property
    def worst(self) -> Difference | None:
        """The gradient or buffer with the largest relative difference; None where the model has neither."""
        differences = (*self.gradients, *self.buffers)
        return max(differences, key=lambda found: (found.relative, not found.bitwise), default=None)

    @property
    def _same_loss(self) -> bool:
        losses = (self.plain.loss, self.optimized.loss)
        return losses[0] == losses[1] or all(map(math.isnan, losses))

    def table(self) -> str:
        """The comparison as text: a verdict, the runs side by side, the gradients and buffers that differ, the worst
        first, and the notes."""
        differing = sorted(
            (found for found in (*self.gradients, *self.buffers) if not found.bitwise),
            key=lambda difference: -difference.relative,
        )
        verdict = (
            f"not bitwise equal: of {len(self.gradients)} gradients and {len(self.buffers)} buffers "
            f"{len(differing)} differ, the losses by {self.loss_error:.3g}"
        )
        if self.bitwise:
            verdict = f"bitwise equal: the loss, {len(self.gradients)} gradients and {len(self.buffers)} buffers"
        parts: list[str | Table] = [verdict, self._runs_table()]
        if differing:
            title = f"The worst of {len(differing)} gradients and buffers that differ"
            worst = new_table(title, Column("parameter or buffer", overflow="fold"), right=("absolute", "relative"))
            for found in differing[:_WORST_ROWS]:
                worst.add_row(found.name, f"{found.absolute:.3g}", f"{found.relative:.3g}")
            parts += [worst, _gradients_table(self.accuracies, self._columns)]
        return as_text(*parts, *(f"note: {note}" for note in self.notes))

    def _repr_html_(self) -> str:
        """The tables, for notebooks."""
        return in_columns(str(self))

    def __str__(self) -> str:
        return self.table()

    @property
    def _columns(self) -> tuple[tuple[str, StepRun, Accuracy | None], ...]:
        """Title, run and accuracy of each run that was made."""
        known = self.accuracies
        runs = (
            ("plain", self.plain, known.plain),
            (f"torch.autocast {self.autocast_dtype}", self.autocast, known.autocast),
            ("optimised", self.optimized, known.optimized),
        )
        return tuple((title, run, accuracy) for title, run, accuracy in runs if run is not None)

    def _runs_table(self) -> Table:
        columns, known = self._columns, self.accuracies
        exact = known.reference == "float64"  # has a column of its own
        right = (*["float64"] * exact, *(title for title, *_ in columns))
        table = new_table("One forward and backward", "", right=right)

        def add(title: str, cells: Iterable[str], first: str = "") -> None:
            table.add_row(title, *[first] * exact, *cells)

        runs = [run for _, run, _ in columns]
        add("loss", (f"{run.loss:.9g}" for run in runs), f"{known.loss:.9g}")
        accuracies = [accuracy for *_, accuracy in columns]
        add("loss error", (f"{accuracy.loss:.2e}" if accuracy else "–" for accuracy in accuracies))
        add("gradient error", (f"{accuracy.gradient:.2e}" if accuracy else "–" for accuracy in accuracies))
        worst = (accuracy.worst if accuracy else None for accuracy in accuracies)
        add("  of the worst parameter", (f"{error.relative:.2e}" if error else "–" for error in worst))
        if any(run.loss_scale != 1 for run in runs):
            add("loss scale", (f"{run.loss_scale:g}" for run in runs))
        add("peak, measured", (size(run.peak_bytes) for run in runs))
        add("of the budget", (f"{run.peak_bytes / self.budget_bytes:.1%}" for run in runs))
        add("time", (duration(run.seconds) for run in runs))
        return table


def _gradients_table(known: Accuracies, columns: Iterable[tuple[str, StepRun, Accuracy | None]]) -> Table:
    """A table of the relative error of each gradient in each run, the worst of the optimised run first."""
    runs = {name: accuracy.gradients for name, _, accuracy in columns if accuracy is not None}
    errors = [{error.name: error for error in gradients} for gradients in runs.values()]
    title = f"Gradients against {known.reference}: |g - r| / |r|"
    table = new_table(title, Column("parameter", overflow="fold"), right=runs)
    for worst in known.optimized.worst_first[:_WORST_ROWS]:
        table.add_row(worst.name, *(f"{by_name[worst.name].relative:.2e}" for by_name in errors))
    return table
