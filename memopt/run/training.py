"""Runs a model's training calls as planned: plans each new situation, refuses what would not fit."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from memopt.account.account import distinct_bytes
from memopt.capture.data_sizes import SizeOutgrown
from memopt.capture.dynamo import loss_call, training_call
from memopt.capture.inputs import Call, check_device
from memopt.emit.gradients import Accumulation, is_hooked
from memopt.emit.stepping import sharing_memory
from memopt.errors import BudgetError, CaptureError
from memopt.optimizers import OPTIMIZER_IN_BACKWARD
from memopt.planning.call_planner import CallPlanner
from memopt.planning.options import Options
from memopt.planning.plan import Plan
from memopt.planning.state import State
from memopt.run.pending import PendingForward, PendingForwards
from memopt.run.situation import Situation, TooTight
from memopt.training_state import generator_states, set_generators


class TrainingCalls:
    """The planned training calls of one model.

    Each situation (are gradients held, what do forwards in waiting hold, what is hooked) has plans of its own, and
    within it Dynamo keeps one compilation for every set of shapes.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        loss_fn: Callable[..., Any] | None,
        own_call: Callable[..., Any] | None,
    ) -> None:
        self.model, self.options, self.loss_fn, self.own_call = model, options, loss_fn, own_call
        self.pending = PendingForwards()
        self.accumulation = Accumulation()
        self.situations: dict[State, Situation] = {}
        self.planner = CallPlanner(model, options, loss_fn, self.plain)
        self.latest: Plan | None = None
        self.unplanned = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.unplanned:
            return self.plain(*args, **kwargs)
        check_device((args, kwargs), self.model)
        self.planner.proposing.check_parameters()
        waiting = self.pending.waiting()
        self._check_waiting(waiting)
        self.accumulation.allowed = not waiting
        others = sum(forward.held_bytes for forward in waiting)
        try:
            with self.planner.types():
                state = self._state()
                self.planner.screen((args, kwargs), replace(state, other_forwards=others))
                return self._run((args, kwargs), state, others)
        except CaptureError:
            if "plain" not in self.options.allow:
                raise
            self.unplanned = True
            return self.plain(*args, **kwargs)

    def _run(self, call: Call, state: State, others: int) -> Any:
        generators = generator_states(self.planner.device())
        try:
            return self._situation(state).run(call, others)
        except TooTight:
            return self._run(call, replace(state, other_forwards=others), others)
        except SizeOutgrown:
            # A forward writes to buffers only at its end, so that the generators are all there is to undo.
            set_generators(generators, self.planner.device())
            self.situations.clear()
            self.planner.known.clear()
            return self._run(call, state, others)

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """The call of the plain model."""
        run: Any = self.own_call or self.model._call_impl
        return loss_call(run, self.loss_fn, self.planner.proposing.floats)(*args, **kwargs)

    def to_capture(self) -> Callable[..., Any]:
        """A training call for Dynamo."""
        return training_call(self.model, self.loss_fn, self.planner.proposing.floats)

    def plan_ahead(self, call: Call, *, gradients_held: bool = False, advise: bool = True) -> Plan:
        """Plan a call ahead of its first run, on fakes; `gradients_held`: as one that adds to gradients; `advise`: have
        a refusal say what else would help.

        Raises `BudgetError`, `CaptureError`.
        """
        state = replace(self._state(), gradients_held=gradients_held)
        self.latest = self.planner.plan_ahead(call, state, advise=advise)
        return self.latest

    def _state(self) -> State:
        parameters = list(self.model.parameters())
        proposing = self.planner.proposing
        stepped = proposing.stepping is not None
        hooked = [parameter for parameter in parameters if is_hooked(parameter, stepped=stepped)]
        if stepped or OPTIMIZER_IN_BACKWARD in proposing.allowed:
            hooked += sharing_memory(self.model)
        return State(
            gradients_held=any(parameter.grad is not None for parameter in parameters),
            hooked=frozenset(map(id, hooked)),
        )

    def _situation(self, state: State) -> Situation:
        if state not in self.situations:
            self.situations[state] = Situation(self, state)
        return self.situations[state]

    def _check_waiting(self, waiting: Sequence[PendingForward]) -> None:
        """Forwards in waiting were not planned for the gradients that this call's backward will leave."""
        gradients = distinct_bytes(parameter for parameter in self.model.parameters() if parameter.requires_grad)
        for forward in waiting:
            planned = forward.plan
            if planned.ceiling_bytes + gradients > planned.budget_bytes:
                reason = "a second forward before the first one's backward"
                raise BudgetError(planned.budget_bytes, forward.roomy_bytes(), reason, least=False)

    def begin(self, plan: Plan, state: State) -> PendingForward:
        """A forward begins that runs as planned."""
        self.latest = plan
        held = plan.held_bytes + plan.account.between_regions
        forward = PendingForward(
            plan, weakref.ref(self.model), state.hooked, self.pending, self.accumulation, held_bytes=held
        )
        self.pending.add(forward)
        return forward
