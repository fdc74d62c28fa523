"""The problem that the regions of a call make together, its solutions, and at which positions of a schedule the
optimizer steps parameters within the backward."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from memopt.account.account import ANY_LINK, Account
from memopt.capture.captured_call import Passed
from memopt.lru import LruCache
from memopt.price.priced_graph import PricedGraph, PricedParameterStep
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
    def steps(self) -> Mapping[int, PricedParameterStep]:
        """The optimizer's steps within the backward of the only region, by the index of their op in the problem."""
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
    current = joined.leaving(joined.left | {step.number for step in joined.steps.values()})
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

    steps: Mapping[int, PricedParameterStep]
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
        for op, step in joined.steps.items():
            for reader in step.after:
                steps_waiting.setdefault(reader, []).append(op)
        for position, index in enumerate(schedule.evaluations):
            if index in joined.steps:
                at[index] = position
            for op in steps_waiting.get(index, ()):
                last[op] = position
        return cls(joined.steps, at, last)

    def late(self) -> frozenset[int]:
        """Numbers of the inputs that are read after their step."""
        return frozenset(self.steps[op].number for op, at in self.at.items() if self.last[op] > at)

    def early(self) -> frozenset[int]:
        """Numbers of the inputs whose step could come before evaluations that now precede it."""
        steps = set(self.at.values())
        return frozenset(
            self.steps[op].number
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
