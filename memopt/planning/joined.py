"""The problem that the regions of a call make together, its solutions, and at which positions of a schedule the
optimizer steps parameters within the backward.

The bytes that a step holds on a GPU beyond those it allocates, the allocator's rounding and fragmentation, are found by
a replay of a schedule's allocations."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import cycle

from memopt.account.account import ANY_LINK, Account, breakdown
from memopt.account.allocator_replay import (
    AllocatorPeaks,
    StepBlocks,
    peaks_without_limit,
    replay_with_spare,
    step_ways,
    with_spare,
)
from memopt.account.caching_allocator import SMALL_BYTES, CardFullError
from memopt.account.card_state import CardState, Kind, rounded_bytes
from memopt.capture.captured_call import Passed
from memopt.errors import as_text_has_it
from memopt.lru import LruCache
from memopt.price.priced_graph import PricedGraph
from memopt.solver import (
    Link,
    Offload,
    OffloadPortfolio,
    Op,
    Portfolio,
    RematProblem,
    Schedule,
    Solution,
    Solver,
    simulate,
)
from memopt.solver.problem import BlockCall

_MOST_WAYS = 2
"""The schedules whose allocator calls are cached: that of the current budget, and that with the smallest peak."""


@dataclass(eq=False)
class Joined:
    """The regions of a call as one problem: all forwards in order, then the backwards from the last to the first.

    It stores the solutions that were found for it, one for each budget and effort."""

    problem: RematProblem
    owner: tuple[tuple[int, int], ...]
    """For each op the number of its region, and its index in that region's problem."""
    prices: tuple[PricedGraph, ...]
    recompute: bool = True
    """Whether operators may be recomputed."""
    link: Link | None = None
    """The link over which activations may be offloaded to the host; None where they may not be."""
    solvers: tuple[Solver, ...] = ()
    """The user's own solvers, whose schedules compete with those of memopt's."""
    given: tuple[int, ...] = ()
    """The bytes of each tensor that the regions take as input."""
    trained: tuple[int, ...] = ()
    """The bytes of those among them that get a gradient: the parameters that are trained."""
    libraries: tuple[int, ...] = ()
    """The bytes of the blocks that the card's libraries keep (`Device.library_workspaces`)."""

    left: frozenset[int] = frozenset()
    """The input numbers of parameters stepped only at the end of the backward, as schedules read them late."""
    leaving: Callable[[frozenset[int]], Joined] | None = field(default=None, repr=False, compare=False)
    """Returns the same problem with further parameters, by input number, stepped only at the end of the backward."""
    on_cards: dict[tuple[object, ...], Account] = field(default_factory=dict, init=False, repr=False)
    """The results of `on_card`, by its arguments."""
    ways: LruCache[Schedule, tuple[Sequence[BlockCall], ...]] = field(
        default_factory=lambda: LruCache(_MOST_WAYS), init=False, repr=False, compare=False
    )
    """The allocator calls of the schedules that were replayed last, as `step_ways` returns them."""
    solved: dict[tuple[int, str, float], Solution | None] = field(default_factory=dict, init=False, repr=False)
    """The solutions of `portfolio`, by bytes, effort and its limit in seconds; None where no schedule fits."""

    @property
    def steps(self) -> Mapping[int, int]:
        """The parameters stepped within the backward of the only region: index of an op in the problem → number of the
        input."""
        return self.prices[0].steps if len(self.prices) == 1 else {}

    @cached_property
    def portfolio(self) -> Portfolio:
        """The solvers of schedules without offloads. Without recomputation, their problem has no recomputable op, and
        the user's solvers are not asked."""
        return Portfolio(self._solved_problem, self.solvers if self.recompute else ())

    @cached_property
    def offloads(self) -> OffloadPortfolio:
        """The solvers of schedules with offloads, of the same problem."""
        return OffloadPortfolio(self._solved_problem, self.portfolio)

    @property
    def _solved_problem(self) -> RematProblem:
        once = (replace(op, recomputable=False) for op in self.problem.ops)
        return self.problem if self.recompute else replace(self.problem, ops=tuple(once))

    @cached_property
    def smallest(self) -> Solution:
        """The solution with the smallest peak found. It does not depend on which budgets were solved for before."""
        return self.portfolio.smallest() if self.link is None else replace(self).offloads.smallest(self.link)

    @property
    def knows_smallest(self) -> bool:
        """Whether `smallest` has been computed already, so that reading it takes no time."""
        return "smallest" in vars(self)

    def forget_solvers(self) -> None:
        """Free the solvers, their solutions for budgets and `ways`, to be made again when needed. `smallest` stays."""
        for made in ("portfolio", "offloads"):
            vars(self).pop(made, None)
        self.solved.clear()
        self.ways.clear()


