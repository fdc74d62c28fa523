"""Pipelines: the tensors that a rank's stages receive and hold, and the step of a schedule: its first call plans the
stages.

Microbatches have one shape, so that everything is known before the first one is sent.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from memopt.account.elsewhere import look
from memopt.compat.exchanges import (
    first_microbatch,
    in_flight,
    is_schedule,
    loss_of,
    microbatches_of,
    ranks_of_pipeline,
    sends_kept,
    set_loss,
    splits_backward,
    stages_of,
    trains,
)
from memopt.compat.fakes import FakeTensorMode
from memopt.compat.operators import tree_leaves
from memopt.compat.tensors import is_sharded
from memopt.errors import BudgetError
from memopt.planning.job_key import terms_of
from memopt.planning.options import Options
from memopt.planning.plan import Plan
from memopt.run.loss import batch_loss
from memopt.run.ranks import Ranks
from memopt.run.session import Session, session_of

_Kind: TypeAlias = tuple[tuple[int, ...], torch.dtype, bool]
"""The shape and dtype of a tensor, and whether it has a gradient."""


@dataclass(frozen=True)
class _StageFacts:
    """The tensors of a stage, and the memory that the schedule needs for it."""

    number: int
    given: tuple[_Kind, ...]
    """The tensors that it receives for a microbatch."""
    returned: tuple[_Kind, ...]
    """The tensors that it returns for a microbatch."""
    elsewhere_bytes: int
    """The bytes that the schedule holds for the stage besides one microbatch: buffers for activations and gradients
    that arrive, and tensors that were sent."""

    def example(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Tensors of zeros like those that the stage receives."""
        return tuple(
            torch.zeros(shape, dtype=dtype, device=device, requires_grad=has_gradient)
            for shape, dtype, has_gradient in self.given
        )


def facts_of_stages(schedule: Any, ranks: Ranks, args: tuple[Any, ...]) -> dict[int, _StageFacts]:
    """The `_StageFacts` of each of this rank's pipeline stages, by stage number, if the whole pipeline gets `args`. All
    ranks call it together: the shapes that one stage returns are computed on fake tensors and sent to the rank of the
    next.

    An error on one rank is raised on all of them."""
    stages = {stage.stage_index: stage for stage in stages_of(schedule)}
    given: tuple[_Kind, ...] = ()
    known: dict[int, tuple[tuple[_Kind, ...], tuple[_Kind, ...]]] = {}
    for number in range(next(iter(stages.values())).num_stages):
        returned: tuple[_Kind, ...] | None = None
        with ranks.together():
            if (stage := stages.get(number)) is not None:
                given = _kinds(first_microbatch(schedule, args)) if number == 0 else given
                returned = _returned(stage.submod, given, stage.device)
                known[number] = given, returned
        given = next(kinds for kinds in ranks.gathered(returned) if kinds is not None)
    return {
        number: _StageFacts(number, *known[number], _elsewhere(schedule, stage, *known[number]))
        for number, stage in stages.items()
    }


