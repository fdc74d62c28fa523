"""The stages, the order and the loss function of schedules of `torch.distributed.pipelining`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import distributed
from torch.distributed.pipelining import Schedule1F1B
from torch.distributed.pipelining.schedules import _PipelineSchedule

from passes.compat import private

PRIVATE_NAMES = (
    *private("torch.distributed.pipelining.schedules", "_PipelineSchedule"),
    *private(
        "torch.distributed.pipelining.schedules",
        "_PipelineSchedule._n_microbatches",
        "_PipelineSchedule._loss_fn",
        "_PipelineSchedule._has_backward",
        "_PipelineSchedule._split_inputs",
        "PipelineScheduleSingle._stage",
        "PipelineScheduleMulti._stages",
        needed=False,
    ),
)

__all__ = [
    "first_microbatch",
    "in_flight",
    "is_schedule",
    "loss_of",
    "microbatches_of",
    "ranks_of_pipeline",
    "sends_kept",
    "set_loss",
    "splits_backward",
    "stages_of",
    "trains",
]

_FORWARD, _BACKWARD = "F", "B"


def is_schedule(value: Any) -> bool:
    """Whether a value is a schedule of `torch.distributed.pipelining`."""
    return isinstance(value, _PipelineSchedule)


def stages_of(schedule: Any) -> list[Any]:
    """The stages that this rank holds, in their order."""
    return list(schedule._stages) if hasattr(schedule, "_stages") else [schedule._stage]


def microbatches_of(schedule: Any) -> int:
    """The number of microbatches in which a batch is run."""
    return int(schedule._n_microbatches)


def loss_of(schedule: Any) -> Callable[..., Any] | None:
    """The function that computes a microbatch's loss; None for a schedule that does not train."""
    return schedule._loss_fn


def set_loss(schedule: Any, loss_fn: Callable[..., Any] | None) -> None:
    """Have the schedule compute losses by this function."""
    schedule._loss_fn = loss_fn


def trains(schedule: Any) -> bool:
    """Whether a step runs backwards: not while the schedule evaluates."""
    return bool(schedule._has_backward)


def in_flight(schedule: Any) -> list[tuple[int, dict[int, int]]]:
    """For each forward and backward of this rank, in order: its stage, and of every stage here the microbatches whose
    backward is to come, its own among them."""
    waiting = {stage.stage_index: 0 for stage in stages_of(schedule)}
    found = []
    for stage, kind in _actions(schedule):
        waiting[stage] += kind == _FORWARD
        if kind in (_FORWARD, _BACKWARD):
            found.append((stage, dict(waiting)))
        waiting[stage] -= kind == _BACKWARD
    return found


def splits_backward(schedule: Any) -> bool:
    """Whether the schedule computes the gradients of inputs and those of weights at different times."""
    kinds = {kind for _, kind in _actions(schedule)}
    return not kinds <= {_FORWARD, _BACKWARD, "REDUCE_GRAD"}


def sends_kept(schedule: Any) -> int:
    """The number of microbatches whose tensors stay on the device after they were sent, in each direction: the handles
    of all exchanges are held to the end of a step, but for 1F1B, which holds those of the latest two."""
    many = microbatches_of(schedule)
    return min(2, many) if isinstance(schedule, Schedule1F1B) else many


def ranks_of_pipeline(schedule: Any) -> list[int]:
    """The ranks that hold the stages of the pipeline, by their numbers among all."""
    group = stages_of(schedule)[0].group
    return list(distributed.get_process_group_ranks(group or distributed.group.WORLD))


def first_microbatch(schedule: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The first microbatch of the arguments of a batch, the largest of them."""
    return tuple(schedule._split_inputs(args, {})[0][0])


def _actions(schedule: Any) -> list[tuple[int, str]]:
    """Stage and kind of what this rank computes in a step, in order."""
    order = schedule.pipeline_order[stages_of(schedule)[0].group_rank]
    found = []
    for action in order:
        for part in () if action is None else action.sub_actions or (action,):
            found.append((part.stage_index, part.computation_type.value))
    return found