def join(prices: Sequence[PricedGraph], passed: Sequence[Passed] = ()) -> Joined:
    """The problems of all regions as one problem. `passed` says for each region which of its inputs are outputs of
    earlier regions, and until when other code holds its outputs.

    A value that one region passes to the next is an output of the first and is never recomputed: it lives until the
    last op that reads it in any region."""
    ops: list[Op] = []
    owner: list[tuple[int, int]] = []
    starts = [0]
    for priced in prices:
        starts.append(starts[-1] + len(priced.problem.storages))

    def add(region: int, indices: range) -> None:
        for index in indices:
            op = prices[region].problem.ops[index]
            path = prices[region].modules[index]
            name = f"{op.name} of {path}" if path else op.name
            reads, makes = (tuple(starts[region] + s for s in storages) for storages in (op.reads, op.makes))
            ops.append(replace(op, name=name, reads=reads, makes=makes))
            owner.append((region, index))

    for region, priced in enumerate(prices):
        add(region, range(priced.problem.forward_ops))
    # The last region's tangents come between its forward and its backward: nothing runs before they are there.
    forward_ops = len(ops) + prices[-1].problem.tangents
    for region, priced in reversed(list(enumerate(prices))):
        add(region, range(priced.problem.forward_ops, len(priced.problem.ops)))
    storages = tuple(storage for priced in prices for storage in priced.problem.storages)
    further = _reads_of_others(prices, passed)
    linked = (
        replace(op, reads=tuple(dict.fromkeys((*op.reads, *(starts[r] + s for r, s in further.get(place, ()))))))
        for op, place in zip(ops, owner, strict=True)
    )
    return Joined(RematProblem(tuple(linked), storages, forward_ops), tuple(owner), tuple(prices))


def with_meanwhile(problem: RematProblem, nbytes: int) -> RematProblem:
    """A copy of `problem` whose forward's last op has other code's `nbytes` until the backward as its workspace."""
    if not nbytes or not problem.forward_ops:
        return problem
    last = problem.forward_ops - 1
    op = problem.ops[last]
    waiting = replace(op, workspace_bytes=max(op.workspace_bytes, nbytes))
    return replace(problem, ops=(*problem.ops[:last], waiting, *problem.ops[last + 1 :]))


def _reads_of_others(
    prices: Sequence[PricedGraph], passed: Sequence[Passed]
) -> Mapping[tuple[int, int], list[tuple[int, int]]]:
    """Op, as in `Joined.owner` → the outputs, as region and storage in it, that must live until it runs."""
    found: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for region, (priced, mine) in enumerate(zip(prices, passed, strict=False)):
        for position, storage in priced.outputs.items():
            last = mine.forward_only[position]
            found[last, prices[last].problem.forward_ops - 1].append((region, storage))
        for number, (maker, position) in mine.given.items():
            if position not in prices[maker].outputs:
                continue
            own = priced.given.get(number)
            readers = [at for at, op in enumerate(priced.problem.ops) if own in op.reads]
            if own is None:  # the region writes to it, or it is a tensor subclass
                readers = [len(priced.problem.ops) - 1]
            for at in readers:
                found[region, at].append((maker, prices[maker].outputs[position]))
    return found


ROUNDS = 4
"""The most attempts to step parameters within the backward, before all are stepped at its end."""


def solve_stepping(
    joined: Joined, solve: Callable[[Joined], Solution], most_bytes: int | None = None
) -> tuple[Joined, Solution]:
    """A problem and its solution by `solve`, in which no operator reads a parameter after the optimizer has stepped it.
    The problem is `joined`, or the same with more parameters stepped at the end of the backward (all of them after
    `ROUNDS` attempts).

    Each parameter's step comes right after the operators that it waits for; the peak is at most `most_bytes`."""
    if not joined.steps:
        return joined, solve(joined)
    assert joined.leaving is not None
    current = joined
    for _ in range(ROUNDS):
        solution = solve(current)
        schedule, late = place_steps(current, solution.schedule)
        if not late:
            peak = simulate(current.problem, schedule, ANY_LINK).peak_bytes
            if most_bytes is None or peak <= most_bytes:
                return current, replace(solution, schedule=schedule, peak_bytes=peak)
            late = _StepPositions.of(current, solution.schedule).early()
        current = joined.leaving(current.left | late)
    current = joined.leaving(joined.left.union(joined.steps.values()))
    return current, solve(current)


