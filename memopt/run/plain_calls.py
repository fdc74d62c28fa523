"""Training calls that need no plan, because the step of the plain model fits the budget."""

from __future__ import annotations

import os
import warnings
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakSet

import torch

from memopt.account.account import Account
from memopt.account.plain_count import PlainStep
from memopt.capture.caller_modes import CallerModes
from memopt.capture.dynamo_graph import DIFFERENTIATED, TAKEN_WITHIN
from memopt.capture.inputs import Call, check_device, check_kinds, on_meta, special_tensors, tensors_in
from memopt.compat.autograd import FREED, Retention, keeps_graph, next_node_number
from memopt.compat.modules import Parts
from memopt.compat.operators import tree_leaves, without_modes
from memopt.compat.saved_tensors import checkpoint_around
from memopt.compat.tensors import special_kind, weak_storages
from memopt.errors import BudgetError, CaptureError, without_frames
from memopt.lru import LruCache
from memopt.planning.call_planner import CallPlanner
from memopt.planning.plan import Plan
from memopt.planning.terms import Situation
from memopt.run.call_in_progress import CallInProgress
from memopt.run.checkpoints import Checkpoints
from memopt.run.entry import WORTHWHILE, Entry
from memopt.run.ledger import SEVERAL, Ledger, Moment
from memopt.run.pending import CREATED, RETAINED, WORTH_NAMING, beside_gradients, to_follow
from memopt.run.plain_counter import (
    CountedStep,
    Kind,
    PlainCounter,
    Sizes,
    bytes_beside,
    callers_code_bytes,
    graph_key,
    grown,
    kind_of_inputs,
    sizes_of,
)
from memopt.run.plain_forward import WAITS, LongerPath, PlainForward, ends_beyond
from memopt.run.road import Road
from memopt.run.safety_net import tighter
from memopt.run.second_run import PlainSecondRun
from memopt.run.seen import Alone
from memopt.run.sizes import covers
from memopt.saved_values import extreme_draws
from memopt.units import size

_FAR = 16
"""Forwards are taken to run less than this many times as many operators as were counted."""
STEEPER = 2
"""Operators beyond those that were counted are taken to hold this many times as much as the counted ones on average."""
_MOST_KINDS = 16
"""The number of kinds of calls that are counted; calls of further kinds are planned."""
_MOST_SEEN = 3
"""The number of kinds of earlier calls that should also fit a budget which a refusal names."""


RUNS_PLAIN = (
    "the calls of this model run as the plain model does, since its step fits the budget; this plan was made only to "
    "be shown: calls would run by it if the plain step did not fit"
)

NOT_SHOWN = (
    "the calls of this model run as the plain model does, since its step fits the budget, and the plan by which they "
    "would run otherwise cannot be shown"
)


