"""Runs a model's training calls as planned: plans each new situation, refuses what would not fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from memopt.budget.account import Account, account_of, distinct_bytes
from memopt.capture.dynamo import GraphBreak, capture, compile_call, lower, parameter_numbers, training_call
from memopt.capture.inputs import Call, call_signature, check_device, tensors_in
from memopt.capture.joint import JointGraph
from memopt.capture.outputs import PendingForward, PendingForwards, detach_all_but_scalars, hand_out
from memopt.emit.gradients import Leaves
from memopt.emit.partition import RegionSchedule, partition
from memopt.errors import BudgetError, CaptureError
from memopt.options import Options
from memopt.plan import Plan
from memopt.planner import Captured, make_plan
from memopt.pricing import hardware, hardware_of
from memopt.progress import stage


class _TooTight(Exception):
    """The plan leaves no room for the forwards in waiting: plan for this very situation."""


class TrainingCalls:
    """The planned training calls of one model.

    Each situation (are gradients held, what do forwards in waiting hold) has plans of its own, and within it Dynamo
    keeps one compilation for every set of shapes.
    """

    def __init__(self, model: nn.Module, options: Options, loss_fn: Callable[..., Any] | None) -> None:
        self.model, self.options, self.loss_fn = model, options, loss_fn
        self.pending = PendingForwards()
        self.leaves = Leaves()
        self.situations: dict[tuple[bool, int], Situation] = {}
        self.known: dict[tuple[str, ...], Captured] = {}
        """What was captured, by the fingerprints of its regions: another budget or situation prices nothing anew."""
        self.latest: Plan | None = None
        self.graph_break = False
        self.unplanned = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.unplanned:
            return self.plain(*args, **kwargs)
        check_device((args, kwargs), self.model)
        waiting = self.pending.waiting()
        self._check_waiting(waiting)
        self.leaves.only_forward = not waiting
        held = any(parameter.grad is not None for parameter in self.model.parameters())
        others = sum(forward.held_bytes for forward in waiting)
        try:
            try:
                return self._situation(held, 0).run((args, kwargs), others)
            except _TooTight:
                return self._situation(held, others).run((args, kwargs), others)
        except CaptureError:
            if "plain" not in self.options.allow:
                raise
            self.unplanned = True
            return self.plain(*args, **kwargs)

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """The call of the plain model."""
        return training_call(self.model, self.loss_fn)(*args, **kwargs)

    def _situation(self, held: bool, others: int) -> Situation:
        key = (held, others)
        if key not in self.situations:
            self.situations[key] = Situation(self, held, others)
        return self.situations[key]

    def _check_waiting(self, waiting: Sequence[PendingForward]) -> None:
        """Forwards in waiting were not planned for the gradients that this call's backward will leave."""
        gradients = distinct_bytes(parameter for parameter in self.model.parameters() if parameter.requires_grad)
        for forward in waiting:
            needed = forward.peak_bytes + gradients
            if needed > self.options.budget_bytes:
                reason = "a second forward before the first one's backward, which then finds gradients held already"
                raise BudgetError(self.options.budget_bytes, needed, reason)

    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def account(self, call: Call, held: bool, others: int) -> Account:
        account = account_of(self.model, tensors_in(call), self.options.optimizer, self.device())
        return replace(account, gradients_held=held, other_forwards=others)

    def capture(self, call: Call) -> Captured:
        """Capture a call ahead of its first run."""
        with stage("capturing"):
            regions, notes = capture(
                self.model, call, self.loss_fn, self.device(), differentiate_all=self.differentiate_all
            )
        return self.remember(regions, notes)

    def remember(self, regions: tuple[JointGraph, ...], notes: tuple[str, ...] = ()) -> Captured:
        """The regions as something to plan; the same object as before if they were captured before."""
        key = tuple(region.fingerprint for region in regions)
        if key not in self.known:
            card = hardware(self.options.hardware) if self.options.hardware else hardware_of(self.device())
            self.known[key] = Captured(type(self.model).__name__, regions, card, notes)
        return self.known[key]

    @property
    def differentiate_all(self) -> bool:
        return self.options.outputs == "all"