def place_steps(joined: Joined, schedule: Schedule) -> tuple[Schedule, frozenset[int]]:
    """The schedule with the optimizer's step of each parameter right after the last evaluation that reads the parameter
    or its gradient, as in the emitted code; and the numbers of the inputs (parameters) for which that position is not
    valid. The steps of these must wait for the end of the backward. Then the schedule is as given."""
    positions = _StepPositions.of(joined, schedule)
    late = positions.late()
    if late:
        return schedule, late
    order = positions.order(len(schedule.evaluations))
    evaluations = tuple(schedule.evaluations[position] for position in order)
    if evaluations == schedule.evaluations or not schedule.offloads:
        return replace(schedule, evaluations=evaluations), frozenset()
    # The other evaluations keep their order, so an offload keeps its place relative to them.
    steps = frozenset(positions.at.values())
    old = [position for position in order if position not in steps]
    new = [number for number, position in enumerate(order) if position not in steps]
    moved = Schedule(evaluations, tuple(_remapped(offload, old, new) for offload in schedule.offloads))
    try:
        moved.check(joined.problem)
    except ValueError:  # an offload that began or ended at a step
        return schedule, positions.early()
    return moved, frozenset()


@dataclass(frozen=True)
class _StepPositions:
    """Positions in a schedule's evaluations, by the index of the op that is the optimizer's step of a parameter."""

    steps: Mapping[int, int]
    """Number of the parameter among the inputs."""
    at: dict[int, int]
    """Position of the step itself."""
    last: dict[int, int]
    """Position of the last evaluation that reads the parameter or its gradient."""

    @classmethod
    def of(cls, joined: Joined, schedule: Schedule) -> _StepPositions:
        """The positions of a schedule's steps and of the evaluations that they wait for."""
        at: dict[int, int] = {}
        last: dict[int, int] = {}
        steps_waiting: dict[int, list[int]] = {}
        for op in joined.steps:
            for reader in joined.prices[0].waits[op]:
                steps_waiting.setdefault(reader, []).append(op)
        for position, index in enumerate(schedule.evaluations):
            if index in joined.steps:
                at[index] = position
            for op in steps_waiting.get(index, ()):
                last[op] = position
        return cls(joined.steps, at, last)

    def late(self) -> frozenset[int]:
        """Numbers of the inputs that are read after their step."""
        return frozenset(self.steps[op] for op, at in self.at.items() if self.last[op] > at)

    def early(self) -> frozenset[int]:
        """Numbers of the inputs whose step could come before evaluations that now precede it."""
        steps = set(self.at.values())
        return frozenset(
            self.steps[op]
            for op, at in self.at.items()
            if any(position not in steps for position in range(self.last[op] + 1, at))
        )

    def order(self, evaluations: int) -> list[int]:
        """The positions below `evaluations`, where each step follows the last evaluation that it waits for."""
        steps_after: dict[int, list[int]] = {}
        for op in sorted(self.at):
            steps_after.setdefault(self.last[op], []).append(self.at[op])
        steps = frozenset(self.at.values())
        found: list[int] = []
        for position in range(evaluations):
            found += [position] * (position not in steps) + steps_after.get(position, [])
        return found


def _remapped(offload: Offload, old: list[int], new: list[int]) -> Offload:
    """An offload with its positions `old` replaced by `new`; a position in neither list becomes its neighbour's."""

    def after(position: int) -> int:
        return new[max(0, bisect_right(old, position) - 1)]

    def before(position: int) -> int:
        return new[min(len(new) - 1, bisect_left(old, position))]

    out_after, freed_before = after(offload.out_after), before(offload.freed_before)
    return Offload(offload.storage, out_after, freed_before, before(offload.fetch_from), before(offload.back_before))


