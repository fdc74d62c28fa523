"""What a proposal would change, in bytes, seconds and words."""

from __future__ import annotations

from dataclasses import dataclass

from memopt.units import duration, size


@dataclass(frozen=True)
class StepBytes:
    """The rows of a step's account that proposals about the optimiser move, in bytes on the device."""

    parameters: int
    gradients: int
    optimizer_state: int
    optimizer_temporaries: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer_state + self.optimizer_temporaries

    def less(self, other: StepBytes) -> StepBytes:
        """Row by row; what `other` has more of is negative."""
        return StepBytes(
            self.parameters - other.parameters,
            self.gradients - other.gradients,
            self.optimizer_state - other.optimizer_state,
            self.optimizer_temporaries - other.optimizer_temporaries,
        )


@dataclass(frozen=True)
class Proposal:
    """A change of the training that memopt makes only where it is named in `allow`."""

    name: str
    """As in `allow`."""
    changes: str
    """What it changes, in a sentence."""
    before: StepBytes
    after: StepBytes
    host_bytes: int
    """What it takes of the host's memory."""
    added_seconds: float
    """An estimate, for each step of the optimiser; negative where it is faster."""
    exactness: str
    """How the numbers trained differ from those of the plain step."""

    @property
    def saved(self) -> StepBytes:
        """Bytes saved on the device, row by row; a row that grows is negative."""
        return self.before.less(self.after)

    def __str__(self) -> str:
        cost = f"{duration(abs(self.added_seconds)) if self.added_seconds else 'no time'}"
        sign = "-" if self.added_seconds < 0 else "+"
        host = f", {size(self.host_bytes)} on the host" if self.host_bytes else ""
        saved = size(abs(self.saved.total))
        word = "saves" if self.saved.total >= 0 else "costs"
        return f"{self.name}: {word} {saved}, {sign}{cost} a step{host}; {self.changes}; {self.exactness}"
