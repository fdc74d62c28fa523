"""Takes the place of the step of a pipeline's schedule: the first one plans the stages of this rank."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from memopt.account.elsewhere import look
from memopt.compat.pipelining import (
    in_flight,
    is_schedule,
    loss_of,
    microbatches_of,
    ranks_of_pipeline,
    set_loss,
    splits_backward,
    stages_of,
    trains,
)
from memopt.compat.subclasses import is_sharded
from memopt.errors import BudgetError
from memopt.planning.job_key import terms_of
from memopt.planning.options import Options
from memopt.planning.plan import Plan
from memopt.run.pipeline import Load, StageFacts, Together, facts_of_stages
from memopt.run.ranks import Ranks
from memopt.run.session import Session, session_of
from memopt.run.until_target import UntilTarget

_ROOMY_BYTES = 2**60
"""No stage needs as much."""
_ROUNDS = 3
"""How often the stages of a rank are planned beside each other."""
_TERMS_OF_ALL = ("memopt", "torch", "Python")
"""The terms that are the same for all stages; budgets may differ."""


class PlannedSchedule:
    """The step of a schedule, whose stages on this rank share a budget."""

    def __init__(self, schedule: Any, options: Options) -> None:
        if (earlier := planned_schedule_of(schedule)) is not None:
            earlier.give_back()
        _check(schedule, options)
        self.schedule, self.options = schedule, options
        self._run, self._loss, self._planned = schedule.step, loss_of(schedule), False
        self._stages = {stage.stage_index: stage for stage in stages_of(schedule)}
        self._modules: dict[int, nn.Module] = {number: stage.submod for number, stage in self._stages.items()}
        self._device = torch.device(stages_of(schedule)[0].device)

    def take_over(self) -> None:
        """Replace the step of the schedule, and the loss function where this rank has the last stage."""
        self.schedule.step = self.step
        for stage in self._stages.values():
            if stage.is_last:
                stage.submod = UntilTarget(stage, self._loss)
                set_loss(self.schedule, stage.submod.loss)

    def give_back(self) -> None:
        """Restore the schedule's step and loss function, and the plain modules of its stages."""
        self.schedule.step = self._run
        set_loss(self.schedule, self._loss)
        for number, stage in self._stages.items():
            stage.submod = self._modules[number]
            if (call := session_of(stage.submod)) is not None:
                call.give_back()

    def step(self, *args: Any, target: Any = None, return_outputs: bool = True, **further: Any) -> Any:
        """Run a step of the schedule, with the arguments that it takes; the first one that trains is planned before
        anything is sent. Raises what planning raises, on all ranks."""
        if trains(self.schedule) and not self._planned:
            ranks = Ranks(ranks_of_pipeline(self.schedule))
            ranks.check_terms(self._terms())
            with ranks.together():
                self._check_step(return_outputs=return_outputs, further=further)
            facts = facts_of_stages(self.schedule, ranks, args)
            calls: list[Session] = []
            with ranks.together():
                calls += self._plan(facts, target)
            for call in calls:
                call.take_over()
            self._planned = True
        return self._run(*args, target=target, return_outputs=return_outputs, **further)

    def _terms(self) -> Mapping[str, str]:
        terms = terms_of(nn.ModuleList(self._modules.values()), self.options, None)
        kind, many = type(self.schedule).__name__, microbatches_of(self.schedule)
        return {"the schedule": f"{kind} of {many} microbatches", **{name: terms[name] for name in _TERMS_OF_ALL}}

    def _check_step(self, *, return_outputs: bool, further: Mapping[str, Any]) -> None:
        """Raise `ValueError` for a step that cannot be planned."""
        if named := sorted(set(further) - {"losses"}):
            raise ValueError(
                f"step is given {named[0]!r}, but the stages of a planned schedule take positional tensors"
            )
        if return_outputs and any(stage.is_last for stage in self._stages.values()):
            raise ValueError(
                "a planned schedule does not hold the outputs of its last stage; give step return_outputs=False"
            )
        for number, module in self._modules.items():
            if not module.training:
                raise ValueError(f"stage {number} is in eval mode, which runs plain; call its module's train()")

    def _plan(self, facts: Mapping[int, StageFacts], target: Any) -> list[Session]:
        """The planned calls of this rank's stages. Raises `BudgetError`, `CaptureError`."""
        options, elsewhere = self.options, self._elsewhere_bytes()
        together = Together(tuple(in_flight(self.schedule)))
        roomy = replace(options, budget_bytes=_ROOMY_BYTES)
        found = {number: self._planned_call(one, target, roomy, 1, elsewhere) for number, one in facts.items()}
        loads = {number: Load.of(plan, elsewhere) for number, (_, plan) in found.items()}
        fixed = {number: load.fixed_bytes for number, load in loads.items()}
        for _ in range(_ROUNDS):
            forwards = {number: together.forwards(number, loads) for number in facts}
            for number, one in facts.items():
                beside = elsewhere + sum(fixed.values()) - fixed[number]
                earlier = found[number][0]
                found[number] = self._planned_call(one, target, options, forwards[number], beside, earlier)
                loads[number] = Load.of(found[number][1], beside)
            peak = elsewhere + together.peak_bytes(loads)
            if peak <= options.budget_bytes:
                return [call for call, _ in found.values()]
        reason = f"the {len(facts)} stages of this rank, with their microbatches in flight"
        raise BudgetError(options.budget_bytes, peak, reason, least=False)

    def _elsewhere_bytes(self) -> int:
        """The bytes on the device beside the stages, before a step: as the user says, or as they are found."""
        if self.options.elsewhere_bytes is not None:
            return self.options.elsewhere_bytes
        gc.collect()  # stages and schedules of before refer to each other
        return look(nn.ModuleList(self._modules.values()), self._device).other

    def _planned_call(
        self,
        facts: StageFacts,
        target: Any,
        options: Options,
        forwards: int,
        elsewhere: int,
        earlier: Session | None = None,
    ) -> tuple[Session, Plan]:
        """The call of a stage, planned as one of `forwards` and with `elsewhere` bytes on the device beside what its
        schedule holds for it, from what an earlier call has captured."""
        last = self._stages[facts.number].is_last
        own = replace(
            options,
            loss_fn=self._loss if last else None,
            outputs="loss" if last else "all",
            forwards=forwards,
            elsewhere_bytes=elsewhere + facts.elsewhere_bytes,
            kept=True,
            one_by_one=True,
        )
        call = Session(self._modules[facts.number], own)
        given = facts.example(self._device)
        example = (given, target.tensor_split(microbatches_of(self.schedule))[0]) if last else given
        with call.from_captures(earlier):
            return call, call.plan(example, gradients_held=True, advise=False)