SPARE = 15
"""The margin (see `with_spare`) for what no replay knows: the order of a kernel's own blocks, small blocks, what a
compiler changes."""
SPARE_COMPILED = 5
"""The margin for compiled code, whose allocations are known, if the allocator returns no segment. If it has to, the
gaps between its blocks may differ from those of the replay, and the margin is `SPARE`."""
UNSPLIT = 3, 1000
"""The share of the allocator's bytes, as a fraction, by which they may exceed those of the replay: some blocks are a
little larger than requested, and which ones depends on all that was allocated before."""
_NEXT = 1024
"""The next budget to try is larger by one part in this many."""
_SHARE = 1 / 256
"""The precision to which the least budget is found, as a fraction of the bytes allocated."""


def on_card(joined: Joined, schedule: Schedule, account: Account) -> Account:
    """The account with the least rounding and fragmentation of torch's allocator with which the step completes, found
    by replaying its allocations. On the CPU both are 0.

    An allocator on a full card returns free segments, so a process with exactly the resulting peak as its memory
    completes its steps: a `BudgetError` names this budget. With some larger budgets the replay may still fail."""
    bare = without_allocator(account)
    if not account.caching:
        return bare
    bare = replace(bare, lowering=0)
    key = (schedule, bare)
    if key not in joined.on_cards:
        blocks = _step_blocks(joined, bare)
        free = peaks_without_limit(_ways(joined, schedule), blocks, expandable_segments=bare.expandable)
        fitted = partial(within, joined, schedule, bare)
        joined.on_cards[key] = _with_least_budget(fitted, joined, schedule, bare.context, free)
    found = joined.on_cards[key]
    return replace(account, rounding=found.rounding, fragmentation=found.fragmentation)


def _ways(joined: Joined, schedule: Schedule) -> tuple[Sequence[BlockCall], ...]:
    """The result of `step_ways`, cached in `Joined.ways` for a schedule that is replayed for several budgets."""
    if schedule not in joined.ways:
        joined.ways[schedule] = step_ways(joined.problem, schedule)
    return joined.ways[schedule]


