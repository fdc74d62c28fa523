"""A step of the plain model with its counted bytes, how these are counted for a budget, and for which calls one count
serves: calls of one kind, which differ in sizes only."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch

from memopt.account.account import Account
from memopt.account.eager_bytes import ValueIsRead
from memopt.account.plain_count import PlainStep, count_on_values, count_plain_step
from memopt.capture.data_sizes import is_real
from memopt.capture.dynamo import plain_loss_call
from memopt.capture.inputs import Call, at_largest, on_meta, special_tensors, tensors_in
from memopt.compat.autograd import FREED, Retention
from memopt.compat.modules import Parts, plain_call
from memopt.compat.operators import tree_flatten
from memopt.compat.tensors import is_sharded, sizes_within, special_kind
from memopt.device.devices import device_of, kernels_of
from memopt.device.time_model import call_seconds
from memopt.planning.call_planner import CallPlanner
from memopt.planning.plan import PLAIN_STEP, ReceiptRow
from memopt.planning.terms import Situation
from memopt.run.checkpoints import Checkpoints
from memopt.run.entry import Entry
from memopt.run.ledger import Moment
from memopt.run.settings import Settings
from memopt.run.until_backward import LARGE_LOSS_OUTSIDE
from memopt.units import size

MARGIN = 1.02
"""The factor for what the count of a plain step may miss; on a GPU, whose allocator leaves gaps, `CUDA_MARGIN`."""
CUDA_MARGIN = 1.1
VALUES_MARGIN = 1.5
"""As `MARGIN`, for code that branches on values: the next batch may run another branch."""
CHECKPOINTS_MARGIN = 1.25
"""As `VALUES_MARGIN`, where modules run as activation checkpoints: they hold mostly their inputs."""
GROWTHS = (2.0, 1.25)
"""Sizes above all counted ones are counted at one of these multiples, so that growing lengths are not counted one by
one: the first with which the step is likely to fit."""
_MOST_COUNTS = 12
"""The number of sizes that are counted of one kind of call; beyond it, sizes that no count covers are planned."""
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)
_LEAVES = (torch.Tensor, *_PLAIN)
Sizes: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class CountedStep:
    """A step that runs without a plan, with its counted bytes: it fits the budget, or exceeds it and runs plain
    nevertheless (`PlainCounter.goes_on`)."""

    step: PlainStep
    room_bytes: int
    """The bytes of the budget that it leaves free."""
    account: Account
    """The bytes of the step other than activations."""
    call: Call | None
    """The call that was counted, without its values; None where its count depends on them."""

    @property
    def reason(self) -> str:
        """Why the call runs plain, as a clause that begins with "since"."""
        if self.room_bytes < 0:
            return (
                "since a refusal would end the training, though its step needs "
                f"{size(-self.room_bytes)} beyond the budget"
            )
        return f"since its step fits the budget with {size(self.room_bytes)} to spare"

    def fits(self, moment: Moment, further: int = 0) -> bool:
        """Whether the step fits the budget together with waiting forwards, everything else on the device, and `further`
        bytes."""
        held = 0 if self.step.graph.derived else self.step.held_bytes  # other forwards hold no graphs of gradients
        kept = moment.kept_outputs
        if moment.appears and not moment.entry.latest_outputs:  # the first step: the next one is to run so, too
            kept = self.step.output_bytes
        room = self.room_bytes - further - callers_code_bytes(self.step, moment.entry, kept)
        fits = moment.leaves(room - moment.reserved_bytes(held), self.account)
        return fits and moment.may_hold(held)


def callers_code_bytes(step: PlainStep, entry: Entry, kept_outputs: int) -> int:
    """The bytes by which the caller's own code raises the peak of a step above that of the model's forward and backward
    alone: by a loss outside of the model, as seen or as guessed; or by the outputs of the step before, of
    `kept_outputs` bytes, which stay alive during the forward."""
    seen = entry.until_backward(step.tangent_bytes)
    callers_code = LARGE_LOSS_OUTSIDE * step.tangent_bytes if seen is None else seen
    until_backward = step.held_bytes + step.tangent_bytes + callers_code
    return max(0, until_backward - step.peak_bytes, step.forward_bytes + kept_outputs - step.peak_bytes)


def bytes_beside(moment: Moment, account: Account) -> int:
    """The bytes on the device now outside of the step of a call with this account: elsewhere, in forwards that wait,
    and in outputs that the caller still holds."""
    return moment.elsewhere_beside(account) + moment.waiting_bytes + moment.kept_outputs


def graph_key(call: Call) -> Hashable:
    """A key of a call, equal for calls whose tensors have the same dtypes, numbers of dimensions and `requires_grad`:
    the backwards of all such calls are assumed to keep their autograd graphs in the same way (`Retention`)."""
    return tuple([(tensor.dtype, tensor.dim(), tensor.requires_grad) for tensor in tensors_in(call)])


class PlainCounter:
    """Counts the steps of a model's calls as the plain model runs them, with its loss function and with activation
    checkpoints if any were chosen. The base of `PlainCalls`, which decides by the counts."""

    def __init__(self, planner: CallPlanner, entry: Entry, checkpoints: Checkpoints | None = None) -> None:
        self.model, self.planner, self.entry, self.checkpoints = entry.model, planner, entry, checkpoints
        self._forward: Any = plain_loss_call(self.model, planner.loss_fn, call=plain_call(self.model))
        self._most_bytes: float = math.inf
        """Steps that hold more than this, without resident bytes, are planned: an allocation failed in such a step."""
        self.settings = Settings(self.model)
        self.graphs: dict[Hashable, Retention] = {}
        """How backwards keep the graphs of calls, by `graph_key`, beyond how they keep those of all calls."""

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """Run the plain model's forward and its loss function, with activation checkpoints if any were chosen."""
        with self.checkpoints.active() if self.checkpoints else nullcontext():
            return self._forward(*args, **kwargs)

    def goes_on(self, fitting: CountedStep) -> bool:
        """Whether a call runs plain even where it exceeds the budget: if gradients of such calls are differentiated,
        which no plan computes, and the model has stepped, so that an error would interrupt a training."""
        return bool(fitting.step.graph.derived) and self.entry.stepped

    def note_graph(self, key: Hashable, graph: Retention) -> None:
        """Record how backwards were seen to keep graphs: `graph.kept` is assumed for all calls from now on,
        `graph.derived` only for calls whose `graph_key` is `key`."""
        self.entry.graph |= Retention(graph.kept)
        if graph.derived:
            self.graphs[key] = self.graphs.get(key, FREED) | graph

    def graph_of(self, call: Call) -> Retention:
        return self.entry.graph | self.graphs.get(graph_key(call), FREED)

    def count_step(
        self,
        call: Call,
        situation: Situation,
        budget_bytes: int,
        *,
        closely: bool = False,
        beside: Callable[[Account], int] = lambda account: 0,
    ) -> PlainStep | None:
        """The step of a call with its counted bytes; None where it cannot be counted, or where the count stops early as
        the step clearly exceeds the budget. It is counted without values. Where the code branches on values, and where
        checkpoints are to be checked, it is run on values, which is not possible while other ranks wait for gradients.

        Args:
            closely: measure kernels whose workspace would be the step's peak, which takes longer.
            beside: returns the bytes on the device outside of the step with a given account; a run on values has to fit
                beside these.
        """
        if not all(is_real(parameter) and not is_sharded(parameter) for parameter in self.model.parameters()):
            return None  # without values, or gathered by hooks, with the other ranks, which do not count
        held, depends, reached = situation.gradients_held, None, None
        given, graph = (self.model, self.plain, call, self.planner.terms.card), self.graph_of(call)
        most = (budget_bytes - self.resident_bytes(call, situation)) / self.margin(depends_on_values=False)
        with self.settings.naming(), self.checkpoints.counted() if self.checkpoints else nullcontext():
            try:
                if special_tensors(call, Parts.of(self.model)):
                    raise ValueIsRead  # how much a sparse result holds depends on values
                step = count_plain_step(*given, gradients_held=held, most_bytes=most, graph=graph, closely=closely)
                if self.checkpoints is None:
                    return step
                if step is not None:
                    if self.needed_by_step(step, call, situation)[0] > budget_bytes:
                        return step
                    depends, reached = step.depends_on_values, step.reached
            except ValueIsRead:
                pass
            if situation.buckets is not None or not all(map(is_real, tensors_in(call))):
                return None
            account = self.account(call, situation, reached)
            room = budget_bytes - account.resident_bytes - beside(account)
            room = int(room / self.margin(depends_on_values=bool(depends)))
            with self.checkpoints.checked() if self.checkpoints else nullcontext():
                counted = count_on_values(*given, room, graph=graph, checkpoints=self.checkpoints is not None)
            return counted if counted is None or depends is None else replace(counted, depends_on_values=depends)

    def fitting_step(self, step: PlainStep, call: Call, situation: Situation) -> CountedStep | None:
        """The step with the bytes of the budget that it leaves free. None where it exceeds the budget and does not run
        plain nevertheless (`goes_on`), or where it holds about as much as a call in which an allocation failed."""
        needed, account = self.needed_by_step(step, call, situation)
        if step.peak_bytes > self._most_bytes:
            return None
        fitting = CountedStep(
            step, self.entry.budget_bytes - needed, account, None if step.on_values else on_meta(call)
        )
        return fitting if fitting.room_bytes >= 0 or self.goes_on(fitting) else None

    def as_row(self, call: Call, situation: Situation) -> ReceiptRow | None:
        """The row of the plain step for a receipt: its peak in bytes and its seconds, counted from the shapes of a
        call; None where it cannot be counted."""
        terms = self.planner.terms
        if terms.sharding is not None:
            return None
        with suppress(ValueIsRead):
            count = partial(count_plain_step, self.model, self.plain, call, terms.card)
            held = situation.gradients_held
            with kernels_of(terms.absent_card):
                step = count(gradients_held=held)
                with suppress(ValueIsRead):
                    step = (step and step.is_bound and count(gradients_held=held, closely=True)) or step
            if step is not None:
                peak = self.needed_by_step(step, call, situation, margin=1.0)[0]
                seconds = sum(times * call_seconds(one, terms.card) for one, times in step.calls.items())
                return ReceiptRow(PLAIN_STEP, peak, seconds)
        return None

    def needed_by_step(
        self, step: PlainStep, call: Call, situation: Situation, *, margin: float | None = None
    ) -> tuple[int, Account]:
        """The bytes that a step needs by its count, with nothing elsewhere, and its account. The counted peak is
        multiplied by `margin` for what the count may miss; None for the usual margin."""
        account = self.account(call, situation, step.reached)
        account = replace(account, gradients=account.gradients + step.sparse_bytes)
        if situation.buckets is not None and situation.buckets.clone_outputs:
            account = replace(account, output_clones=step.output_bytes)
        margin = self.margin(depends_on_values=step.depends_on_values) if margin is None else margin
        peak = account.resident_bytes + int(margin * step.peak_bytes)
        return max(peak, account.optimizer_step_bytes(step.output_bytes)), account

    def resident_bytes(self, call: Call, situation: Situation) -> int:
        """The bytes that are resident in any step of a call, without optimizer state, since it is not known yet which
        parameters have some."""
        return replace(self.account(call, situation), optimizer_state=0).resident_bytes

    def account(self, call: Call, situation: Situation, reached: frozenset[int] | None = None) -> Account:
        """The account of a call with nothing elsewhere on the device; `reached`: the `id`s of the parameters that get
        gradients, where that is known."""
        account = self.planner.accounts.account(call, replace(situation, elsewhere=0), reached=reached)
        return replace(account, tolerance=0)

    def margin(self, *, depends_on_values: bool) -> float:
        if depends_on_values:
            return VALUES_MARGIN if self.checkpoints is None else CHECKPOINTS_MARGIN
        return CUDA_MARGIN if device_of(self.planner.terms.card).caching else MARGIN