class Situation:
    """Training calls with or without held gradients, beside forwards in waiting that hold `others` bytes."""

    def __init__(self, calls: TrainingCalls, held: bool, others: int) -> None:
        self.calls, self.held, self.others = calls, held, others
        self.call: Call = ((), {})
        self.others_now = 0
        self.forward: PendingForward | None = None
        self.plans: dict[str, Plan] = {}
        """By the signature of the call that they were made for; only used where the forward breaks into regions."""
        self.schedules: dict[str, RegionSchedule] = {}
        self._whole = compile_call(training_call(calls.model, calls.loss_fn), self._plan_and_lower, whole=True)
        self._broken = compile_call(training_call(calls.model, calls.loss_fn), self._lower_planned, whole=False)

    def run(self, call: Call, others: int) -> Any:
        """Run a planned call; forwards in waiting now hold `others` bytes."""
        self.call, self.others_now, self.forward = call, others, None
        if not self.calls.graph_break:
            try:
                return self._whole(*call[0], **call[1])
            except GraphBreak:
                self.calls.graph_break = True
        plan = self._plan_regions(call)
        self.begin(plan)
        return self._broken(*call[0], **call[1])

    def begin(self, plan: Plan) -> PendingForward:
        """Account for a forward that is about to run as planned, once a call."""
        if self.forward is None:
            if plan.predicted_peak_bytes - self.others + self.others_now > plan.budget_bytes:
                raise _TooTight
            self.calls.latest = plan
            self.forward = self.calls.pending.begin(plan.held_bytes, plan.predicted_peak_bytes)
        return self.forward

    def _plan(self, captured: Captured) -> Plan:
        account = self.calls.account(self.call, self.held, self.others)
        return make_plan(captured, account, self.calls.options.budget_bytes)

    def _plan_and_lower(self, graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Dynamo's backend for a call that is one region: planned as soon as its joint graph is there."""
        plans: list[Plan] = []

        def plan_region(joint: JointGraph) -> RegionSchedule:
            plans.append(self._plan(self.calls.remember((joint,))))
            return plans[0].regions[0]

        region = self._lower(graph_module, inputs, plan_region)
        return lambda *args: region(self.begin(plans[0]), *args)

    def _plan_regions(self, call: Call) -> Plan:
        """Plan a call of several regions, all together, before it runs."""
        signature = call_signature(call)
        if signature not in self.plans:
            plan = self._plan(self.calls.capture(call))
            self.plans[signature] = plan
            self.schedules.update({schedule.fingerprint: schedule for schedule in plan.regions})
        return self.plans[signature]

    def _lower_planned(self, graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Dynamo's backend for a region of a call that was planned before."""

        def look_up(joint: JointGraph) -> RegionSchedule:
            if joint.fingerprint not in self.schedules:
                raise CaptureError(
                    "the forward took another way than when it was planned: it depends on the values of its inputs "
                    "outside of any captured region; mend the graph break, or add 'plain' to allow to run it unplanned"
                )
            return self.schedules[joint.fingerprint]

        region = self._lower(graph_module, inputs, look_up)
        return lambda *args: region(self.forward, *args)

    def _lower(
        self, graph_module: fx.GraphModule, inputs: Sequence[Any], schedule_of: Callable[[JointGraph], RegionSchedule]
    ) -> Callable[..., Any]:
        calls = self.calls
        undifferentiated = frozenset() if calls.differentiate_all else detach_all_but_scalars(graph_module)

        def cut(joint: JointGraph) -> tuple[fx.GraphModule, fx.GraphModule]:
            return partition(joint, schedule_of(joint), calls.leaves)

        compiled = lower(graph_module, inputs, cut)
        parameters = parameter_numbers(inputs)

        def region(forward: PendingForward | None, *args: Any) -> Any:
            for number in parameters:
                calls.leaves.set(number, args[number])
            assert forward is not None
            return hand_out(compiled(*args), undifferentiated, forward)

        return region