def _with_least_budget(
    fitted: Callable[[int], Account | None],
    joined: Joined,
    schedule: Schedule,
    context: int,
    free: AllocatorPeaks,
    above: int = 0,
) -> Account:
    """The account that `fitted` returns for the least budget for which it returns one, found to 0.4% of the bytes
    allocated. Its fragmentation is raised until its peak is that budget, which was tried itself: a budget above one
    that works need not work.

    Only budgets above `above` are tried, rounded up by `as_text_has_it`; `free` has the peaks without a limit."""
    low = max(above, context + with_spare(free.allocated_bytes, SPARE) - 1)
    high = as_text_has_it(max(low + 1, context + with_spare(free.reserved_bytes, SPARE)))
    found = None
    # The least budget is mostly nearer to the bytes allocated than to the bytes reserved.
    while high - low > _SHARE * free.allocated_bytes and (middle := as_text_has_it(low + (high - low + 3) // 4)) < high:
        account = fitted(middle)
        low, high, found = (middle, high, found) if account is None else (low, middle, account)
    while found is None and (found := fitted(high)) is None:
        high = as_text_has_it(high + high // _NEXT)
    peak = breakdown(joined.problem, schedule, found).peak_bytes
    return replace(found, fragmentation=found.fragmentation + high - peak)


def within(joined: Joined, schedule: Schedule, account: Account, budget_bytes: int) -> Account | None:
    """The account with the allocator's overhead in a process that has `budget_bytes`, in which the allocator returns
    free segments only when it must; None where the step needs more. `Account.lowering` is not replayed."""
    bare = without_allocator(account)
    if not account.caching:
        return bare
    limit = budget_bytes - account.context - account.lowering
    ways, blocks = _ways(joined, schedule), _step_blocks(joined, bare)
    try:
        peaks = replay_with_spare(ways, blocks, SPARE, expandable_segments=bare.expandable, limit_bytes=limit)
    except CardFullError:
        return None
    requested = _requested_bytes(joined, schedule, replace(bare, lowering=0))
    fitted = _with_overhead(bare, requested, peaks, with_spare(peaks.reserved_bytes, SPARE))
    return fitted if breakdown(joined.problem, schedule, fitted).peak_bytes <= budget_bytes else None


def compiled_within(
    joined: Joined, schedule: Schedule, account: Account, ways: Sequence[Sequence[BlockCall]], budget_bytes: int
) -> Account:
    """The account with the allocator's overhead of compiled code. `ways` has the sequences of allocator calls that the
    code may make, and the overhead suffices for each of them. It is the overhead in a process that has `budget_bytes`,
    or, where that is too little, in one that has the fewest bytes in which the step completes."""
    bare = without_allocator(account)
    if not account.caching:
        return bare
    blocks, setting = _step_blocks(joined, bare), bare.expandable
    requested = _requested_bytes(joined, schedule, bare)

    def fitted(budget_bytes: int) -> Account | None:
        for spare, may_release in ((SPARE_COMPILED, False), (SPARE, True)):
            with suppress(CardFullError):
                limit = budget_bytes - account.context
                peaks = replay_with_spare(ways, blocks, spare, expandable_segments=setting, limit_bytes=limit)
                if may_release or not peaks.releases:
                    return _with_overhead(bare, requested, peaks, with_spare(peaks.reserved_bytes, spare))
        return None

    def passing(budget_bytes: int) -> Account | None:
        found = fitted(budget_bytes)
        fits = found is not None and breakdown(joined.problem, schedule, found).peak_bytes <= budget_bytes
        return found if fits else None

    if found := fitted(budget_bytes):
        return found
    free = peaks_without_limit(ways, blocks, expandable_segments=setting)
    return _with_least_budget(passing, joined, schedule, account.context, free, budget_bytes)


def without_allocator(account: Account) -> Account:
    """The account without rounding and fragmentation of the allocator."""
    return replace(account, rounding=0, fragmentation=0)


def _step_blocks(joined: Joined, account: Account) -> StepBlocks:
    """The account's rows, less what is allocated already, as allocations: parameters, buffers and inputs in their
    actual sizes, gradients and what the optimizer holds in those of the parameters that are trained."""
    trained = account.trained or joined.trained
    there = account.card_state or CardState()
    rows: dict[Kind, tuple[int, int]] = {  # the bytes that are planned, and those that lie on the card
        "given": (account.parameters + account.buffers + account.inputs, there.given_bytes),
        "gradients": (account.gradients if account.gradients_held else 0, there.gradient_bytes),
        "state": (account.optimizer_state, there.state_bytes),
    }
    # Where more lie there, they are not those planned: they are freed, and the whole row is still to be allocated.
    freed = [kind for kind, (planned, found) in rows.items() if found > planned]
    given, held, state = (planned - (0 if kind in freed else found) for kind, (planned, found) in rows.items())
    libraries = Counter(map(rounded_bytes, joined.libraries))
    libraries.subtract(there.libraries)
    wrapper = (account.buckets, account.output_clones, account.gathered, account.kept, account.exchange)
    eager = (*wrapper, account.other_forwards, account.elsewhere)
    return StepBlocks(
        resident=(
            *_split_into(given, joined.given),
            *libraries.elements(),
            *_split_into(held, trained),
            *_beyond(eager, there.other_bytes),
        ),
        state=_split_into(state, account.state_blocks or trained),
        temporaries=_split_into(account.optimizer_temporaries, trained),
        copies=(account.inputs,) if SMALL_BYTES < account.inputs <= state else (),
        there=there.without(freed),
    )


def _beyond(sizes: Sequence[int], there: int) -> Iterator[int]:
    """The sizes, reduced by `there` bytes in total: the last size first, then those before it."""
    left: list[int] = []
    for nbytes in reversed(sizes):
        taken = min(nbytes, there)
        there -= taken
        left.append(nbytes - taken)
    return reversed(left)


def _requested_bytes(joined: Joined, schedule: Schedule, bare: Account) -> int:
    """The bytes that a step asks the allocator for at its peak."""
    return breakdown(joined.problem, schedule, bare).peak_bytes - bare.context


def _with_overhead(bare: Account, requested: int, peaks: AllocatorPeaks, held: int) -> Account:
    """The account with the allocator's overhead: what it allocates beyond `requested`, and `held` beyond that."""
    share, whole = UNSPLIT
    allocated = max(requested, peaks.allocated_bytes)
    allocated += allocated * share // whole
    return replace(bare, rounding=allocated - requested, fragmentation=max(0, held - allocated))


def _split_into(total: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """`total` bytes as blocks of the positive `sizes`, repeated in this order until one does not fit, then the rest."""
    blocks, left = [], total
    for size in cycle(size for size in sizes if size > 0):
        if size > left:
            break
        blocks.append(size)
        left -= size
    return (*blocks, left) if left else tuple(blocks)