@dataclass
class Kind:
    """The counted bytes of the plain steps of one kind of call: calls that differ in their sizes only."""

    fitting: list[tuple[Sizes, CountedStep]] = field(default_factory=list)
    too_large: list[Sizes] = field(default_factory=list)
    beside: int = 0
    """The most bytes outside of the step while such a call was run on values to be counted; 0 where none was."""

    def a_plan_will_do(self, sizes: Sizes, *, plans_serve_all: bool) -> bool:
        """Whether a call of these sizes is planned at once, instead of counting the bytes of its plain step first; no
        earlier count covers the sizes. It is if the steps of enough sizes have been counted. It also is if the plain
        step of a call like it exceeded the budget, and `plans_serve_all`: a captured graph serves calls of all sizes,
        so that planning takes less time than counting."""
        enough = len(self.fitting) + len(self.too_large) >= _MOST_COUNTS
        return enough or (plans_serve_all and any(_constants(sizes) == _constants(large) for large in self.too_large))

    def growth(self, sizes: Sizes) -> float:
        """The margin by which `sizes`, some of them above those of the latest count, are multiplied before they are
        counted. It is the first of `GROWTHS` with which the step fits the budget if its bytes grow with the square of
        the sizes; if none, the last one."""
        most, latest = self.fitting[-1]
        ratio = max(size / max(1, limit) for size, limit in zip(sizes, most, strict=True))
        for growth in GROWTHS[:-1]:
            if latest.step.held_bytes * ((growth * ratio) ** 2 - 1) <= latest.room_bytes:
                return growth
        return GROWTHS[-1]