def _returned(module: nn.Module, given: Sequence[_Kind], device: torch.device) -> tuple[_Kind, ...]:
    """The kinds of the tensors that a stage returns for tensors of these kinds."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
        values = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, _ in given]
        for value, (_, _, has_gradient) in zip(values, given, strict=True):
            value.requires_grad_(has_gradient)
        return _kinds(module(*values))


def _kinds(values: Any) -> tuple[_Kind, ...]:
    """The shape, dtype and `requires_grad` of each tensor in nested containers. Raises `TypeError` where there is
    anything else."""
    leaves = tree_leaves(values)
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            raise TypeError(f"the inputs and outputs of a pipeline stage must be tensors, not {type(leaf).__name__}")
    return tuple((tuple(leaf.shape), leaf.dtype, leaf.requires_grad) for leaf in leaves)


def _elsewhere(schedule: Any, stage: Any, given: Sequence[_Kind], returned: Sequence[_Kind]) -> int:
    """The bytes that the schedule holds for a stage besides the step of one microbatch."""
    many, sent = microbatches_of(schedule), sends_kept(schedule)
    from_before = 0 if stage.is_first else _bytes(given)
    to_next = 0 if stage.is_last else _bytes(returned)
    arriving = (many - 1) * from_before + many * to_next  # the microbatch's own input is one of its step
    return arriving + sent * (from_before + to_next)


def _bytes(kinds: Sequence[_Kind]) -> int:
    return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype, _ in kinds)


@dataclass(frozen=True)
class _Load:
    """The bytes that a planned pipeline stage holds on the device of its rank."""

    fixed_bytes: int
    """Throughout a step: parameters, gradients, the optimizer's state, and what the schedule holds for it."""
    held_bytes: int
    """For each microbatch whose backward is still to come."""
    most_bytes: int
    """The most that one microbatch holds while it runs, in addition to `fixed_bytes`."""

    @staticmethod
    def of(plan: Plan, elsewhere_bytes: int) -> _Load:
        """The load of a stage by its plan. `elsewhere_bytes`: the part of the plan's row "elsewhere" that is not the
        stage's; the rest of the row is what the schedule holds for the stage."""
        beside = plan.account.other_forwards + elsewhere_bytes
        fixed = plan.account.resident_bytes - beside
        return _Load(fixed, plan.held_bytes, plan.ceiling_bytes - beside - fixed)


