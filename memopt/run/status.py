"""What memopt does with the training calls of an optimised model: the states of a session, in one line for users."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from memopt.planning.plan import Plan
from memopt.units import size


class State(Enum):
    """The states of an optimised model; `TrainingCalls` is the one place where they change."""

    NEW = "new"
    """No training call has come yet, and nothing is planned."""
    RECORDING = "recording"
    """A call is being recorded and planned."""
    PLAIN = "plain"
    """The latest call ran as the plain model does, since its step fits the budget."""
    PLANNED = "planned"
    """The latest call ran by its plan, or was planned ahead of its run."""
    CHECKPOINTED = "checkpointed"
    """The latest call ran with activation checkpoints, as its forward breaks and its regions cannot be planned within
    the budget."""
    UNPLANNED = "unplanned"
    """Calls run as the plain model does whatever they need, as "plain" in `allow` has it."""
    REFUSED = "refused"
    """The latest call was refused, and no step was taken."""


@dataclass(frozen=True)
class Status:
    """The state of an optimised model after its latest training call; `str()` of it is one line."""

    model: str
    """The name of the model's class."""
    state: State = State.NEW
    reason: str = "no training call has come yet"
    """Why it is in that state, in words; what is planned where it is PLANNED."""
    plan: Plan | None = None
    """The plan of the latest call; None where it has none."""

    def __str__(self) -> str:
        return f"{self.model}: {self.state.value}, {self.reason}"


def planned_in_words(plan: Plan, shapes: str) -> str:
    """The reason of the state PLANNED: the figures of the plan of a call with tensors of these shapes."""
    peak, budget = size(plan.predicted_peak_bytes), size(plan.budget_bytes)
    return f"{shapes}: peak {peak} of {budget}, added time {plan.added_time:.1%}"
