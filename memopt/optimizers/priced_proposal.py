"""A proposal with its price: the bytes and seconds that it changes, and a description in words."""

from __future__ import annotations

from dataclasses import dataclass

from memopt.units import duration, size


@dataclass(frozen=True)
class StepBytes:
    """The rows of a training step's account that proposals change, in bytes on the device."""

    parameters: int
    gradients: int
    optimizer_state: int
    optimizer_temporaries: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer_state + self.optimizer_temporaries

    def less(self, other: StepBytes) -> StepBytes:
        """The difference of each row; negative where `other` has more."""
        return StepBytes(
            self.parameters - other.parameters,
            self.gradients - other.gradients,
            self.optimizer_state - other.optimizer_state,
            self.optimizer_temporaries - other.optimizer_temporaries,
        )


@dataclass(frozen=True)
class PricedProposal:
    """A lever that is used only where `allow` names it, and its price."""

    name: str
    """Its name in `allow`."""
    changes: str
    """The change that it makes, in a sentence."""
    before: StepBytes
    after: StepBytes
    host_bytes: int
    """Bytes that it holds in the host's memory."""
    added_seconds: float
    """Estimated seconds that it adds to `optimizer.step()`; negative where it is faster."""
    exactness: str
    """How far the numbers differ from those of the plain step."""

    @property
    def saved(self) -> StepBytes:
        """Bytes saved on the device in each row; negative for a row that grows."""
        return self.before.less(self.after)

    def __str__(self) -> str:
        cost = f"{duration(abs(self.added_seconds)) if self.added_seconds else 'no time'}"
        sign = "-" if self.added_seconds < 0 else "+"
        host = f", {size(self.host_bytes)} on the host" if self.host_bytes else ""
        saved = size(abs(self.saved.total))
        word = "saves" if self.saved.total >= 0 else "costs"
        return f"{self.name}: {word} {saved}, {sign}{cost} a step{host}; {self.changes}; {self.exactness}"
