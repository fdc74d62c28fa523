"""Planned forwards whose backward has not run yet, and the check that the backward fits the budget when it runs."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from memopt.account.account import distinct_bytes
from memopt.capture.caller_modes import autocast_is_on
from memopt.compat.autograd import (
    FREED,
    KEPT,
    Fate,
    current_backward,
    fate_at,
    fate_of_gradient,
    graph_until,
    keeps_graph,
    nodes_since,
    pass_over,
    python_nodes,
    runs_node,
    when_backward_ends,
)
from memopt.compat.fsdp import NOTHING_GATHERED, Gathered
from memopt.compat.modules import modules_of, parameters_in
from memopt.compat.operators import tree_leaves
from memopt.compat.saved_tensors import (
    changed_since_saved,
    free_saved_tensors,
    hooks_of_the_user,
    note_packed,
    saved_by,
)
from memopt.compat.tensors import WeakStorage, bytes_by_address, bytes_still_there, weak_storages
from memopt.emit.gradients import Accumulation, is_hooked
from memopt.errors import GIB, BudgetError, UnplannedGradientError, round_up
from memopt.planning.derived import lasting_bytes, retained_peak, tangent_bytes
from memopt.planning.schedule_parts import held_after_forward
from memopt.run.entry import Entry, WaitingPlanned
from memopt.run.ledger import Ledger, Moment
from memopt.run.safety_net import GradientsBefore
from memopt.run.second_run import SecondRun, held_with_second_run
from memopt.run.until_backward import LARGE_LOSS_OUTSIDE, LOSS_OUTSIDE, UntilBackward, staying
from memopt.solver import Schedule
from memopt.training_state import CallState
from memopt.units import size


@dataclass(eq=False)
class PendingForward(WaitingPlanned):
    """A planned forward whose backward has not run yet. Until then, forwards and gradients may appear that the plan
    does not include; `before_backward` checks for them."""

    hooked: frozenset[int]
    """The `id`s of the parameters whose gradients the plan assumes to go to hooks."""
    accumulation: Accumulation
    moment_of: Callable[[PendingForward, Sequence[object]], Moment]
    """Returns the `Moment` of its backward, given the gradients with which that begins."""
    nodes: list[weakref.ref[Any]] = field(default_factory=list)
    """The autograd nodes of its regions, which hold what they saved."""
    first_node: int | None = None
    """A number below those of all its autograd nodes, if code between regions may have made some; else None."""
    backward_begins: Callable[[], None] = lambda: None
    """Called when the first backward begins."""
    copies: tuple[WeakStorage, ...] = ()
    """The storages of copies of its inputs, which no plan counts."""
    free_others: Callable[[], int] = lambda: 0
    """Makes waiting forwards of other models free what they saved, and compute it again in their backward; returns the
    bytes freed."""
    before: CallState | None = None
    """The model's random states and buffers before the call."""
    gradients_before: GradientsBefore | None = None
    """The model's gradients before its backward."""
    gathered: Gathered = NOTHING_GATHERED
    """The parameters of its model that are gathered before use."""
    whole_gradients: int = 0
    """The bytes of unsharded gradients of these parameters that this rank held when it began; its plan counts them."""
    second_run: SecondRun | None = None
    """The means to compute its saved values a second time; None where that is not possible."""
    _lent: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    """The values that free memory when the backward begins, by their method `release`."""
    _held: list[object] = field(default_factory=list)
    """The values that are held until an optimizer has stepped."""
    backwards: int = 0
    """The number of backwards through this forward that have begun."""
    packed: bool = False
    """Whether the caller's hooks (`torch.autograd.graph.saved_tensors_hooks`) have its saved tensors."""
    _backward: int = -1
    _beside_plan: int = -1
    """The number of the backward that is not checked against the plan; -1 for none."""
    _extra_bytes: int = 0

    def until_backward(self, value: Any, nbytes: int) -> None:
        """Make `value` free `nbytes`, by its method `release`, when the backward begins, if the plan counts these bytes
        as freed then. If not, on a GPU, keep `value` alive until an optimizer has stepped: the plan assumes so, and
        freeing it earlier would change where the allocator puts later blocks."""
        step = self.plan.captured
        assert step is not None
        if step.regions[0].released:
            self._lent.add(value)
            self.held_bytes += nbytes
        elif self.account.caching:
            self._held.append(value)

    def note_outputs(self, outputs: Sequence[Any]) -> Sequence[Any]:
        """Record the outputs of a region of this forward, and return them."""
        self.outputs.extend(weak_storages(outputs))
        nodes = {value.grad_fn for value in outputs if isinstance(value, torch.Tensor) and value.grad_fn is not None}
        for node in [node for found in nodes for node in python_nodes(found)]:
            self.nodes.append(weakref.ref(node))
            if note_packed(node):
                self.second_run, self.packed = None, True
                self._warn_of_hooks()
                continue
            node.register_prehook(partial(_check_unchanged, self.nodes[-1], weakref.ref(self.entry.model)))
        return outputs

    def _warn_of_hooks(self) -> None:
        """Warn once of hooks that get what the plan saves, and may change it."""
        if hooks_of_the_user() and not self.entry.warned_of_hooks:
            self.entry.warned_of_hooks = True
            warnings.warn(
                f"hooks of torch.autograd.graph.saved_tensors_hooks get the tensors that the plan of "
                f"{type(self.entry.model).__name__} saves, not those of the plain model: what they allocate is beside "
                "the budget, and where they change values (to a lower precision) gradients differ from the plain "
                "loop's; call the model outside of them",
                stacklevel=2,
            )

    def note_made_between(self, result: Any) -> int:
        """Record the tensors that eager code between the regions of this forward made: those that it saved for its
        backward, and those in `result`, which the call returns. The plan's account has a row for them. Returns their
        bytes, without outputs of regions."""
        state = (*self.entry.model.parameters(), *self.entry.model.buffers())
        own = {one.address for one in (*weak_storages(state), *self.given)}
        of_regions = own | {one.address for one in self.outputs}
        returned = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        nodes, _ = graph_until(returned, lambda node: False)
        regions = {reference() for reference in self.nodes}
        made = [*returned, *(tensor for node in nodes if node not in regions for tensor in saved_by(node))]
        saved = (tensor for node in nodes if node in regions for tensor in saved_by(node))
        self.outputs.extend(one for one in weak_storages((*made, *saved)) if one.address not in own)
        here = bytes_by_address(made, self.entry.device)
        return sum(nbytes for address, nbytes in here.items() if address not in of_regions)

    def held(self) -> list[torch.Tensor]:
        if self.again_bytes and self.second_run is not None:  # reading a freed value would run the forward
            return self.second_run.tensors
        nodes = [node for reference in self.nodes if (node := reference()) is not None]
        if self.first_node is not None:
            nodes = nodes_since(nodes, self.first_node)
        return [tensor for node in nodes for tensor in saved_by(node)]

    def hidden_bytes(self) -> int:
        return max(0, self.held_bytes - sum(one.nbytes for one in self.outputs)) if self.packed else 0

    def free_saved(self) -> int:
        nodes = [node for reference in self.nodes if (node := reference()) is not None]
        if self.second_run is None or self.again_bytes or self.done or len(nodes) != 1:
            return 0
        freed = self.second_run.free(nodes[0], self.entry.device, {one.address for one in self.outputs})
        if freed:
            self.held_bytes, self.again_bytes = held_with_second_run(self.held_bytes - freed, self.outputs)
            self.copies = ()  # the second run reads the inputs themselves
        return freed

    def before_backward(self, leaves: Sequence[torch.Tensor], gradients: Sequence[object] = ()) -> None:
        """Called when the backward of a region begins. `leaves` are the tensors to whose `.grad` it adds, `gradients`
        the gradients of the region's outputs. Raises `BudgetError` where the backward would exceed the budget, given
        the memory in use now; once the model has stepped, warns of it instead."""
        for value in self._lent:
            value.release()
        if not self.judged or self._beside_plan == current_backward():
            return
        ledger = Ledger.of(self.entry)
        if begins := self._backward != current_backward():
            parameters = parameters_in(modules_of(self.entry.model))
            self._backward, self._extra_bytes = current_backward(), self._held_unplanned(parameters) + self.again_bytes
            if self.outputs:
                kept = sum(bytes_still_there(self.outputs).values())
                self.entry.outputs_in_backward = max(self.entry.outputs_in_backward or 0, kept)
                self._extra_bytes -= max(0, self.entry.returned_bytes(self.plan) - kept)
            self.backward_begins()
            UntilBackward.backward_begins(self.entry, alone=not self.overlaps)
            ledger.backward_begins(self)
            self._check_autocast()
            self.gradients_before = GradientsBefore(parameters)
        if self.account.gradients_held or any(region.steps for region in self.plan.regions):
            self._extra_bytes += distinct_bytes(leaf for leaf in leaves if self._needs_unplanned_memory(leaf))
        others = [forward for forward in self.entry.waiting() if forward is not self]
        waiting = sum([forward.held_bytes for forward in others]) + self.entry.plain_held_bytes
        peak = self.plan.ceiling_bytes
        if self.account.meanwhile:
            peak = self.entry.peak_above_lasting(self.plan) + lasting_bytes(self.account, beside=True)
        if keeps_graph():
            self.entry.graph |= KEPT
            assert self.plan.schedule is not None
            peak = retained_peak(self.plan, self.plan.schedule)
        needed = peak - self.account.other_forwards + waiting + self._extra_bytes
        above = needed - self.account.tolerance - self.plan.budget_bytes  # the forward may have used half of it
        if above > 0 and above > self._free_of_planned(elsewhere_bytes := self._elsewhere_now(gradients)):
            reason = RETAINED if keeps_graph() else "the other forwards and gradients held"
            roomy = self.roomy_bytes(needed, retained=keeps_graph())
            if not waiting and not ledger.others_training(self.entry):
                # It runs plain with that much room; plain steps are counted with a margin of their own.
                roomy = self.runs_plain_from(elsewhere_bytes, roomy + roomy // _MARGIN_OF_COUNTS) or roomy
            self.entry.refuse(BudgetError(self.plan.budget_bytes, roomy, reason, least=False))
        if not begins:  # gradients for further regions exist now, which the plan counts
            return
        self.backwards += 1
        unseen = self.backwards > self.entry.seen_until_backward
        if not unseen and ledger.fits_as_before(self.entry, self.plan, needed):
            return
        moment = self.moment_of(self, gradients)
        if self.backwards > 1:  # other things are allocated than when the first one begins
            moment = replace(moment, kind=(moment.kind, self.backwards))
        if unseen and self.account.tolerance:
            self._see_what_appeared(replace(moment, closely=True))
        room = self.plan.budget_bytes - needed + self.account.elsewhere
        room += self.account.tolerance
        if not moment.leaves(room, self.account):
            closely = replace(moment, closely=True)
            elsewhere_bytes = closely.elsewhere_beside(self.account)
            if elsewhere_bytes > room + self._state_to_come(elsewhere_bytes):
                self._refuse_elsewhere(elsewhere_bytes, room)
                return  # it goes on beyond the budget
        ledger.note_fits(self.entry, self.plan, needed)

    def _see_what_appeared(self, moment: Moment) -> None:
        """Record, in the first backward and in each further one through the same forward, the bytes that have appeared
        elsewhere since the forward, without forwards of other models: the next forward is planned with these. Before
        a further backward they are mostly gradients that the caller keeps (`torch.autograd.grad`)."""
        ledger, known = Ledger.of(self.entry), moment.addresses()
        appeared = moment.elsewhere_beside(self.account) - self.account.elsewhere
        appeared -= sum(other.held_bytes for other in ledger.begun_since(self))
        appeared -= sum(one.nbytes for one in self.copies if one.address not in known)  # later forwards make none
        if self.backwards > 1 and not self.account.gradients_held:
            appeared += beside_gradients(self.entry)
        if appeared > self.entry.tolerance_bytes:
            self.entry.later_bytes = max(self.entry.later_bytes, appeared)
            if not ledger.others_training(self.entry):  # their bytes change from call to call
                self.entry.reached_bytes = self.entry.found.other
        self.entry.seen_until_backward = self.backwards

    def _elsewhere_now(self, gradients: Sequence[object]) -> int:
        """The bytes elsewhere, as a search of the device finds them."""
        return replace(self.moment_of(self, gradients), closely=True).elsewhere_beside(self.account)

    def _free_of_planned(self, elsewhere_bytes: int) -> int:
        """The planned bytes that are free if `elsewhere_bytes` are elsewhere: those that the plan left for tensors
        elsewhere beyond these, and those of `_state_to_come`, except where the graph is kept: later steps keep it
        beside that state, and would be refused in the middle of a training."""
        state_to_come = 0 if keeps_graph() else self._state_to_come(elsewhere_bytes)
        return max(0, self.account.elsewhere - elsewhere_bytes) + state_to_come

    def _state_to_come(self, elsewhere_bytes: int) -> int:
        """The bytes that a backward may use in place of optimizer state that does not exist yet: tensors that appear
        before the first backward are planned for only from the second step on. 0 before a further backward through the
        same forward: later steps hold what appeared before it beside that state."""
        if self.backwards > 1:
            return 0
        outputs = sum(one.nbytes for one in self.outputs)
        copied = sum(one.nbytes for one in self.copies)
        return max(0, self.entry.state_to_come(self.plan, outputs, elsewhere_bytes) - copied)

    def _refuse_elsewhere(self, elsewhere_bytes: int, room_bytes: int) -> None:
        appeared = elsewhere_bytes - self.account.elsewhere
        elsewhere_bytes += to_follow(self.entry, appeared, self.backwards)
        self.entry.later_bytes = max(self.entry.later_bytes, appeared)
        self.entry.reached_bytes = None
        # At a budget with room for these and nothing recomputed, the first step fits, too.
        lacking = self.plan.budget_bytes + elsewhere_bytes - room_bytes
        plain = self._plain_peak(retained=keeps_graph()) - self.account.elsewhere + elsewhere_bytes
        ledger = Ledger.of(self.entry)
        guessed = (LARGE_LOSS_OUTSIDE - LOSS_OUTSIDE) * tangent_bytes(self.plan)
        foreseen = self.entry.later_bytes <= staying(guessed)  # the first plan then leaves room for it
        works = lacking if foreseen or ledger.others_training(self.entry) else max(lacking, plain)
        if works > lacking:
            most = works + works // _MARGIN_OF_COUNTS
            works = max(lacking, self.runs_plain_from(elsewhere_bytes, most) or works)
        largest = "; the largest: ".join(("elsewhere", *self.entry.found.largest[:1]))
        reason = (
            f"{size(elsewhere_bytes)} of tensors outside of this step ({largest}), of which "
            f"{size(self.entry.later_bytes)} appeared between the forward and its backward"
        )
        further = (
            "the next forward is planned with room for them; to plan the first one so, give optimize "
            f"elsewhere_gb={round_up(elsewhere_bytes / GIB)}"
        )
        given = self.plan.budget_bytes, works, reason
        self.entry.refuse(ledger.for_whole_step(self.entry, BudgetError(*given, least=False, further=(further,))))

    def replayed(self) -> None:
        """Record that a second forward has run outside of the plan during the running backward, which from now on is
        not checked against the plan. If that backward does not go through the regions of this forward, what they saved
        is freed, as autograd does for a plain model."""
        self._beside_plan = current_backward()
        nodes = [node for reference in self.nodes if (node := reference()) is not None]
        if not keeps_graph() and all(fate_at(node) is Fate.DROPPED for node in nodes):
            for node in nodes:
                free_saved_tensors(node)
            self.after_backward()

    def check_differentiated(self, refused: UnplannedGradientError) -> None:
        """Called when a backward begins whose gradients are to be differentiated in turn (`create_graph=True`), which
        no plan computes: the forward has to run again as the plain model does. Before the model's first step, raises a
        `BudgetError` with the text of `refused` if that does not fit the budget, and `refused` itself if no budget is
        known in which it fits. Later it raises nothing, as an error would end the training."""
        self.entry.differentiated = True
        if self.entry.stepped:
            return
        budget, elsewhere_bytes = self.plan.budget_bytes, self._elsewhere_now(())
        asked = [
            one
            for one in self.entry.model.parameters()
            if one.requires_grad and fate_of_gradient(one) is not Fate.DROPPED
        ]
        graph = FREED.further(1, frozenset(map(id, asked)))
        plain = self.runs_plain_from(elsewhere_bytes, WORTH_NAMING * budget, graph=graph)
        if plain is None:
            raise refused
        roomy = plain + sum(forward.saved_bytes() for forward in self.entry.all_waiting() if forward is not self)
        ledger = Ledger.of(self.entry)
        others_train = ledger.others_training(self.entry)
        # Where others train, it may be planned with that much room, too, and is then there beside its second run.
        beside = self.held_bytes if roomy <= budget or others_train else 0
        if roomy + beside > budget and roomy + beside - self.free_others() > budget:
            works = ledger.with_margin(roomy + self.saved_bytes()) if others_train else roomy + beside
            raise BudgetError(budget, works, CREATED, least=False, further=(str(refused),))

    def replaced(self) -> None:
        """Record that a second forward has run whose autograd graph is kept and replaces that of this forward: the
        running backward skips the regions of this forward. Forwards that wait now are no longer checked against their
        plans, which do not count the kept graph."""
        running = current_backward() >= 0
        for node in [node for reference in self.nodes if running and (node := reference()) is not None]:
            if runs_node(node):
                pass_over(node)
        for one in [one for entry in Ledger.of(self.entry).entries for one in entry.waiting()]:
            one.judged = False

    def is_in_backward(self) -> bool:
        return self._backward == current_backward()

    def after_backward(self) -> None:
        """Mark the forward as done: it holds no saved values any more, though its autograd graph may still exist."""
        self.done = True
        if current_backward() >= 0:
            self.entry.ending.append(self)
            when_backward_ends(self.entry.ending.clear)
        hold_over(self._held)
        self._held = []

    def undo(self) -> bool:
        gradients = self.gradients_before is None or self.gradients_before.undo()
        return (self.before is not None and self.before.undo()) and gradients

    def roomy_bytes(self, needed: int, *, retained: bool = False) -> int:
        """A budget in bytes, at least `needed`, with which the step fits with nothing recomputed: beside the other
        forwards that wait (one like this, if none does), and with gradients both held from before and newly computed.
        With `retained`, the step is one that keeps its graph (`retain_graph=True`), and no further forward is
        assumed."""
        account, peak = self.account, self._plain_peak(retained=retained)
        others = [forward for forward in self.entry.waiting() if forward is not self]
        waiting = sum(forward.saved_bytes() for forward in others) + self.entry.plain_held_bytes
        waiting = waiting if waiting or retained else self.saved_bytes()
        gradients = account.gradients if account.gradients_held else 2 * account.gradients
        if any(region.steps for region in self.plan.regions):
            gradients = self.entry.trainable_bytes
        return max(needed, peak - account.other_forwards + waiting + gradients)

    def _plain_peak(self, *, retained: bool) -> int:
        """The peak of the step in bytes with nothing recomputed; `retained`: of one that keeps its graph."""
        assert self.plan.joined is not None
        save_all = Schedule.save_all(self.plan.joined.problem)
        return retained_peak(self.plan, save_all) if retained else self.plan.plain.peak_bytes

    def saved_bytes(self) -> int:
        assert self.plan.joined is not None
        problem = self.plan.joined.problem
        return held_after_forward(problem, Schedule.save_all(problem))

    def _held_unplanned(self, parameters: Sequence[nn.Parameter]) -> int:
        """The bytes of gradients of the model's parameters that exist now and that the plan does not count."""
        appeared = max(0, self.gathered.gradient_bytes - self.whole_gradients)
        if self.account.gradients_held:
            return appeared
        if self.gathered:
            parameters = [one for one in parameters if one not in self.gathered]
        step = self.plan.captured
        if step is not None and step.passed:  # gradients by code after the regions, in this backward
            in_regions = {one for region in step.regions for one in region.trace.region.parameter_ids.values()}
            if all(one.grad is None for one in parameters if id(one) in in_regions):
                return appeared
        there = [one.grad for one in parameters if one.grad is not None]
        return appeared + (distinct_bytes(there) if there else 0)

    def _check_autocast(self) -> None:
        """Warn if the backward runs within autocast and plain torch would compute other gradients, because it casts in
        such backwards too."""
        step = self.plan.captured if autocast_is_on() else None
        if step is not None and any(operators.author_typed for operators in step.operators):
            warnings.warn(
                "backward was called within torch.autocast on a model with autocast blocks of its own: plain torch "
                "would compute their gradients in 16 bits, memopt keeps their dtypes; call backward outside of it",
                stacklevel=2,
            )

    def _needs_unplanned_memory(self, leaf: torch.Tensor) -> bool:
        """Whether a leaf's gradient needs memory that the plan does not count: a tensor in addition to its `.grad`,
        where the plan adds to that in place; or until the backward's end, where the plan steps the leaf, and frees its
        gradient, earlier."""
        if any(region.steps for region in self.plan.regions) and id(leaf) not in self.hooked:
            fate = fate_of_gradient(leaf)
            free = leaf.grad is None and self.accumulation.allowed and not is_hooked(leaf, stepped=True)
            return fate is Fate.RETURNED or (fate is Fate.ACCUMULATED and not free)
        if leaf.grad is None and self.account.gradients_held and self.account.buckets:
            return not self.accumulation.allowed  # else it becomes a view of its bucket at once
        if leaf.grad is None or not self.account.gradients_held or id(leaf) in self.hooked:
            return False
        fate = fate_of_gradient(leaf)
        added = fate is Fate.ACCUMULATED and self.accumulation.allowed and not is_hooked(leaf)
        return not added and fate is not Fate.DROPPED


def _check_unchanged(node: weakref.ref[Any], model: weakref.ref[nn.Module], *_: object) -> None:
    """Raise an error where a tensor that the backward of a region reads was changed in place since the forward, as
    autograd does, but say what to do. The plain model may train with such a change: eager mode need not read an input
    in the backward from which a plan recomputes."""
    if changed := changed_since_saved(node()):
        raise RuntimeError(
            f"an input or output of {type(model()).__name__}, {changed}, has been modified by an inplace operation "
            "between the forward and its backward, which computes from it once more: change a copy (x = x / 255, not "
            "x.div_(255)), or change it before the forward"
        )


_MARGIN_OF_COUNTS = 8
"""The count of a plain step exceeds its plan with nothing recomputed by at most the plan's bytes divided by this."""
WORTH_NAMING = 4
"""The largest budget that a refusal names for a step whose graph is kept or differentiated, or that cannot be captured,
as a multiple of the given one."""
CREATED, RETAINED = "the plain step with create_graph=True", "backward(retain_graph=True)"

_held_over: list[object] = []
"""Values of forwards whose backward has run, held until an optimizer has stepped or a forward begins."""


def hold_over(values: Sequence[object]) -> None:
    """Keep values alive until an optimizer has stepped or the next planned forward begins."""
    if values:
        _hook()
        _held_over.extend(values)


def release_all(*_: object) -> None:
    """Free the values that `hold_over` keeps alive."""
    _held_over.clear()


@cache
def _hook() -> object:
    """Make every optimizer call `release_all` after its step; registered once, when values are first held over."""
    return register_optimizer_step_post_hook(release_all)


def to_follow(entry: Entry, appeared: int, backwards: int) -> int:
    """The bytes that are expected to appear outside of the step in further backwards through the same forward and in
    later steps. `appeared`: the bytes that have appeared since the forward. `backwards`: the number of backwards
    through it, with the one that begins now. At the first, 0 is returned. At the second, nothing is expected for a
    third, which may be the last one and free the graph."""
    if backwards < 2:
        return 0
    again = appeared // (backwards - 1) if keeps_graph() and backwards > 2 else 0
    return beside_gradients(entry) + again + entry.notable_bytes


def beside_gradients(entry: Entry) -> int:
    """The bytes of the `.grad`s that the caller makes from the gradients that the running backward returns
    (`torch.autograd.grad`), and which may still exist in the next step; 0 for a backward that adds to `.grad`
    itself."""
    first = next((one for one in entry.model.parameters() if one.requires_grad), None)
    return entry.trainable_bytes if first is not None and fate_of_gradient(first) is Fate.RETURNED else 0
