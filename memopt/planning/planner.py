"""From one problem and a budget to a schedule, and what is said of it region by region."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from memopt.account.account import Account
from memopt.account.breakdown import breakdown, output_bytes
from memopt.errors import GIB, BudgetError
from memopt.planning.captured import Captured, Joined
from memopt.planning.frontier import Recipe
from memopt.planning.on_card import on_card, within, without_allocator
from memopt.planning.options import DEFAULT_EFFORT, Effort
from memopt.planning.region_schedule import RegionSchedule
from memopt.planning.settle import settled
from memopt.solver import Infeasible, Progress, Schedule, Solution
from memopt.units import size
from passes import HostStay

# Recomputation that adds less than this share of the step is no reason to pull another lever.
LITTLE = 5e-3
# How often a step is planned anew at most, where torch's allocator holds too much.
_ROUNDS = 4


@dataclass(frozen=True)
class Request:
    """What a step may take, and how hard its schedule is looked for."""

    account: Account
    budget_bytes: int
    effort: Effort = DEFAULT_EFFORT
    tell: Callable[[str], None] | None = None
    """Gets a line on how far the best effort has come."""
    offload: bool = True
    """Values may wait on the host if there is a link to it."""

    @property
    def graph_bytes(self) -> int:
        """What the resident bytes leave of the budget."""
        return self.budget_bytes - self.account.resident_bytes

    def refusal(self, joined: Joined) -> BudgetError:
        return BudgetError(self.budget_bytes, *smallest(joined, self.account))


def solve(joined: Joined, request: Request) -> Solution:
    """The schedule with the least added time; an `OffloadSolution` where recomputation alone adds more than a little,
    and values may wait on the host.

    Raises `BudgetError`, also where the optimiser's own step is above the budget.
    """
    if request.account.optimizer_step_bytes(output_bytes(joined.problem)) > request.budget_bytes:
        raise request.refusal(joined)
    effort = request.effort
    plain = _recomputing(joined, request)
    little = plain is not None and plain.added_seconds <= LITTLE * joined.problem.seconds
    if request.offload and joined.link is not None and not little:
        try:
            return joined.offloads.solve(
                request.graph_bytes, joined.link, effort.name, plain=plain, limit_seconds=effort.limit_seconds
            )
        except Infeasible:
            plain = None
    if plain is None:
        raise request.refusal(joined)
    return plain


def solve_on_card(joined: Joined, request: Request) -> tuple[Joined, Solution, Account]:
    """`solve_settled`, again with less where torch's allocator would not keep the budget with what was found; and the
    account with what the allocator comes to hold.

    Raises `BudgetError`.
    """
    account, budget_bytes = request.account, request.budget_bytes
    allowance = 0
    for _ in range(_ROUNDS):
        tighter = replace(without_allocator(account), fragmentation=allowance)
        try:
            taken, solution = solve_settled(joined, replace(request, account=tighter))
        except BudgetError:
            if not allowance:
                raise
            break
        fitted = within(taken, solution.schedule, account, budget_bytes)
        if fitted is not None:
            return taken, solution, fitted
        needed = breakdown(taken.problem, solution.schedule, on_card(taken, solution.schedule, account)).peak_bytes
        allowance += max(needed - budget_bytes, budget_bytes // 256)
    taken, solution = _tightest(joined, offload=request.offload)
    fitted = within(taken, solution.schedule, account, budget_bytes)
    if fitted is None:
        raise request.refusal(joined)
    return taken, solution, fitted


def solve_settled(joined: Joined, request: Request) -> tuple[Joined, Solution]:
    """As `solve`, with the problem that the solution is of: another one where some parameters cannot be stepped before
    the end of a backward that evaluates so much again."""
    if not joined.steps:
        return joined, solve(joined, request)
    try:
        return settled(joined, lambda each: solve(each, request), request.graph_bytes)
    except BudgetError:
        refusal = request.refusal(joined)
        taken, solution = _tightest(joined, offload=request.offload)
        if solution.peak_bytes <= request.graph_bytes and refusal.smallest_bytes <= request.budget_bytes:
            return taken, solution
        raise refusal from None


def _tightest(joined: Joined, *, offload: bool = True) -> tuple[Joined, Solution]:
    """The schedule of the smallest peak found, with the problem that it is of."""
    return settled(joined, lambda each: each.smallest if offload else each.portfolio.smallest())


def _recomputing(joined: Joined, request: Request) -> Solution | None:
    """What recomputation alone makes of the budget, asked once; None where nothing fits."""
    effort, tell = request.effort, request.tell

    def report(progress: Progress) -> None:
        if tell is not None:
            tell(progress_line(progress, joined.problem.seconds, effort.limit_seconds))

    key = request.graph_bytes, effort.name, effort.limit_seconds
    if key not in joined.solved:
        try:
            found: Solution | None = joined.portfolio.solve(
                request.graph_bytes, effort.name, limit_seconds=effort.limit_seconds, report=report
            )
        except Infeasible:
            found = None
        joined.solved[key] = found
    return joined.solved[key]


def progress_line(progress: Progress, step_seconds: float, limit_seconds: float) -> str:
    """What a person sees while the best plan is looked for."""
    added, bound = (
        seconds / step_seconds if step_seconds else 0.0
        for seconds in (progress.added_seconds, progress.lower_bound_seconds)
    )
    return f"added time {added:.2%}, at least {bound:.2%}, after {progress.seconds:.0f} of {limit_seconds:.0f} s"


def step_peak_bytes(joined: Joined, account: Account, graph_peak_bytes: int) -> int:
    """The most that a step holds whose forward and backward hold `graph_peak_bytes` beside what is resident."""
    after = account.optimizer_step_bytes(output_bytes(joined.problem))
    return max(graph_peak_bytes + account.resident_bytes, after)


def smallest(joined: Joined, account: Account, *, expandable: bool | None = None) -> tuple[int, str]:
    """The smallest budget in bytes that `solve` finds a schedule for, and what holds it up; for `expandable` see
    `on_card`."""
    taken, solution = _tightest(joined)
    schedule = solution.schedule
    least = breakdown(taken.problem, schedule, on_card(taken, schedule, account, expandable=expandable))
    largest = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in least.rows[:3])
    return least.peak_bytes, f"{largest} (at {least.at})"


def recipes(joined: Joined, account: Account) -> tuple[Recipe, ...]:
    """What hand-written checkpointing would reach, and what it would add."""
    return tuple(
        Recipe(
            baseline.name,
            step_peak_bytes(joined, account, baseline.peak_bytes) / GIB,
            baseline.added_seconds / joined.problem.seconds if joined.problem.seconds else 0.0,
        )
        for baseline in joined.portfolio.baselines()
    )


def split(joined: Joined, captured: Captured, schedule: Schedule) -> tuple[RegionSchedule, ...]:
    """Each region's part of a joint schedule."""
    evaluations: list[list[str]] = [[] for _ in captured.regions]
    boundaries = [0] * len(captured.regions)
    remaining = [priced.problem.forward_ops for priced in joined.prices]
    seen: set[int] = set()
    for index in schedule.evaluations:
        region, local = joined.owner[index]
        name = joined.prices[region].nodes[local]
        if name:
            evaluations[region].append(name)
        if index not in seen and local < joined.prices[region].problem.forward_ops:
            remaining[region] -= 1
            if remaining[region] == 0:
                boundaries[region] = len(evaluations[region])
        seen.add(index)
    stays = _stays(joined, schedule)
    steps = tuple(sorted(step.number for step in joined.steps.values()))
    return tuple(
        RegionSchedule(region.fingerprint, tuple(names), boundary, tuple(stays.get(number, ())), steps)
        for number, (region, names, boundary) in enumerate(zip(captured.regions, evaluations, boundaries, strict=True))
    )


def _stays(joined: Joined, schedule: Schedule) -> dict[int, list[HostStay]]:
    """What each region has on the host, by its own evaluations.

    What happens while another region runs is moved to the end of this one's forward, or to the start of its backward:
    memory is then free sooner and longer than was planned.
    """
    if not schedule.offloads:
        return {}
    regions = range(len(joined.prices))
    before = [[0] for _ in regions]  # region → how many of its evaluations come before each position
    for index in schedule.evaluations:
        owner, local = joined.owner[index]
        for region in regions:
            before[region].append(before[region][-1] + (region == owner and bool(joined.prices[owner].nodes[local])))
    values = [(region, value) for region in regions for value in joined.prices[region].values]
    stays: dict[int, list[HostStay]] = {}
    for each in schedule.offloads:
        region, value = values[each.storage]
        place = before[region]
        spots = (place[each.freed_before], place[each.fetch_from], place[each.back_before])
        stays.setdefault(region, []).append(HostStay(value, place[each.out_after + 1] - 1, *spots))
    return stays