def _constants(sizes: Sizes) -> Sizes:
    """The sizes that stay constants in a captured graph (0 and 1), with -1 in place of the others."""
    return tuple([size if size < 2 else -1 for size in sizes])


def kind_of_inputs(call: Call) -> tuple[Hashable, list[torch.Tensor]]:
    """A key of a call's arguments without the sizes of tensors, and the tensors among them. The key is None where an
    argument is an object, which may hold tensors that a count does not see."""
    leaves, structure = _leaves(call)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    others = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
    if not all(isinstance(leaf, _PLAIN) for leaf in others):
        return None, tensors
    kinds = [(one.dtype, one.device, one.dim(), one.requires_grad, special_kind(one)) for one in tensors]
    return (structure, repr(others), tuple(kinds)), tensors


def _leaves(call: Call) -> tuple[Sequence[Any], Hashable]:
    """The leaves of the arguments, and a key of the containers around them; quick for calls without containers."""
    leaves = (*call[0], *call[1].values())
    if all(isinstance(leaf, _LEAVES) for leaf in leaves):
        return leaves, (len(call[0]), *call[1])
    nested, structure = tree_flatten(call)
    return nested, repr(structure)


def sizes_of(tensors: Iterable[torch.Tensor]) -> Sizes:
    """The sizes of tensors, of sparse and nested ones those of the tensors inside."""
    return tuple([size for tensor in tensors for size in sizes_within(tensor)])


def grown(call: Call, kind: Kind) -> Iterator[Call]:
    """Yields one enlarged call to be counted, so that the count serves other calls too. A size of `call` that exceeds
    that of the latest count is multiplied by a margin (`Kind.growth`); the others become those of the latest count.
    Yields nothing before the first count."""
    if not kind.fitting:
        return
    tensors = list(tensors_in(call))
    sizes = sizes_of(tensors)
    growth = kind.growth(sizes)
    places = [(number, dim) for number, tensor in enumerate(tensors) for dim in range(tensor.dim())]
    counted = kind.fitting[-1][0]
    grown = [math.ceil(growth * size) if size > most else most for size, most in zip(sizes, counted, strict=True)]
    yield at_largest(call, dict(zip(places, grown, strict=True)))