class PlainCalls(PlainCounter):
    """Decides which training calls run as the plain model does, without a plan, and runs those.

    They run in eager mode even where the user has compiled the model: compiled code may hold other bytes than are
    counted here."""

    def __init__(self, planner: CallPlanner, entry: Entry, checkpoints: Checkpoints | None = None) -> None:
        super().__init__(planner, entry, checkpoints)
        self.allowed = os.environ.get("MEMOPT_PLAN") != "always"
        """False where all calls are to be planned."""
        self.planned_ahead = False
        """Whether a call was planned in advance: the user then wants plans, and only calls of smaller sizes without a
        plan may run plain."""
        self.latest: Call | CaptureError | None = None
        """The latest call that was counted and fits, without its values; or the reason why it cannot be captured."""
        self._latest_sizes: Sizes = ()
        self._whatever_else = False
        """Whether calls run plain even where plans do more than save memory."""
        self._ran_bytes = 0
        """The most bytes that the step of the latest plain call holds, without resident ones."""
        self._kinds: dict[tuple[Hashable, ...], Kind] = {}
        self._seen: LruCache[Hashable, Call] = LruCache(_MOST_SEEN)
        """The latest calls that were counted, by the kind of their inputs, without their values."""
        self._beside_budget = FREED
        """How backwards keep their graphs in steps that run on although they exceed the budget."""
        self._shown: tuple[Call, Plan] | None = None
        self._checkpoints: WeakSet[Any] = WeakSet()
        """The caller's own checkpoints (`torch.utils.checkpoint`) in which calls ran."""

    @contextmanager
    def only_way(self, *, plain: bool) -> Iterator[None]:
        """A context in which no call can be planned, so that every call that fits runs `plain`, even where the user
        wants planned calls for other reasons than memory; or in which all calls are planned, so that plans can be
        checked."""
        before = self.allowed, self._whatever_else
        self.allowed = self._whatever_else = plain
        try:
            yield
        finally:
            self.allowed, self._whatever_else = before

    def step_if_it_fits(
        self, now: CallInProgress, *, plans_serve_all: bool = False, lacks_smaller: bool = False
    ) -> CountedStep | None:
        """The step of a call, with its counted bytes (`CountedStep`), if the call may run plain; None for a call that
        has to be planned. `plans_serve_all`: a captured graph serves calls of all sizes; `lacks_smaller`: no captured
        graph serves this call, though it is smaller than a planned one."""
        call, situation, moment = now.call, now.situation, now.moment
        if not (self._may_be_first or (self.allowed and lacks_smaller)) or not self._nothing_else_wanted:
            return None
        kind, sizes = self._kind(now)
        if kind is None:
            return None
        for number, (most, fitting) in enumerate(kind.fitting):
            if covers(most, sizes):
                if not fitting.fits(moment) and (closer := self._more_closely(fitting, situation)) is not None:
                    kind.fitting[number], fitting = (most, closer), closer
                if not self._may_run(fitting, moment):
                    return None
                if sizes != self._latest_sizes:
                    self._note_latest(call, sizes)
                return fitting
        too_large = any(covers(sizes, least) for least in kind.too_large)  # smaller ones do not fit
        if too_large and kind.beside and self._has_more_room(kind, now):
            kind.too_large.clear()
            kind.beside, too_large = 0, False
        if too_large or (self.checkpoints is None and kind.a_plan_will_do(sizes, plans_serve_all=plans_serve_all)):
            return None
        counted = self._count(kind, now, sizes)
        if counted is not None and not counted.fits(moment):
            counted = self._more_closely(counted, situation) or counted
            kind.fitting[-1] = kind.fitting[-1][0], counted
        return counted if counted is not None and self._may_run(counted, moment) else None

    def fitting_by_its_values(self, now: CallInProgress) -> CountedStep | None:
        """The step of a call whose code branches on values, counted on these values, if it fits the budget. Since
        another batch may hold more, the count serves no other call, and has no margin for one."""
        if not (self._may_be_first and self._nothing_else_wanted):
            return None
        beside = partial(bytes_beside, now.moment)
        step = self.count_step(now.call, now.situation, self.entry.budget_bytes, closely=True, beside=beside)
        if step is None or not step.on_values:
            return None
        fitting = self.fitting_step(replace(step, depends_on_values=False), now.call, now.situation)
        return fitting if fitting is not None and fitting.fits(now.moment) else None

    def _may_run(self, fitting: CountedStep, moment: Moment) -> bool:
        if fitting.fits(moment):
            return True
        if goes_on := self.goes_on(fitting):
            budget, held = self.entry.budget_bytes, fitting.step.held_bytes
            needed = budget - fitting.room_bytes + moment.known_elsewhere(fitting.account)
            needed = max(budget, needed + moment.reserved_bytes(held)) + max(0, held - (moment.spare_bytes or held))
            self.entry.warn_beyond(BudgetError(budget, needed, CREATED, least=False))
        return goes_on

    def needed_bytes(self, now: CallInProgress, most_bytes: int, *, other_values: bool = True) -> int | None:
        """The smallest budget in bytes with which `step_if_it_fits` lets a call run plain, and later calls like it too,
        even if gradients exist when they begin; None where that is above `most_bytes` or is not known. Without
        `other_values`, there is no margin for calls with other values."""
        call, situation, moment = now.call, now.situation, now.moment
        if self.entry.gradients_stay is not False:
            situation = replace(situation, gradients_held=True)
        count = partial(self.count_step, call, situation, most_bytes, closely=True)
        step = count() if self._may_be_first else None
        for highest in (False, True) if step is not None and step.draws else ():  # later calls may run more
            with extreme_draws(highest=highest):
                step = max(filter(None, (step, count())), key=lambda one: one.peak_bytes)
        if step is None:
            return None
        step = step if other_values else replace(step, depends_on_values=False)
        needed, account = self.needed_by_step(step, call, situation)
        needed += moment.reserved_bytes(step.held_bytes) + moment.elsewhere_beside(account)
        # A count on values runs while the caller still has the outputs of the step before.
        least = step.output_bytes if step.on_values else 0
        needed += max(least, callers_code_bytes(step, self.entry, step.output_bytes))
        return needed if needed <= most_bytes and moment.may_hold(step.held_bytes) else None

    def beyond(self, now: CallInProgress) -> CountedStep | None:
        """The counted step of a call that does not fit, so that the call can run beyond the budget; a warning says so.
        None, without a warning, where the step cannot be counted or needs far more than the budget."""
        budget = self.entry.budget_bytes
        step = self.count_step(now.call, now.situation, WORTH_NAMING * budget, closely=True)
        if step is None:
            return None
        needed, account = self.needed_by_step(step, now.call, now.situation)
        self.entry.warn_beyond(BudgetError(budget, needed + now.moment.known_elsewhere(account), "it", least=False))
        return CountedStep(step, budget - needed, account, None)

    def explain(self, refused: BudgetError | CaptureError, now: CallInProgress) -> BudgetError | CaptureError:
        """The error to raise in place of `refused`, by which a call cannot be captured or exceeds the budget: a
        `BudgetError` that names a budget in which the call runs plain. `refused` itself where no such budget is known,
        or where it is above the one that `refused` names."""
        budget = self.entry.budget_bytes
        most = refused.smallest_bytes if isinstance(refused, BudgetError) else WORTH_NAMING * budget
        least = self.needed_bytes(now, most) if self._nothing_else_wanted else None
        if least is None:
            return refused
        least += self.entry.notable_bytes  # a few numbers more may be elsewhere, or in another batch of sparse tensors
        if isinstance(refused, BudgetError):
            least = min(least, refused.smallest_bytes)
            return BudgetError(budget, least, "the plain step", least=False, further=refused.notes, ways=refused.ways)
        return BudgetError(budget, least, "the plain step", least=False, further=(str(refused),))

    def alone(self, now: CallInProgress, most_bytes: int) -> Alone | None:
        """The bytes of a call that runs plain while no other forward waits; None where it needs more than `most_bytes`,
        or where all calls are to be planned."""
        if not (self._may_be_first and self._nothing_else_wanted):
            return None
        step = self.count_step(now.call, now.situation, most_bytes, closely=True)
        if step is None:
            return None
        needed, account = self.needed_by_step(step, now.call, now.situation)
        needed += now.moment.elsewhere_beside(account)
        return Alone(needed, step.held_bytes, step.peak_bytes) if needed <= most_bytes else None

    def runs_from(
        self, call: Call, situation: Situation, elsewhere_bytes: int, most_bytes: int, *, graph: Retention = FREED
    ) -> int | None:
        """The smallest budget in bytes with which a call runs plain while tensors that are no part of its step take
        `elsewhere_bytes` of it; None where that is above `most_bytes`, or where all calls are to be planned. `graph`
        says how backwards of such calls were seen to keep their graphs."""
        self.note_graph(graph_key(call), graph)
        if not (self._may_be_first and self._nothing_else_wanted):
            return None
        if self.graph_of(call).derived and self.entry.gradients_stay is not False:
            # No plan computes it, so that later calls must fit too, whose gradients may exist from the beginning.
            situation = replace(situation, gradients_held=True)
        step = self.count_step(call, situation, most_bytes, closely=True)
        if step is None:
            return None
        callers_code = callers_code_bytes(step, self.entry, step.output_bytes)
        needed = self.needed_by_step(step, call, situation)[0] + callers_code + elsewhere_bytes
        return needed if needed <= most_bytes else None

    def seen_beside(self, call: Call) -> list[Call]:
        """The latest calls whose plain step was counted, as "meta" tensors: one for each kind of inputs other than that
        of `call`."""
        own = kind_of_inputs(call)[0]
        return [other for inputs, other in self._seen.items() if inputs != own]

    def allocation_failed(self) -> None:
        """From now on plan calls that hold about as much as the latest plain call, in which an allocation failed."""
        self._most_bytes = tighter(self._ran_bytes)

    def forget(self) -> None:
        """Drop the counts of all calls, so that they are counted again."""
        self._kinds.clear()

    def run(self, now: CallInProgress, fitting: CountedStep) -> Any:
        """Run the plain model, return what it returns, and register that its forward waits for its backward. `fitting`
        is the step of the call as it was counted.

        If the forward runs so many more operators that its step may not fit, calls like it are counted again later.
        Where that is allowed (`CallInProgress.may_end`), such a forward is ended by `LongerPath`; else the first one
        causes a warning."""
        call, step = now.call, fitting.step
        if around := checkpoint_around():
            self._checkpoints.add(around[0])
        self._ran_bytes = step.peak_bytes
        moment = replace(now.moment, inputs=())
        check_graph = partial(self._check_graph, fitting, now.situation, moment, graph_key(call))
        # Later steps leave room for as many forwards as were seen before a backward; of several, there may be more.
        others = self.entry.groups.others_expected
        several = others >= SEVERAL and not fitting.fits(now.moment, others * step.held_bytes)
        foreseen = self.entry.trained and not several
        again = None if foreseen or self.checkpoints else PlainSecondRun.of(self.model, self.plain, call)
        first, most = next_node_number(), self._most_nodes(fitting, now.moment)
        varies = self.entry.paths_vary or step.depends_on_values or step.draws or self.settings.have_schedule
        may_end = now.may_end and varies and not around and most < _FAR * step.nodes
        try:
            with ends_beyond(self.model, call, most) if may_end else nullcontext():
                result = self.plain(*call[0], **call[1])
        except LongerPath:
            self._forget(now)
            self.entry.paths.add(next_node_number() - first)
            raise
        if (made := next_node_number() - first) > most:
            self._went_further(now, step, made)
        if again is not None:
            again.returned(result)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]
        if outputs:
            forward = PlainForward(
                check_graph,
                partial(self._check_appeared, fitting, now.situation, moment),
                again,
                entry=self.entry,
                held_bytes=step.held_bytes,
                given=tuple(weak_storages(tensors_in(call))),
                room_bytes=fitting.room_bytes,
                account=fitting.account,
                peak_bytes=step.peak_bytes,
                outputs=tuple(weak_storages(outputs)),
            )
            if not any(map(special_kind, tensors_in(call))):  # such a tensor cannot be on "meta"
                with without_modes():  # the caller's modes see the step alone
                    forward.runs_plain_from = partial(self.runs_from, on_meta(call), now.situation)
            self.entry.add_plain(forward)
            Ledger.of(self.entry).begins(forward)
            waiting = [forward]  # a model that keeps an output keeps its node, which must not keep the model

            def begins(*_: object) -> None:
                for one in waiting:
                    one.end()
                if not keeps_graph():
                    waiting.clear()

            nodes: set[Any] = {output.grad_fn for output in outputs}
            for node in nodes:
                node.metadata[WAITS] = waiting  # it lives as long as a backward may begin at any output
                node.register_prehook(begins)
        return result

    def _most_nodes(self, fitting: CountedStep, moment: Moment) -> float:
        """The number of autograd nodes up to which a forward's step fits, if those beyond the counted ones hold up to
        `STEEPER` times as much each."""
        step = fitting.step
        beside = moment.known_elsewhere(fitting.account) + moment.reserved_bytes(step.held_bytes)
        room = fitting.room_bytes - beside + self.margin(depends_on_values=step.depends_on_values) * step.peak_bytes
        return step.nodes * (1 + max(0.0, room / max(1, step.peak_bytes) - 1) / STEEPER)

    def _forget(self, now: CallInProgress) -> None:
        """Drop the counts that cover the sizes of a call."""
        kind, sizes = self._kind(now)
        if kind is not None:
            kind.fitting = [(most, fitting) for most, fitting in kind.fitting if not covers(most, sizes)]

    def _went_further(self, now: CallInProgress, step: PlainStep, made: int) -> None:
        """Count such calls again after a forward that has run too many operators, and warn of it once."""
        self._forget(now)
        known = self.entry.paths_vary
        self.entry.paths |= {step.nodes, made}
        if not known:
            budget, name = size(self.entry.budget_bytes), type(self.model).__name__
            warnings.warn(
                f"a forward of {name} ran {made} differentiable operators, but the bytes of its step were counted for "
                f"{step.nodes}, so that the step may exceed the budget of {budget}; later steps are counted before "
                "they run",
                stacklevel=2,
            )

    def runs_again(self) -> bool:
        """Whether this call is made in a backward, by the second run of a checkpoint of the caller
        (`torch.utils.checkpoint`) whose first run called the plain model. It then runs plain too, since the checkpoint
        needs the same saved tensors; the counted step includes them."""
        around = checkpoint_around()
        return around is not None and around[1] and around[0] in self._checkpoints

    def _check_graph(
        self,
        fitting: CountedStep,
        situation: Situation,
        moment: Moment,
        key: Hashable,
        forward: PlainForward,
        graph: Retention,
        last: bool,
    ) -> None:
        """Raise `BudgetError` where a backward of a plain call exceeds the budget: one that keeps its graph, one that
        gives gradients a graph, or the `last` one after such backwards. Calls with the same `graph_key` are counted so
        from now on. In a model that has stepped before, none is refused: a warning is given once, and later calls are
        not counted so where it was for derivatives of gradients."""
        step, budget, counted = fitting.step, self.entry.budget_bytes, fitting.step
        if self._beside_budget.covers(graph):
            return
        margin = self.margin(depends_on_values=step.depends_on_values)

        def needs(peak_bytes: int) -> int:
            return budget - fitting.room_bytes + int(margin * (peak_bytes - step.peak_bytes))

        if not step.graph.covers(graph):
            before = self.graphs.get(key, FREED)
            self.note_graph(key, graph)
            held = step.held_bytes * (1 + graph.kept + sum(graph.derived))
            most = step.peak_bytes + held - step.held_bytes
            counted = replace(step, peak_bytes=most, before_last_bytes=most, derived_bytes=held)
            if fitting.call is not None:
                counted = self.count_step(fitting.call, situation, WORTH_NAMING * budget, closely=True) or counted
            beside = moment.reserved_bytes(step.held_bytes)
            beside += (elsewhere_bytes := moment.known_elsewhere(fitting.account))
            needed = needs(counted.peak_bytes) + beside
            if needs(counted.before_last_bytes if graph.derived and not last else counted.peak_bytes) + beside > budget:
                if not graph.derived:
                    self.entry.refuse(BudgetError(budget, needed, RETAINED, least=False))
                    return  # later calls are counted with the kept graph
                if fitting.call is not None and not self.entry.stepped:
                    if len(graph.derived) == 1 < graph.derived[0] and not graph.parameters:
                        self.note_graph(key, graph.further(2))  # as an equation has
                    most = WORTH_NAMING * budget
                    needed = max(needed, self.runs_from(fitting.call, situation, elsewhere_bytes, most) or 0)
                others = [one for one in self.entry.all_waiting() if one is not forward]
                needed += sum(one.saved_bytes() - one.held_bytes for one in others)  # within more room
                further = (f"{DIFFERENTIATED}; {TAKEN_WITHIN}",)
                self.entry.refuse(BudgetError(budget, needed, CREATED, least=False, further=further))
                self.graphs[key], self._beside_budget = before, graph
        if graph.derived:  # of several forwards in one backward, later ones have ended when it reaches its peak
            forward.held_bytes = forward.peak_bytes = counted.derived_bytes
            forward.room_bytes = budget - needs(counted.derived_bytes)

    def _check_appeared(
        self, fitting: CountedStep, situation: Situation, before: Moment, forward: PlainForward, backwards: int
    ) -> None:
        """Count what has appeared elsewhere since a plain forward when a further backward through it begins, as
        gradients of `torch.autograd.grad` that the caller keeps: later forwards leave room for it. Raises `BudgetError`
        where the budget has none, in a model that has not stepped; later it warns."""
        if self.entry.fixed_bytes is not None:
            return
        earlier = before.known_elsewhere(fitting.account)
        given = frozenset([one.address for one in forward.given])
        moment = replace(before, kind=(before.kind, backwards), appears=False, later_bytes=0, closely=True)
        moment = replace(moment, addresses=lambda: before.addresses() | given)
        elsewhere_bytes = moment.elsewhere_beside(fitting.account)
        self.entry.seen_until_backward, appeared = backwards, elsewhere_bytes - earlier
        if appeared <= self.entry.tolerance_bytes:
            return
        further = to_follow(self.entry, appeared, backwards)
        self.entry.later_bytes = max(self.entry.later_bytes, appeared + beside_gradients(self.entry))
        if elsewhere_bytes + further <= fitting.room_bytes:
            return
        budget = self.entry.budget_bytes
        needed: int | None = budget - fitting.room_bytes + elsewhere_bytes + further
        if fitting.call is not None:
            needed = self.runs_from(fitting.call, situation, elsewhere_bytes + further, WORTH_NAMING * budget)
        if needed is None or needed - self.entry.notable_bytes <= budget:
            return
        reason = (
            f"{size(appeared)} of tensors that appeared between several backwards through one forward, such as "
            "gradients that the caller keeps"
        )
        self.entry.refuse(BudgetError(budget, needed, reason, least=False))

    def shown(self, road: Road, situation: Situation) -> Plan:
        """The plan by which the latest call would run if its plain step did not fit the budget, to be shown to the
        user. It is planned by `road` for this situation when first needed, and cached until the next call.

        Raises `BudgetError` where no plan fits, and `CaptureError` where the call cannot be captured."""
        assert self.latest is not None
        if self._shown is None or self._shown[0] is not self.latest:
            try:
                if isinstance(self.latest, CaptureError):
                    raise self.latest
                captured = self.planner.capture_on_fakes(self.latest, None)
            except CaptureError as error:
                raise CaptureError(f"{NOT_SHOWN}: {error}") from error
            try:
                plain = partial(self.as_row, self.latest, situation)
                plan = road.plan(captured, self.latest, situation, plain, advise=False)
            except BudgetError as refused:
                raise refused.adding(NOT_SHOWN) from None
            self._shown = self.latest, replace(plan, notes=(*plan.notes, RUNS_PLAIN))
        return self._shown[1]

    def _kind(self, now: CallInProgress) -> tuple[Kind | None, Sizes]:
        """The counts of calls with such inputs in this situation, and the sizes of this call. None in place of the
        counts where an input may hold tensors that a count does not see, and where there are too many kinds already.

        Raises `ValueError` where an input is on another device than the model.
        """
        situation, parts = now.situation, now.parts
        inputs, tensors = kind_of_inputs(now.call)
        sizes = sizes_of(tensors)
        if inputs is None:
            return None, sizes
        parameters = tuple([(one.requires_grad, one.dtype, one.numel()) for one in parts.parameters])
        state = situation.gradients_held, situation.buckets, CallerModes.now(), self.settings.number(parts.modules)
        key = inputs, parameters, state, self.graph_of(now.call), parts.parameters[0].device
        if key not in self._kinds:
            check_device(now.call, self.model)
            if len(self._kinds) >= _MOST_KINDS:
                return None, sizes
            self._kinds[key] = Kind()
        return self._kinds[key], sizes

    def _more_closely(self, fitting: CountedStep, situation: Situation) -> CountedStep | None:
        """The step counted again with the workspaces of its kernels measured, for a step that does not fit by its first
        count. None where the first count has no upper bounds of workspaces, or its call is not known, and where the
        step exceeds the budget."""
        if not fitting.step.is_bound or fitting.call is None:
            return None
        step = self.count_step(fitting.call, situation, self.entry.budget_bytes, closely=True)
        return None if step is None else self.fitting_step(step, fitting.call, situation)

    def _has_more_room(self, kind: Kind, now: CallInProgress) -> bool:
        """Whether so many fewer bytes are outside of the step now than when calls were too large that counting this
        call again is worth the time."""
        freed = kind.beside - bytes_beside(now.moment, self.account(now.call, now.situation))
        return freed >= self.entry.budget_bytes // WORTHWHILE

    def _count(self, kind: Kind, now: CallInProgress, sizes: Sizes) -> CountedStep | None:
        call, situation, moment = now.call, now.situation, now.moment
        special = bool(special_tensors(call, Parts.of(self.model)))
        if not special:
            self._seen[kind_of_inputs(call)[0]] = on_meta(call)
        seen = [0]

        def beside(account: Account) -> int:
            seen.append(bytes_beside(moment, account))
            return seen[-1]

        derived = bool(self.graph_of(call).derived)
        given: Any = {"closely": moment.others_train or derived, "beside": beside}
        most = self.entry.budget_bytes * (WORTH_NAMING if derived and self.entry.stepped else 1)
        for batch in (call,) if special else (*grown(call, kind), call):
            step = self.count_step(batch, situation, most, **given)
            if step is not None and (step.depends_on_values or step.draws):
                self.entry.paths.add(step.nodes)
            if step is not None and (fitting := self.fitting_step(step, batch, situation)) is not None:
                kind.fitting.append((sizes_of(tensors_in(batch)), fitting))
                self._note_latest(call, sizes)
                return fitting
        kind.too_large.append(sizes)
        kind.beside = max(kind.beside, *seen)
        return None

    def _note_latest(self, call: Call, sizes: Sizes) -> None:
        self._latest_sizes = sizes
        try:
            check_kinds(call, Parts.of(self.model))
        except CaptureError as special:
            self.latest = without_frames(special)
        else:
            self.latest = on_meta(call)

    @property
    def _may_be_first(self) -> bool:
        """Whether calls of all sizes may run plain."""
        return self.allowed and (self._whatever_else or not self.planned_ahead)

    @property
    def _nothing_else_wanted(self) -> bool:
        """Whether a plan would only save memory: the options ask for no passes, compiler, calibration, other device,
        optimizer levers or named precision ("auto" only chooses one for calls that are planned). Also True where no
        call can be planned (`only_way`)."""
        if self._whatever_else:
            return True
        terms, choice = self.planner.terms, self.planner.optimizer_choice
        options = terms.options
        named = options.precision != "auto" and terms.rewriting
        others = options.passes or options.calibrate or options.hardware or terms.fuses
        return not (named or others or choice.chosen or choice.allowed)
