"""Plans the steps of a schedule of `torch.distributed.pipelining`. Tested with torch 2.13."""

from __future__ import annotations

from typing import Any, TypeVar

from typing_extensions import Unpack

from memopt.planning.options import DEFAULTS, StepOptions, check_options, takes_options
from memopt.run.pipeline import PlannedSchedule, planned_schedule_of

Schedule = TypeVar("Schedule")
_BY_SCHEDULE = ("loss_fn", "forwards", "outputs", "dynamic")


@takes_options(StepOptions, DEFAULTS)
def optimize_schedule(schedule: Schedule, budget_gb: float, **options: Unpack[StepOptions]) -> Schedule:
    """Make the steps of a pipeline schedule run within a budget on this rank, in place, and return the schedule.

    Each stage is planned by itself at the first step, with as many microbatches in flight as the schedule holds, and
    the last one with the schedule's loss function. All ranks plan before anything is sent: if no plan fits on one of
    them, all raise its error. A second call gives the schedule another budget.

    Args:
        schedule: GPipe, 1F1B, interleaved 1F1B, or another that runs a microbatch's backward in one piece, with a
            `loss_fn`. Call its `step` with positional arguments, and with `return_outputs=False` on the rank of the
            last stage, whose outputs are not kept.
        budget_gb: GB of 1024³ bytes for everything that the steps of this rank's stages hold on its device.
        options: those of `memopt.optimize`, without the ones that the schedule decides: `loss_fn`, `forwards`,
            `outputs` and `dynamic`. By default dtypes are left as they are (`precision="fp32"`).

    Raises:
        BudgetError: raised by `schedule.step`, on all ranks, if no plan fits on one of them.
        TypeError, ValueError: the schedule or an option cannot be used.
    """
    decided = sorted(set(options) & set(_BY_SCHEDULE))
    if decided:
        raise ValueError(f"{decided[0]} is decided by the schedule; leave the option out")
    given: dict[str, Any] = {"precision": "fp32", **options}
    PlannedSchedule(schedule, check_options(budget_gb, **given)).take_over()
    return schedule


def remove_schedule(schedule: Schedule) -> Schedule:
    """Undo `optimize_schedule`, in place: restore the schedule, which is returned, and its stages' modules."""
    planned = planned_schedule_of(schedule)
    if planned is not None:
        planned.give_back()
    return schedule
