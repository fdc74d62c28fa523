"""The session of an optimised model: it keeps the model's status (`Status`), which nothing else changes. Training calls
run as planned, all others as before."""

from __future__ import annotations

import gc
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cache, partial
from operator import attrgetter
from traceback import clear_frames
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from memopt.capture.caller_modes import CallerModes
from memopt.capture.dry_run import EagerCodeTooLargeError
from memopt.capture.dynamo import is_capturing
from memopt.capture.dynamo_graph import BUFFERS_WRITTEN_ONCE
from memopt.capture.inputs import Call, batch_call, check_device, check_kinds, on_meta, tensors_in
from memopt.compat.autograd import in_transform
from memopt.compat.ddp import unwrapped
from memopt.compat.dynamo import is_exporting
from memopt.compat.exchanges import Resharding, unsettle_gloo
from memopt.compat.modules import (
    CurrentParts,
    Parts,
    compiled_call,
    inside_compiled,
    reset_compiled_call,
    set_compiled_call,
)
from memopt.compat.operators import modes_of_the_user
from memopt.compat.saved_tensors import checkpoint_around, unseen_by_checkpoints
from memopt.emit.gradients import Accumulation
from memopt.errors import BudgetError, CaptureError, without_frames
from memopt.levers import Lever
from memopt.planning.job_key import terms_of
from memopt.planning.largest import estimated_bytes
from memopt.planning.options import Options
from memopt.planning.plan import Plan
from memopt.planning.terms import Situation
from memopt.progress import rare_collections, stage
from memopt.run.call_in_progress import CallInProgress
from memopt.run.checkpointed_calls import Choice
from memopt.run.hosted import (
    bring_back,
    device_to_move_to,
    move_back,
    move_to,
    on_device,
    place,
    plainly,
    with_inputs_there,
)
from memopt.run.ledger import Moment
from memopt.run.pending import PendingForward
from memopt.run.plain_counter import CountedStep
from memopt.run.plain_forward import LongerPath
from memopt.run.ranks import DataParallel
from memopt.run.safety_net import SafetyNet, StepMemoryError
from memopt.run.sharding import Keeping, Sharded, check_model, check_terms
from memopt.run.share import Share
from memopt.run.status import PlanningLog, State, Status, UnplannedWatch, planned_in_words, shapes_of
from memopt.run.training import TrainingCalls
from memopt.training_state import containers_restored, undone

_IN_TURN = threading.RLock()
"""Held by the thread that plans or runs a training call of any session."""
WITHIN_CHECKPOINT = (
    "the model is called within torch.utils.checkpoint, which calls it again in the backward while its first forward "
    "waits; call the model without torch.utils.checkpoint: the plan recomputes what the budget asks for"
)