def planned_schedule_of(schedule: Any) -> PlannedSchedule | None:
    """What has taken the place of a schedule's step; None for a plain schedule."""
    owner = getattr(getattr(schedule, "step", None), "__self__", None)
    return owner if isinstance(owner, PlannedSchedule) else None


def _check(schedule: Any, options: Options) -> None:
    """Raise `TypeError` or `ValueError` for a schedule or options with which stages cannot be planned."""
    kind = type(schedule).__name__
    if not is_schedule(schedule):
        raise TypeError(f"schedule must be one of torch.distributed.pipelining, not {kind}")
    if loss_of(schedule) is None:
        raise ValueError(f"this {kind} has no loss_fn, so that there is no training step to plan")
    if splits_backward(schedule):
        raise ValueError(
            f"{kind} computes gradients of inputs and of weights at different times, which memopt does not plan; use "
            "Schedule1F1B or ScheduleInterleaved1F1B"
        )
    if named := sorted(options.optimizer_levers):
        raise ValueError(f"{named[0]!r} is not for the stages of a pipeline; leave it out of allow")
    for stage in stages_of(schedule):
        module = stage.submod
        if isinstance(module, DistributedDataParallel) or any(map(is_sharded, module.parameters())):
            raise ValueError(
                f"stage {stage.stage_index} is a {type(module).__name__} whose gradients other ranks share, which "
                "memopt does not plan in a pipeline; leave the wrapper out"
            )
