"""The training calls of one kind, of a model alone or of a model with its loss function: plans, records and runs them.
The model's status (`Status`) is kept by the session."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from memopt.capture.caller_modes import CallerModes
from memopt.capture.dynamo import plain_loss_call
from memopt.capture.inputs import Call, at_largest, on_meta
from memopt.compat.modules import plain_call
from memopt.compat.operators import without_modes
from memopt.emit.gradients import Accumulation
from memopt.errors import BudgetError, CaptureError
from memopt.planning.call_planner import CallPlanner
from memopt.planning.options import Options
from memopt.planning.plan import Plan, ReceiptRow
from memopt.planning.plan_cache import Kept
from memopt.planning.priced_step import PricedStep
from memopt.planning.stages import Recorded
from memopt.planning.terms import Situation
from memopt.run import kept_plans
from memopt.run.call_in_progress import CallInProgress
from memopt.run.checkpointed_calls import CheckpointedCalls
from memopt.run.plain_calls import PlainCalls
from memopt.run.plain_counter import CountedStep
from memopt.run.recorder import Recorder
from memopt.run.road import Road
from memopt.run.sharding import Keeping
from memopt.run.share import Share
from memopt.solver import SolverError
from memopt.units import size
from passes import PassError


class TrainingCalls:
    """The training calls of one kind of a session: of the model alone, or with the loss function in the region. The
    session runs each of them by `run`; `recording` is called when the planning of a call begins.

    A call is captured by Dynamo once for all situations (whether gradients are held, the bytes of forwards whose
    backward is still to come, which parameters have hooks), and planned and emitted once for each situation."""

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        loss_fn: Callable[..., Any] | None,
        own_call: Callable[..., Any] | None,
        share: Share,
        accumulation: Accumulation,
        keeping: Keeping,
        run: Callable[[TrainingCalls, Call], Any],
        recording: Callable[[Call], None],
    ) -> None:
        self.model, self.options, self.loss_fn, self.own_call, self.share = model, options, loss_fn, own_call, share
        self.planner = CallPlanner(model, options, loss_fn, self.plain, share)
        self.road = Road(self.planner, accumulation, recording)
        self.plain_calls = PlainCalls(self.planner, share.entry)
        self.checkpointed = CheckpointedCalls(self.plain_calls)
        self.recorded = Recorder(self.road, keeping)
        self._run = run
        self._within_modes = False
        """Whether the warning about the user's dispatch modes was given."""
        self._reached: frozenset[int] = frozenset()
        """The `id`s of parameters that had a gradient at any earlier call."""
        self._stepped_elsewhere: frozenset[int] | None = None
        """The `id`s of parameters that the optimizer had stepped before the present call although no call gave them a
        gradient; None before the first call."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self, (args, kwargs))

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """Run the plain model's forward, and its loss function if there is one."""
        own: Any = self.own_call or plain_call(self.model)
        return plain_loss_call(self.model, self.loss_fn, self.planner.optimizer_choice.floats, own)(*args, **kwargs)

    def fitting_within_modes(self, names: str, now: CallInProgress) -> CountedStep | None:
        """The `CountedStep` of a call within the user's dispatch modes `names`. Dynamo captures nothing there, so that
        the call runs plain, with a warning once. Where it exceeds the budget or cannot be counted: None if `allow` has
        "plain", since the call then runs nevertheless; else `BudgetError` or `CaptureError` is raised."""
        within = (
            f"{type(self.model).__name__} is called within a dispatch mode ({names}), in which no graph is recorded"
        )
        plain, least = self.plain_calls, None
        with without_modes(), plain.only_way(plain=True):  # the modes must not see the operators of a count
            fits = plain.step_if_it_fits(now)
            if fits is None:
                least = plain.needed_bytes(now, sys.maxsize)
        if fits is None and "plain" not in self.options.allow:
            if least is None:
                raise CaptureError(
                    f"{within}, and the bytes of its plain step cannot be counted there; call it outside of that mode"
                )
            further = (f"{within}; outside of that mode the step is planned",)
            raise BudgetError(self.options.budget_bytes, least, "the plain step", least=False, further=further)
        if not self._within_modes:
            self._within_modes = True
            warnings.warn(f"{within}: there its steps run as the plain model does", stacklevel=2)
        return fits

    def plan(self, call: Call, situation: Situation, modes: CallerModes, *, advise: bool) -> Plan:
        """The plan of a call before its first run, read from disk or made now; the first run then uses it. `modes` is
        the caller's own autocast; `advise`: a `BudgetError` names changes that would help, and the receipt begins with
        the plain step. Raises `BudgetError` where no plan fits, `CaptureError` where the call cannot be captured."""

        def plain() -> ReceiptRow | None:
            with modes.restored():
                return self.plain_calls.as_row(call, situation) if advise else None

        self.planner.screen(call, situation)
        with self.planner.accounts.one_trial():
            if kept := kept_plans.find_uncaptured(self.planner, call, situation):
                found = self.road.beside_plain(kept.live(self._priced_later(kept, call, situation)), plain)
                return self.road.finished(found, situation)
            captured = self.recorded.capture(call)
            plan = self.road.plan(captured, call, situation, plain, advise=advise)
        self.recorded.planned(captured, call, situation, plan)
        return plan

    def beside_plain(self, plan: Plan, call: Call, situation: Situation, modes: CallerModes) -> Plan:
        """The plan with a receipt that begins with the plain step of the call, within the caller's own autocast
        `modes`; unchanged where that cannot be counted, or where the plan is for other sizes than the call's."""

        def count() -> ReceiptRow | None:
            if self.planner.accounts.account(call, situation).inputs != plan.account.inputs:
                return None
            with modes.restored():
                return self.plain_calls.as_row(call, situation)

        return self.road.beside_plain(plan, count)

    def for_other_kinds(self, refused: BudgetError, call: Call, situation: Situation) -> BudgetError:
        """The `BudgetError` of a call with a budget that also suffices for earlier calls with other kinds of arguments
        (`PlainCalls.seen_beside`). Each of these is planned on fake tensors, and the largest budget is named."""
        most = refused
        for other in self.plain_calls.seen_beside(call):
            try:
                captured = self.planner.capture_on_fakes(other, self.planner.optimizer_choice.narrowed)
                self.road.plan(captured, other, replace(situation, elsewhere=None), advise=False)
            except BudgetError as larger:
                most = max(most, larger, key=attrgetter("smallest_bytes"))
            except (CaptureError, PassError, SolverError):
                continue
        if most is refused:
            return refused
        more = size(most.smallest_bytes - refused.smallest_bytes)
        words = (
            f"this call alone needs {more} less than the budget that works, which also fits earlier calls with other "
            "arguments"
        )
        return refused.adding(words, smallest_bytes=most.smallest_bytes)

    def largest(self, call: Call) -> Call:
        """The call enlarged to the largest sizes that the user declares; `call` itself if it is captured on its own
        tensors and not on fake ones."""
        if not self.options.to_train or self.recorded.needs_fakes(call):
            return at_largest(call, self.recorded.declared(call))
        return call

    def shown(self, situation: Situation) -> Plan:
        """The plan by which the latest plain call would run in this situation if its plain step did not fit the
        budget."""
        with self.planner.terms.types(), torch.enable_grad():
            return self.plain_calls.shown(self.road, situation)

    def _priced_later(self, kept: Kept, call: Call, situation: Situation) -> Callable[[], PricedStep]:
        """A function that at its first call captures, traces and prices the graphs of a plan from disk."""
        hollow, planner = on_meta(call), self.planner

        @cache
        def step() -> PricedStep:
            narrowed = planner.optimizer_choice.narrowed_by(kept.plan)
            with planner.terms.types(), torch.enable_grad():
                recorded = Recorded(planner, planner.capture_on_fakes(hollow, narrowed), hollow, situation)
                traced = recorded.trace(planner.terms.lever_sets[kept.lever_set])
                return traced.price_for(kept.plan, kept.plan.account).step

        return step

    def take_captures(self, earlier: TrainingCalls) -> None:
        """Plan from the graphs that `earlier`, of an earlier session (`Session.from_captures`), has captured. If
        `earlier` is called again, it captures anew."""
        self.planner.share_graphs(earlier.planner)
        self.recorded.take(earlier.recorded)

    def forget_without_state(self, gradients: frozenset[int], parameters: frozenset[int], latest: Plan | None) -> None:
        """Drop the plans, except `latest`, if parameters have a gradient for the first time, from a call or from code
        outside of the forward: the optimizer then makes state for them, which the plans do not count. `parameters` has
        the `id`s of the model's parameters, `gradients` those of parameters that have a gradient now."""
        accounts = self.planner.accounts
        accounts.note_reached(gradients)
        reached, elsewhere = accounts.reached, accounts.stepped_elsewhere & parameters
        known = elsewhere if self._stepped_elsewhere is None else self._stepped_elsewhere
        if (self._reached and reached != self._reached) or not elsewhere <= known:
            self.recorded.forget_plans(but=latest)
            self.plain_calls.forget()
            self.checkpointed.forget()
        self._reached, self._stepped_elsewhere = reached, known | elsewhere