@dataclass(frozen=True)
class _Together:
    """The stages of one rank; one runs at a time while microbatches of all are in flight."""

    moments: tuple[tuple[int, Mapping[int, int]], ...]
    """For each forward and backward of a step, in order: the stage that runs, and the number of microbatches in flight
    of each stage."""

    def forwards(self, number: int, loads: Mapping[int, _Load]) -> int:
        """The most microbatches in flight while stage `number` runs. Those of other stages count as the number of its
        own that hold the same bytes."""
        own = max(1, loads[number].held_bytes)
        return max(-(-_held(waiting, loads) // own) for running, waiting in self.moments if running == number)

    def peak_bytes(self, loads: Mapping[int, _Load]) -> int:
        """The most bytes that the stages hold together."""
        fixed = sum(load.fixed_bytes for load in loads.values())
        return fixed + max(
            _held(waiting, loads) - loads[running].held_bytes + loads[running].most_bytes
            for running, waiting in self.moments
        )


def _held(waiting: Mapping[int, int], loads: Mapping[int, _Load]) -> int:
    return sum(many * loads[number].held_bytes for number, many in waiting.items())


class _UntilTarget(nn.Module):
    """The last stage of a pipeline. In training, its module runs only when the target is known, so that module and loss
    run as one planned region.

    Until it is planned, and in evaluation, it runs as the plain stage."""

    def __init__(self, stage: Any, loss_fn: Callable[..., Any] | None) -> None:
        super().__init__()
        self.module, self.loss_fn = stage.submod, loss_fn
        self._stage = stage
        self._given: tuple[torch.Tensor, ...] | None = None

    def forward(self, *args: torch.Tensor) -> Any:
        """Returns what the module returns. In training, once planned, returns a view of the first input instead, which
        the pipeline passes on to `loss`, where the module runs."""
        if session_of(self.module) is None or not (self._stage.has_backward and torch.is_grad_enabled()):
            return self.module(*args)
        self._given = args
        return args[0].view_as(args[0])

    def loss(self, output: Any, target: Any, **further: Any) -> Any:
        """The loss of a microbatch, given what `forward` returned and the target."""
        given, self._given = self._given, None
        if given is None:
            assert self.loss_fn is not None
            return self.loss_fn(output, target, **further)
        return batch_loss(self.module, (given, target), None)


_ROOMY_BYTES = 2**60
"""A budget that exceeds the needs of any stage."""
_ROUNDS = 3
"""How often the stages of a rank are planned, each with the bytes of the others."""
_TERMS_OF_ALL = ("memopt", "torch", "Python")
"""The terms that all stages must share; budgets may differ."""


class PlannedSchedule:
    """Replaces the step of a pipeline schedule; the schedule's stages on this rank share a budget."""

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
        """Replace the step of the schedule, and its loss function if this rank has the last stage."""
        self.schedule.step = self.step
        for stage in self._stages.values():
            if stage.is_last:
                stage.submod = _UntilTarget(stage, self._loss)
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
        """Run a step of the schedule, with the schedule's own arguments, and return its result. The first training step
        is planned before anything is sent. Raises planning errors on all ranks."""
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
                f"step is given {named[0]!r}, but the stages of a planned schedule take positional tensors only; "
                "pass it by position"
            )
        if return_outputs and any(stage.is_last for stage in self._stages.values()):
            raise ValueError(
                "a planned schedule does not hold the outputs of its last stage; give step return_outputs=False"
            )
        for number, module in self._modules.items():
            if not module.training:
                raise ValueError(f"stage {number} is in eval mode, which runs plain; call its module's train()")

    def _plan(self, facts: Mapping[int, _StageFacts], target: Any) -> list[Session]:
        """Plan this rank's stages, and return their sessions. Raises `BudgetError` and `CaptureError`."""
        options, elsewhere = self.options, self._elsewhere_bytes()
        together = _Together(tuple(in_flight(self.schedule)))
        roomy = replace(options, budget_bytes=_ROOMY_BYTES)
        found = {number: self._planned_call(one, target, roomy, 1, elsewhere) for number, one in facts.items()}
        loads = {number: _Load.of(plan, elsewhere) for number, (_, plan) in found.items()}
        fixed = {number: load.fixed_bytes for number, load in loads.items()}
        for _ in range(_ROUNDS):
            forwards = {number: together.forwards(number, loads) for number in facts}
            for number, one in facts.items():
                beside = elsewhere + sum(fixed.values()) - fixed[number]
                earlier = found[number][0]
                found[number] = self._planned_call(one, target, options, forwards[number], beside, earlier)
                loads[number] = _Load.of(found[number][1], beside)
            peak = elsewhere + together.peak_bytes(loads)
            if peak <= options.budget_bytes:
                return [call for call, _ in found.values()]
        reason = f"the {len(facts)} stages of this rank, with their microbatches in flight"
        raise BudgetError(options.budget_bytes, peak, reason, least=False)

    def _elsewhere_bytes(self) -> int:
        """The bytes on the device outside of the stages before a step: as the user gave them, or as found by a
        search."""
        if self.options.elsewhere_bytes is not None:
            return self.options.elsewhere_bytes
        gc.collect()  # stages and schedules of before refer to each other
        return look(nn.ModuleList(self._modules.values()), self._device).other

    def _planned_call(
        self,
        facts: _StageFacts,
        target: Any,
        options: Options,
        forwards: int,
        elsewhere: int,
        earlier: Session | None = None,
    ) -> tuple[Session, Plan]:
        """The session of a stage and its plan, made for `forwards` in flight and `elsewhere` bytes on the device in
        addition to those that its schedule holds for it. What the session `earlier` has captured is used again."""
        last = self._stages[facts.number].is_last
        own = replace(
            options,
            loss_fn=self._loss if last else None,
            outputs="loss" if last else "all",
            forwards=forwards,
            elsewhere_bytes=elsewhere + facts.elsewhere_bytes,
            to_train=True,
            one_by_one=True,
        )
        call = Session(self._modules[facts.number], own)
        given = facts.example(self._device)
        example = (given, target.tensor_split(microbatches_of(self.schedule))[0]) if last else given
        with call.from_captures(earlier):
            return call, call.plan(example, gradients_held=True, advise=False)


def planned_schedule_of(schedule: Any) -> PlannedSchedule | None:
    """The `PlannedSchedule` that has replaced the step of a schedule; None for a plain schedule."""
    owner = getattr(getattr(schedule, "step", None), "__self__", None)
    return owner if isinstance(owner, PlannedSchedule) else None


def _check(schedule: Any, options: Options) -> None:
    """Raise `TypeError` or `ValueError` for a schedule or options with which stages cannot be planned."""
    kind = type(schedule).__name__
    if not is_schedule(schedule):
        raise TypeError(f"schedule must be one of torch.distributed.pipelining, not {kind}")
    if loss_of(schedule) is None:
        raise ValueError(f"this {kind} has no loss_fn, so there is no training step to plan; give {kind} a loss_fn")
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