class Session:
    """Replaces the call of a module, in the place where `torch.nn.Module.compile` puts its own. It is not part of the
    module's state, so copies and pickles of the model are plain models."""

    def __init__(self, model: nn.Module, options: Options) -> None:
        self.model, self.options = unwrapped(model), options
        with on_device(self.model):
            check_model(model)
        self.own_call = _own_call(self.model)
        self.watch = UnplannedWatch(self.model, self)
        self.parallel = DataParallel(self.model, model if isinstance(model, DistributedDataParallel) else None)
        self.sharded = Sharded(self.model)
        earlier = session_of(self.model)
        self.resharding: Resharding = earlier.resharding if earlier else Resharding(self.model)
        self.accumulation = Accumulation()
        self.share = Share(self.model, options, self.parallel)
        self.status = Status(type(self.model).__name__)
        """The state after the latest call, which `_enter` alone changes."""
        self.forward = self._calls(None)
        self.with_loss = self._calls(options.loss_fn) if options.loss_fn else None
        self.kinds: tuple[TrainingCalls, ...] = (self.forward, self.with_loss) if self.with_loss else (self.forward,)
        """The kinds of training calls: of the model alone, and, if the model was optimised with a loss function, with
        that in the region. `loss` uses the last one."""
        check_terms(self.model, self.forward.planner.terms)
        self.uncompiled: Callable[..., Any] = self.forward
        self._parts, self._log, self._plans_logged = CurrentParts(self.model), PlanningLog(), 0
        self._safety_net = SafetyNet(self.share.entry, self._plan_tighter)
        # An autograd graph that outlives its backward, as of an output that the model keeps, must not keep the model.
        backward_failed = weakref.WeakMethod(self._safety_net.backward_failed)
        self.accumulation.failed = lambda failure: handle(failure) if (handle := backward_failed()) else failure
        self._looked_for_writes = self._warned_in_eval = False
        self._loss_to_come: Callable[[Any], Any] | None = None
        self._shown: tuple[Plan | None, Callable[[], Plan | None]] = None, lambda: None
        """The plan of the latest planned call, and a function that returns that plan as users see it."""

    def _calls(self, loss_fn: Callable[..., Any] | None) -> TrainingCalls:
        given = loss_fn, self.own_call, self.share, self.accumulation, Keeping(self.resharding, self.sharded)
        return TrainingCalls(self.model, self.options, *given, self._train, self._planning)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._loss_to_come is not None:
            loss, self._loss_to_come = self._loss_to_come, None
            return loss(*args)
        if torch.compiler.is_compiling() and (torch.compiler.is_dynamo_compiling() or self._is_compiling_in_turn()):
            return self.uncompiled(*args, **kwargs) if self.trains() else self._plain(self.forward, *args, **kwargs)
        return self._run(self.forward, (args, kwargs))

    def _run(self, calls: TrainingCalls, call: Call) -> Any:
        """Run a call: as a training call where it is one; in eval mode, where that is refused, as the plain model."""
        if self.status.state is State.NEW and (device := device_to_move_to(self.model, self.options, call)):
            move_to(self.model, device)
            moved = Session(self.model, self.options)  # plans depend on the device
            self.leave()
            moved.take_over()
            return moved._run(moved.kinds[self.kinds.index(calls)], call)
        call = with_inputs_there(self.model, call)
        training = self.model.training
        may_train = torch.is_grad_enabled() and (training or _is_differentiated(call))  # others wait for no thread
        with self._in_turn() if may_train else nullcontext():
            if self.trains(call):
                try:
                    return self._train(calls, call)
                except (BudgetError, CaptureError) as refused:
                    if training or not getattr(refused, "undone", True):
                        raise
                    if not self._warned_in_eval:
                        self._warned_in_eval, why = True, str(refused).partition("\n")[0]
                        text = f"calls of {type(self.model).__name__} in eval() mode run plain: {why}"
                        warnings.warn(text, stacklevel=2)
            return self._plain(calls, *call[0], **call[1])

    def _in_turn(self) -> AbstractContextManager[Any]:
        """A context in which no other thread records, plans or runs a training call, as these set state of the process.
        Without this lock where ranks wait for each other: the ranks may be threads."""
        return _IN_TURN if self._alone else nullcontext()

    def _is_compiling_in_turn(self) -> bool:
        """Whether something is being compiled or exported once no other thread records or plans: torch knows whether
        anything is, not in which thread."""
        with self._in_turn():
            return torch.compiler.is_compiling()

    def loss(self, batch: Any, model: nn.Module | None = None) -> Any:
        """The loss of a batch, with model and loss function in one planned region. `model` is the
        `DistributedDataParallel` around the planned model, if there is one; the region then runs in its forward."""
        calls = self.with_loss
        assert calls is not None
        (first, *rest), _ = batch_call(batch, calls.loss_fn)
        if not isinstance(model, DistributedDataParallel):
            return self._run(calls, ((first, *rest), {}))
        self._loss_to_come = lambda moved: self._run(calls, ((moved, *rest), {}))
        try:
            return model(first)
        finally:
            self._loss_to_come = None

    def trains(self, call: Call = ((), {})) -> bool:
        """Whether a call made now is a training call: gradients are enabled; the model is in training mode, or an input
        requires a gradient (as for an adversarial example); and the model is not being exported, captured as a part of
        another planned model, or called within a transform of torch.func."""
        if not (torch.is_grad_enabled() and (self.model.training or _is_differentiated(call))):
            return False
        return not (is_exporting() or is_capturing() or in_transform())

    def _plain(self, calls: TrainingCalls, *args: Any, **kwargs: Any) -> Any:
        """Run the plain model, with no FSDP2 blocks kept gathered (`Resharding.restore`). In eval mode, the watch for
        training that bypasses the plan begins."""
        self.resharding.restore()
        if torch.is_grad_enabled() and not self.model.training and not torch.compiler.is_compiling():
            self.watch.begin()
        if torch.compiler.is_compiling():
            return calls.plain(*args, **kwargs)
        if in_transform() and torch.is_grad_enabled() and self.model.training:
            warnings.warn(
                f"{type(self.model).__name__} was called within a transform of torch.func, or with forward-mode "
                "derivatives: such calls run as the plain model does, and no budget holds for them; to have them "
                "planned, give optimize a loss_fn of (model, batch) that takes the derivative itself",
                stacklevel=3,
            )
        with plainly(self.model, compiled=self.own_call is not None):
            return calls.plain(*args, **kwargs)

    def _together(self, calls: TrainingCalls, *, ahead: bool = False) -> AbstractContextManager[None]:
        """A context around a forward, or around its planning (`ahead`), that fails on all ranks if it fails on one."""
        terms = partial(terms_of, self.model, self.options, calls.loss_fn)
        return self.sharded.together(terms) if self.sharded.there else self.parallel.together(terms, ahead=ahead)

    def _train(self, calls: TrainingCalls, call: Call) -> Any:
        """Run a training call: unplanned, plain if its step fits the budget, with activation checkpoints, or by its
        plan, which is made if there is none. If it fails on one rank, it fails on all."""
        with on_device(self.model), _quiet(parts := self._parts.now()):
            self.watch.end()
            self.parallel.look()
            with self._together(calls):
                if self.status.state is State.UNPLANNED or calls.plain_calls.runs_again():
                    result = self._unplanned(calls, call)
                else:
                    now = self._begun(calls, call, parts)
                    if names := modes_of_the_user():
                        bring_back(self.model)
                        result = self._within_modes(calls, now, names)
                    for may_end in () if names else (self._alone, False):
                        with suppress(LongerPath) if may_end else nullcontext():  # it is undone, and counted next
                            result = self._as_it_fits(calls, replace(now, may_end=may_end))
                            break
        self.share.returned(call, result, self.status.plan if self.status.state is State.PLANNED else None)
        return result

    def _begun(self, calls: TrainingCalls, call: Call, parts: Parts) -> CallInProgress:
        """The call that begins now, with its situation and everything else that is on the device. `parts` are those of
        the model now."""
        gradients = frozenset([id(one) for one in parts.parameters if one.grad is not None])
        calls.forget_without_state(gradients, parts.parameter_ids, self.status.plan)
        calls.planner.optimizer_choice.check_parameters()
        self.accumulation.allowed = not self.share.begin() or self.options.one_by_one
        self.accumulation.exchange = self.parallel.exchange
        situation = self.share.situation(calls.planner.optimizer_choice, parts)
        begin = partial(self._begin, calls, time.perf_counter())
        return CallInProgress(call, situation, self.share.moment(call, situation), parts, begin)

    def _as_it_fits(self, calls: TrainingCalls, now: CallInProgress) -> Any:
        """Run a call in the first way that fits: plain; with activation checkpoints, where such calls were found to fit
        so; by a plan; and finally plain with no reserve for what may follow."""
        recorded, moment = calls.recorded, now.moment
        served = recorded.serves_all_sizes(now.call)
        lacks = calls.plain_calls.allowed and not served and recorded.lacks_smaller(now.call)
        fits = calls.plain_calls.step_if_it_fits(now, plans_serve_all=served, lacks_smaller=lacks)
        if fits is not None and fits.step.graph.derived and not fits.fits(moment):
            self.share.free_others()  # it goes on beyond the budget
        tight = fits is not None and not self._has_reserve(fits, moment)
        if fits is not None and not tight:
            try:
                return self._run_plain(calls, now, fits)
            except StepMemoryError as failed:  # if it was undone, it is planned now
                if not failed.undone or self.parallel.wrapper is not None:
                    raise
        check_device(now.call, self.model)
        if calls.checkpointed.serve and (choice := calls.checkpointed.fitting(now)) is not None:
            return self._run_checkpointed(calls, now, choice)
        alone = lacks and self._alone and not moment.waiting and not self.share.others_may_run(moment)
        if alone and recorded.may_run_twice and (plan := self.status.plan) is not None:
            choice = calls.checkpointed.instead_of_planning(now, plan, calls.road.planning_seconds)
            if choice is not None:
                return self._run_checkpointed(calls, now, choice, plan)
        planned = replace(now, situation=replace(now.situation, for_other_models=self.share.for_other_models(moment)))
        try:
            return self._by_plan_or_in_eager_mode(calls, planned)
        except (BudgetError, CaptureError) as refused:
            if fits is None or not tight or not getattr(refused, "undone", True):
                raise
        return self._run_plain(calls, now, fits)

    def _has_reserve(self, fits: CountedStep, moment: Moment) -> bool:
        """Whether a step that fits leaves room for what may run while it waits: steps of models that are not optimised,
        and more forwards than were expected."""
        alone = self.parallel.wrapper is None
        alone = alone and not fits.step.graph.derived  # no plan computes these
        times = int(alone and self.share.others_may_run(moment)) + (moment.beyond_expected if alone else 0)
        return not times or fits.fits(moment, times * fits.step.held_bytes)

    def _run_plain(self, calls: TrainingCalls, now: CallInProgress, fits: CountedStep) -> Any:
        """Run a call whose step fits as the plain model does. Raises `StepMemoryError` where an allocation of its
        forward fails."""
        bring_back(self.model)
        self._enter(State.PLAIN, fits.reason)
        calls.recorded.size_bounds.see(now.call)
        calls.planner.accounts.note_reached(fits.step.reached)
        needed = self.options.budget_bytes - fits.room_bytes
        return self._safety_net.run_plain(partial(calls.plain_calls.run, now, fits), now.moment.inputs, needed)

    def _within_modes(self, calls: TrainingCalls, now: CallInProgress, names: str) -> Any:
        """Run a call within the user's dispatch modes `names` as the plain model does. Raises `BudgetError` and
        `CaptureError`."""
        with self._refusing():
            fits = calls.fitting_within_modes(names, now)
        if fits is None:
            return self._unplanned(calls, now.call)
        self._enter(State.PLAIN, f"within {names}, {fits.reason}")
        calls.planner.accounts.note_reached(fits.step.reached)
        return calls.plain_calls.run(now, fits)

    def _by_plan_or_in_eager_mode(self, calls: TrainingCalls, now: CallInProgress) -> Any:
        """Run a call by its plan. If no plan fits the regions of a broken forward, or the call cannot be captured, it
        runs with activation checkpoints if these fit. A call that cannot be captured otherwise runs unplanned if
        `allow` has "plain". Raises `BudgetError` and `CaptureError`."""

        def half() -> float:
            """Half of the room: where code between regions holds more, little is left for a plan, and the recording may
            need more than there is."""
            return (self.options.budget_bytes - calls.plain_calls.resident_bytes(now.call, now.situation)) / 2

        try:
            return self._by_plan(calls, replace(now, most_between=half))
        except (BudgetError, CaptureError) as error:
            refused: BudgetError | CaptureError = without_frames(error)
        if self.sharded.settled or (isinstance(refused, CaptureError) and not refused.undone):
            raise refused  # all ranks do so; a second run would begin from another state
        if isinstance(refused, CaptureError) and self._alone:
            self._check_plain(calls, now.call)
        broken = calls.recorded.break_reason(now.call)
        if broken is not None or isinstance(refused, CaptureError):
            gc.collect()  # reference cycles of the recording's frames hold tensors
            if (choice := calls.checkpointed.fitting(now)) is not None:
                return self._run_checkpointed(calls, now, choice)
        beyond = self._beyond(calls, now) if calls.checkpointed.serve else None
        if beyond is None and isinstance(refused, EagerCodeTooLargeError):  # its budget is known after a full recording
            try:
                return self._by_plan(calls, now)
            except (BudgetError, CaptureError) as error:
                refused = without_frames(error)
        # Not by a limit of what is elsewhere.
        if (fits := calls.plain_calls.step_if_it_fits(now.closely)) is not None:
            return self._run_plain(calls, now, fits)
        if isinstance(refused, CaptureError) and "plain" in self.options.allow:
            self._run_unplanned_from_now(str(refused))
            return self._unplanned(calls, now.call)
        if (beyond := beyond or self._beyond(calls, now)) is not None:
            plain = beyond[0] is calls.plain_calls
            return self._run_plain(calls, now, beyond[1]) if plain else self._run_checkpointed(calls, now, beyond)
        with self._refusing():
            refused = calls.checkpointed.explain(refused, broken, now)
            raise self._log.refused(calls.plain_calls.explain(refused, now))

    def _beyond(self, calls: TrainingCalls, now: CallInProgress) -> Choice | None:
        return calls.checkpointed.beyond(now) if self._alone else None

    @property
    def _alone(self) -> bool:
        """Whether no other rank takes part in a forward: another rank would wait if this one repeated the forward."""
        return self.parallel.wrapper is None and not self.sharded.there

    def _check_plain(self, calls: TrainingCalls, call: Call) -> None:
        """Run the plain model's forward for a call that cannot be captured, and undo it. If it fails, the call fails as
        in the plain loop, which may expect that error. Later calls are captured again then."""
        for gradients in (False, True):  # without needs less memory, but fails in code that takes derivatives
            try:
                with torch.set_grad_enabled(gradients), undone(self.model), containers_restored(call):
                    calls.plain(*call[0], **call[1])
                return
            except (MemoryError, torch.OutOfMemoryError):
                return
            except Exception as error:
                if gradients:
                    calls.recorded.forget_errors()
                    raise self._as_plain_fails(calls, call, error) from None

    def _as_plain_fails(self, calls: TrainingCalls, call: Call, error: Exception) -> Exception:
        """Run the plain model's forward for a call in which the model's own code has raised `error`, and which was
        undone, and return what it raises: buffers, attributes and random generators are then as a loop that goes on
        after such an error finds them without a plan. `error` where it raises no such error."""
        clear_frames(error.__traceback__)  # they hold the failed forward's tensors
        with torch.no_grad():  # it needs less memory
            try:
                calls.plain(*call[0], **call[1])
            except Exception as plain:
                return plain if type(plain) is type(error) else error
        return error

    def _by_plan(self, calls: TrainingCalls, now: CallInProgress) -> Any:
        """Run a call by its plan; where none fits, once more after waiting forwards have freed the tensors that they
        can compute again. Raises `BudgetError` and `CaptureError`."""
        with self._refusing(), calls.planner.terms.types():
            check_kinds(now.call, now.parts)
            try:
                # Other ranks go on with the call, so that none repeats it.
                inputs, repeat = now.moment.inputs, self._alone
                calls.planner.screen(now.call, replace(now.situation, other_forwards=now.moment.waiting_bytes))
                with unseen_by_checkpoints():
                    fails = partial(self._as_plain_fails, calls, now.call)
                    attempt = partial(calls.recorded.run, now)
                    result = self._safety_net.run(attempt, inputs, repeat=repeat, as_plain_fails=fails)
                if not self._looked_for_writes and checkpoint_around() is not None:
                    self._note_written_once()
                if self.status.plan is not self._shown[0]:
                    self._note_plain_step(calls, now)
                if calls.recorded.ran_unplanned:
                    self._run_unplanned_from_now("its forward takes another control-flow path than when it was planned")
                return result
            except BudgetError as error:
                if self.sharded.settled:
                    raise
                refused = without_frames(error)
            waiting = now.moment.waiting
            if self.share.free_waiting():
                return self._by_plan(calls, replace(now, moment=self.share.moment(now.call, now.situation)))
            if self._alone:  # other ranks may have seen other calls
                refused = calls.for_other_kinds(refused, now.call, now.situation)
            if checkpoint_around():
                refused = refused.adding(WITHIN_CHECKPOINT)
            raise self.share.explain(refused, waiting, partial(calls.plain_calls.alone, now))

    def _note_written_once(self) -> None:
        """Warn if a planned call within the caller's checkpoint writes to buffers: it does so only once a step."""
        plan, self._looked_for_writes = self.status.plan, True
        regions = plan.captured.regions if plan is not None and plan.captured is not None else ()
        if any(joint.statistics or joint.trace.region.written for joint in regions):
            warnings.warn(f"{type(self.model).__name__}: {BUFFERS_WRITTEN_ONCE}", stacklevel=2)

    def _run_checkpointed(
        self, calls: TrainingCalls, now: CallInProgress, choice: Choice, plan: Plan | None = None
    ) -> Any:
        """Run a call with a choice of activation checkpoints that fits. `plan` is that of a larger call, if this call
        could be planned."""
        bring_back(self.model)
        checkpointed, fits = choice
        reason = f"{checkpointed.checkpoints} run a second time in the backward, {fits.reason}"
        if plan is not None:
            reason += "; a plan for these sizes is made once such runs have cost more time than making it takes"
            self._log.checkpointed(self.status.model, now.call, calls.road.planning_seconds)
        self._enter(State.CHECKPOINTED, reason)
        calls.planner.accounts.note_reached(fits.step.reached)
        return calls.checkpointed.run(choice, now, plan)

    def _unplanned(self, calls: TrainingCalls, call: Call) -> Any:
        self.sharded.begin()
        bring_back(self.model)
        return calls.plain(*call[0], **call[1])

    def _begin(
        self, calls: TrainingCalls, started: float, now: CallInProgress, plan: Plan, exchanges: int = 0
    ) -> PendingForward:
        """Register a forward that begins to run by a plan, which thereby becomes the latest plan. `started` is when its
        call began, by `time.perf_counter()`. `exchanges` identifies its collectives (`Emitted.exchanges`), which all
        ranks have to run alike."""
        if (plans := sum([kind.road.plans for kind in self.kinds])) != self._plans_logged:
            self._plans_logged = plans
            self._planned(plan, now.call, time.perf_counter() - started)
        elif plan is not self.status.plan or self.status.state is not State.PLANNED:
            self._enter(State.PLANNED, planned_in_words(plan, shapes_of(now.call)), plan)
        self.sharded.begin(exchanges)
        forward = self.share.planned(now, plan, self.accumulation)
        forward.before, forward.free_others = self._safety_net.before, self.share.free_others
        forward.runs_plain_from = partial(calls.plain_calls.runs_from, on_meta(now.call), now.situation)
        return forward

    def _note_plain_step(self, calls: TrainingCalls, now: CallInProgress) -> None:
        """Make `latest` return the plan of the call that has just run with the plain step in its receipt; called for
        the first call by each plan. With other ranks, `latest` returns the plan unchanged."""
        plan = self.status.plan
        self._shown = plan, lambda: plan
        if plan is not None and self._alone:
            given = plan, on_meta(now.call), now.situation, CallerModes.now()

            @cache
            def shown() -> Plan:
                with on_device(self.model):
                    return calls.beside_plain(*given)

            self._shown = plan, shown

    def _enter(self, state: State, reason: str, plan: Plan | None = None) -> None:
        """Enter a state, with the plan of a call that has one; otherwise the latest plan is kept."""
        self.status = Status(self.status.model, state, reason, plan or self.status.plan)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """A context that sets the state to `REFUSED` if it raises `BudgetError` or `CaptureError`, and back to the
        previous one at any other error."""
        before = self.status
        try:
            yield
        except (BudgetError, CaptureError) as refused:
            self._enter(State.REFUSED, str(refused))
            raise
        except BaseException:
            self.status = before
            raise

    def _planning(self, call: Call) -> None:
        """Enter the state of a call whose planning begins, and log it."""
        if self.status.state is not State.RECORDING:
            self._log.begins(self.status.model, call)
        self._enter(State.RECORDING, "a call is recorded and planned")

    def _planned(self, plan: Plan, call: Call, seconds: float) -> None:
        """Enter the state of a call whose plan was made in `seconds`, and log it."""
        self._enter(State.PLANNED, planned_in_words(plan, shapes_of(call)), plan)
        self._log.planned(plan, call, seconds)

    def _run_unplanned_from_now(self, reason: str) -> None:
        self._enter(State.UNPLANNED, reason)
        warnings.warn(
            f"{type(self.model).__name__} trains without a plan from now on, which 'plain' in allow permits: {reason}",
            stacklevel=2,
        )

    def _plan_tighter(self, unforeseen_bytes: int) -> None:
        """Have all calls planned again, with `unforeseen_bytes` of the budget left free."""
        for calls in self.kinds:
            calls.planner.accounts.leave_free(unforeseen_bytes)
            calls.recorded.forget()
            if self.status.state is State.PLAIN:
                calls.plain_calls.allocation_failed()
            calls.plain_calls.forget()
            calls.checkpointed.forget()

    def backward_failed(self, failure: torch.OutOfMemoryError) -> torch.OutOfMemoryError:
        """The error to raise where an allocation failed in a backward; later calls are planned to hold less. The code
        that runs the backward has to call this, since memopt does not see a failure in the backward of a plain call."""
        return failure if isinstance(failure, StepMemoryError) else self._safety_net.plain_backward_failed(failure)

    def plan(self, example_inputs: Any, *, gradients_held: bool = False, advise: bool = True) -> Plan:
        """Plan a training call on fake tensors before its first run. `gradients_held`: the call adds to existing
        gradients; `advise`: a `BudgetError` names changes that would help. All ranks plan together.

        Raises `BudgetError` where no plan fits, here or on another rank, `CaptureError` where the call cannot be
        captured, and `RankError` where another rank fails in another way."""
        calls, call = self._ahead(example_inputs)
        together = self._together(calls, ahead=True) if self.options.to_train else nullcontext()
        with self._in_turn(), stage("planning"), together, on_device(self.model):
            check_kinds(call, self._parts.now())
            call = calls.largest(call)
            calls.plain_calls.planned_ahead = True
            started, optimizer_choice = time.perf_counter(), calls.planner.optimizer_choice
            buckets = self.parallel.buckets(gradients_held=gradients_held)
            situation = replace(self.share.situation(optimizer_choice), gradients_held=gradients_held, buckets=buckets)
            situation = self.share.moment(call, situation).in_group(situation) or situation
            optimizer_choice.check_allowed()
            modes = CallerModes.now()
            with self._refusing(), calls.planner.terms.types(), torch.enable_grad(), rare_collections():
                try:
                    plan = calls.plan(call, situation, modes, advise=advise)
                except BudgetError as refused:
                    whole = self.share.ledger.for_whole_step(self.share.entry, refused)
                    raise (self._log.refused(whole) if self.options.to_train else refused) from None
                self._planned(plan, call, time.perf_counter() - started)
            return plan

    def estimated_bytes(self, example_inputs: Any) -> int:
        """An estimate of the smallest budget in bytes in which a training call can be planned, made in a fraction of
        the time that planning takes. Raises `CaptureError` where the call cannot be captured."""
        calls, call = self._ahead(example_inputs)
        return estimated_bytes(calls.planner, call)

    def plain_bytes(self, example_inputs: Any) -> int | None:
        """The peak in bytes of a training call's step when the plain model runs it, with its author's activation
        checkpoints: counted from the shapes of all tensors. None where it depends on values."""
        calls, call = self._ahead(example_inputs)
        row = calls.plain_calls.as_row(call, Situation(elsewhere=0))
        return None if row is None else row.peak_bytes

    def _ahead(self, example_inputs: Any) -> tuple[TrainingCalls, Call]:
        """The kind of training calls that example inputs are for, and the call with these inputs."""
        calls = self.kinds[-1]
        call = batch_call(example_inputs, calls.loss_fn)
        with on_device(self.model):
            check_device(call, self.model, meta_allowed=True)
        return calls, call

    @contextmanager
    def from_captures(self, earlier: Session | None) -> Iterator[None]:
        """A context in which calls are planned from the graphs of `earlier`, a session of the same model; `earlier`
        gets the graphs back if the block fails. Does nothing if `earlier` is None; if the options of the two sessions
        differ in more than budget, `elsewhere_gb` and `forwards`, or allow levers on the optimizer; or if other ranks
        train the model too."""
        own = self.options
        room = {name: getattr(own, name) for name in ("budget_bytes", "elsewhere_bytes", "forwards")}
        if (
            earlier is None
            or self.parallel.wrapper
            or earlier.parallel.wrapper
            or self.sharded.there
            or own.optimizer_levers
            or replace(earlier.options, **room) != own
            or earlier.own_call is not self.own_call
        ):
            yield
            return
        self._take_captures(earlier)
        try:
            yield
        except BaseException:
            earlier._take_captures(self)
            raise

    def _take_captures(self, earlier: Session) -> None:
        for calls, others in zip(self.kinds, earlier.kinds, strict=False):
            calls.take_captures(others)

    def take_over(self) -> None:
        """Replace the model's call. Later plans use the levers on the optimizer that the latest plan uses, and no
        others; if there is no plan yet, they use none.

        If the user compiles the model, torch.compile breaks its graph at this call, which then runs as planned."""
        for calls in self.kinds:
            calls.planner.optimizer_choice.decide(self.latest.proposals if self.latest else ())
        if self.status.plan is not None:
            place(self.model, self.status.plan)
        self.share.join()
        reason = "memopt plans and compiles this training call itself, so that nothing needs to be compiled around it"
        disable: Any = torch.compiler.disable
        self.uncompiled = disable(self.forward.__call__, reason=reason)
        set_compiled_call(self.model, self)
        self.watch.begin()

    def give_back(self) -> None:
        """Restore the model's own call, and move the model back to the host if it was built there. Otherwise move
        parameters that a plan has put on the host back to the device."""
        self.leave()
        move_back(self.model)

    def leave(self) -> None:
        """Restore the model's own call; parameters stay where they are."""
        self.share.leave()
        self.watch.end()
        self.resharding.restore()
        unsettle_gloo(self.model)
        if self.own_call is None:
            reset_compiled_call(self.model)
        else:
            set_compiled_call(self.model, self.own_call)

    @property
    def low(self) -> torch.dtype | None:
        """The 16-bit dtype in which planned calls compute; None where they compute in fp32."""
        return self.forward.planner.terms.rewriting.autocast

    @property
    def chosen(self) -> tuple[Lever, ...]:
        """The chosen levers on the optimizer, which all plans assume, in the order in which they wrap it, innermost
        first."""
        chosen = self.forward.planner.optimizer_choice.chosen
        return chosen.levers if chosen else ()

    @property
    def latest(self) -> Plan | None:
        """The plan of the latest call that has one, with the plain step as the first row of its receipt; None before
        any. If the latest call ran plain, the plan by which it would run otherwise, made when this is first read."""
        plan, with_plain_step = self._shown
        if self.status.state is not State.PLAIN:
            return with_plain_step() if plan is not None and plan is self.status.plan else self.status.plan
        before = self.status  # showing a plan changes no state
        calls = next(calls for calls in reversed(self.kinds) if calls.plain_calls.latest is not None)
        try:
            return calls.shown(self.share.situation(calls.planner.optimizer_choice))
        finally:
            self.status = before

    @property
    def none_fits(self) -> bool:
        """Whether the latest call ran with activation checkpoints because no plan of its regions fits."""
        return self.status.state is State.CHECKPOINTED and any(calls.checkpointed.serve for calls in self.kinds)

    @property
    def in_use(self) -> Plan | None:
        """The plan of the latest call that has one; None if the latest call ran plain, and before any plan. Reading
        this makes no plan."""
        return None if self.status.state is State.PLAIN else self.status.plan


def session_of(model: nn.Module | None) -> Session | None:
    """The session of an optimised model, also if it is wrapped by `DistributedDataParallel` or `torch.compile`; None
    for a model that is not optimised."""
    if not isinstance(model, nn.Module):
        return None
    call = compiled_call(unwrapped(model))
    return call if isinstance(call, Session) else session_of(inside_compiled(unwrapped(model)))


def _quiet(parts: Parts) -> AbstractContextManager[Any]:
    """A context without torch's warnings of the `.grad` of tensors that are no leaves, if `torch.func.functional_call`
    has put such tensors in the place of parameters."""
    return nullcontext() if all(map(attrgetter("is_leaf"), parts.parameters)) else _without_leaf_warnings()


@contextmanager
def _without_leaf_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        yield


def _is_differentiated(call: Call) -> bool:
    return any(tensor.requires_grad for tensor in tensors_in(call))


def _own_call(model: nn.Module) -> Callable[..., Any] | None:
    """The model's `compile()`d call, if there is one, also while memopt replaces it."""
    planned = session_of(model)
    return planned.own_call if planned is not None else compiled_call(model)
