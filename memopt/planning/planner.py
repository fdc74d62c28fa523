"""Finds the schedule of a step with the least added time within a budget; on a card, one that its allocator can run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from memopt.account.account import Account, breakdown
from memopt.errors import GIB, BudgetError, as_text_has_it
from memopt.planning.frontier import Recipe
from memopt.planning.joined import Joined, on_card, solve_stepping, within, without_allocator
from memopt.planning.options import DEFAULT_EFFORT, Effort
from memopt.solver import Infeasible, Progress, Schedule, Solution
from memopt.solver.lower_bound import floor_of
from memopt.units import size

# Recomputation that adds less than this share of the step is no reason to try another lever or to offload.
NEGLIGIBLE = 5e-3
# The maximal number of times that a step is solved while torch's allocator would exceed the budget.
_ROUNDS = 6
# Where no schedule for the budget passes, budgets between the smallest and it are tried: the range in so many parts.
_PARTS = 8
# The next budget to try is larger by one part in this many.
_NEXT = 256


@dataclass(frozen=True)
class Request:
    """The terms of the search for a schedule: the account and the budget of the step, and the effort."""

    account: Account
    budget_bytes: int
    effort: Effort = DEFAULT_EFFORT
    tell: Callable[[str], None] | None = None
    """Called with a line on the progress of the best effort."""
    offload: bool = True
    """Whether values may be offloaded if there is a link to the host."""

    @property
    def graph_bytes(self) -> int:
        """The bytes of the budget that are left for activations and temporaries, after the resident bytes."""
        return self.budget_bytes - self.account.resident_bytes

    def fits_optimizer_step(self, joined: Joined) -> bool:
        """Whether the peak of the optimizer's own step is within the budget."""
        return self.account.optimizer_step_bytes(joined.problem.output_bytes) <= self.budget_bytes

    def is_hopeless(self, joined: Joined) -> bool:
        """Whether one operator alone, or the optimizer's step, needs more than the budget; False if steps are early."""
        if joined.steps:
            return False
        bare = replace(self, account=without_allocator(self.account))
        return floor_of(joined.problem, offloading=True)[0] > bare.graph_bytes or not bare.fits_optimizer_step(joined)

    def refusal(self, joined: Joined) -> BudgetError:
        """The error for a budget that no schedule fits, with the smallest that works, on a card with a larger one."""
        least, dominated_by = smallest(joined, self.account)
        if least > self.budget_bytes:
            return BudgetError(self.budget_bytes, least, dominated_by)
        works = _next_that_works(joined, self.account, self.budget_bytes)
        reason = f"the gaps between the allocator's blocks, beside {dominated_by}"
        return BudgetError(self.budget_bytes, works, reason, least=False)


def least_added_seconds(joined: Joined, request: Request) -> float:
    """A lower bound on the seconds that any schedule without offloads adds within the budget; 0 where none is known."""
    if joined.steps or not joined.recompute:
        return 0.0
    bare = replace(request, account=without_allocator(request.account))
    return joined.portfolio.bound.added_seconds(bare.graph_bytes)


def added_seconds_offloading(joined: Joined, request: Request) -> float | None:
    """The time that offloads add, by a quick search that leaves torch's allocator out; None where no schedule fits."""
    room, link = replace(request, account=without_allocator(request.account)).graph_bytes, joined.link
    assert link is not None
    with suppress(Infeasible):
        _, found = solve_stepping(joined, lambda problem: problem.offloads.solve(room, link, "fast"), room)
        return found.added_seconds
    return None


def solve(joined: Joined, request: Request) -> Solution:
    """The schedule with the least added time. Where values may be offloaded, it is an `OffloadSolution` if
    recomputation alone does not fit or adds more than the share `NEGLIGIBLE` of the step, or if parameters lie on the
    host. Raises `BudgetError` where no schedule fits, or the optimizer's own step is above the budget."""
    if not request.fits_optimizer_step(joined):
        raise request.refusal(joined)
    effort, tell = request.effort, request.tell

    def report(progress: Progress) -> None:
        if tell is not None:
            tell(progress_line(progress, joined.problem.seconds, effort.limit_seconds))

    key = request.graph_bytes, effort.name, effort.limit_seconds
    if key not in joined.solved:  # once for each request
        try:
            joined.solved[key] = joined.portfolio.solve(
                request.graph_bytes, effort.name, limit_seconds=effort.limit_seconds, report=report
            )
        except Infeasible:
            joined.solved[key] = None
    plain = joined.solved[key]
    little = plain is not None and plain.added_seconds <= NEGLIGIBLE * joined.problem.seconds
    hosts = joined.problem.home_bytes > 0
    if request.offload and joined.link is not None and (hosts or not little):
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
    """The problem and its solution as from `solve_with_steps`, and the account with the allocator's overhead. Where
    torch's allocator would exceed the budget, the step is solved again for a smaller budget; if that finds no schedule,
    schedules found for other budgets are tried. Where the plan may choose the kind of segments, expandable ones are
    tried if a schedule with ordinary ones does not fit, or adds time. Raises `BudgetError` where no schedule fits."""
    if not request.account.caching and not joined.steps:  # no allocator to replay, and no step to place
        if joined.knows_smallest and smallest(joined, request.account)[0] > request.budget_bytes:
            raise request.refusal(joined)
        return joined, solve(joined, request), without_allocator(request.account)
    ways = [joined]
    if joined.solvers and request.account.caching:  # schedules without the user's solvers are tried too
        ways.insert(0, replace(joined, solvers=()))
    found: list[tuple[Joined, Solution, Account]] = []
    for account in request.account.by_segments:
        found += (one for way in ways if (one := _on_card(way, replace(request, account=account))) is not None)
        if any(solution.added_seconds <= NEGLIGIBLE * taken.problem.seconds for taken, solution, _ in found):
            break
    if not found:
        raise request.refusal(joined)
    taken, solution, account = min(found, key=lambda one: one[1].added_seconds)
    return taken, solution, replace(account, may_expand=request.account.may_expand)


def _on_card(joined: Joined, request: Request) -> tuple[Joined, Solution, Account] | None:
    """The result of `solve_on_card`; None for a budget below the smallest, or where no schedule passes the replay."""
    if joined.knows_smallest and smallest(joined, request.account)[0] > request.budget_bytes:
        return None
    if found := _narrowed(joined, request):
        return found
    if smallest(joined, request.account)[0] > request.budget_bytes:
        return None
    for taken, solution in _with_less(joined, request):
        fitted = within(taken, solution.schedule, request.account, request.budget_bytes)
        if fitted and breakdown(taken.problem, solution.schedule, fitted).peak_bytes <= request.budget_bytes:
            return taken, solution, fitted
    return None


def _narrowed(joined: Joined, request: Request) -> tuple[Joined, Solution, Account] | None:
    """The first solution whose allocations, replayed, fit the budget, of up to `_ROUNDS` solved for fewer bytes while
    the allocator would exceed the budget, and for more where no schedule has so few. None where there is none, and
    after the first for a budget below the smallest."""
    account, budget_bytes = request.account, request.budget_bytes
    step = budget_bytes // 256
    allowance, too_small, too_large = 0, -1, 2 * budget_bytes
    for number in range(_ROUNDS):
        if number == 1 and smallest(joined, account)[0] > budget_bytes:
            break
        tighter = replace(without_allocator(account), fragmentation=allowance)
        try:
            taken, solution = solve_with_steps(joined, replace(request, account=tighter))
        except BudgetError:
            too_large = allowance
        else:
            fitted = within(taken, solution.schedule, account, budget_bytes)
            if fitted is not None:
                return taken, solution, fitted
            needed = breakdown(taken.problem, solution.schedule, on_card(taken, solution.schedule, account)).peak_bytes
            too_small = allowance
            allowance += max(needed - budget_bytes, step)
        if too_large - too_small <= step:
            break
        if allowance >= too_large:
            allowance = (too_small + too_large) // 2
    return None


def _with_less(joined: Joined, request: Request) -> Iterator[tuple[Joined, Solution]]:
    """The solution with the smallest peak, those for a few budgets between the smallest and the request's, and all
    without offloads that were found for other budgets, as the allocator may run any of them."""
    bare = without_allocator(request.account)
    taken, least = _smallest_peak(joined, offload=request.offload)
    yield taken, least
    spare = request.budget_bytes - breakdown(taken.problem, least.schedule, bare).peak_bytes
    for part in range(1, _PARTS if spare > 0 else 1):
        with suppress(BudgetError):
            tighter = replace(bare, fragmentation=spare * part // _PARTS)
            yield solve_with_steps(joined, replace(request, account=tighter))
    if request.account.caching and joined.recompute and not joined.steps:
        yield from ((joined, known) for known in joined.portfolio.known_within(request.graph_bytes))


def _next_that_works(joined: Joined, account: Account, budget_bytes: int) -> int:
    """A budget above this one at which the schedule with the smallest peak completes on a card."""
    taken, solution = _smallest_peak(joined)
    while True:
        budget_bytes = as_text_has_it(budget_bytes + budget_bytes // _NEXT)
        if any(within(taken, solution.schedule, one, budget_bytes) for one in account.by_segments):
            return budget_bytes


def solve_with_steps(joined: Joined, request: Request) -> tuple[Joined, Solution]:
    """A problem and its solution by `solve`. The problem is `joined`, unless recomputed operators would read some
    parameters after the optimizer has stepped them in the backward: then it is one that steps these at the end of the
    backward. Raises `BudgetError` where no schedule fits."""
    if not joined.steps:
        return joined, solve(joined, request)
    try:
        return solve_stepping(joined, lambda problem: solve(problem, request), request.graph_bytes)
    except BudgetError:
        refusal = request.refusal(joined)
        taken, solution = _smallest_peak(joined, offload=request.offload)
        if solution.peak_bytes <= request.graph_bytes and refusal.smallest_bytes <= request.budget_bytes:
            return taken, solution
        raise refusal from None


def _smallest_peak(joined: Joined, *, offload: bool = True) -> tuple[Joined, Solution]:
    """The solution with the smallest peak found, together with the problem that it is for."""
    return solve_stepping(joined, lambda problem: problem.smallest if offload else problem.portfolio.smallest())


def progress_line(progress: Progress, step_seconds: float, limit_seconds: float) -> str:
    """A line about the search of effort "best": the added time so far, its lower bound, and the seconds used."""
    added, bound = (
        seconds / step_seconds if step_seconds else 0.0
        for seconds in (progress.added_seconds, progress.lower_bound_seconds)
    )
    used = f"{progress.seconds:.0f} of {limit_seconds:.0f} s"
    return f"added time {added:.2%}, no plan adds less than {bound:.2%}; {used}"


def step_peak_bytes(joined: Joined, account: Account, graph_peak_bytes: int) -> int:
    """The peak in bytes of a step whose forward and backward hold `graph_peak_bytes` beside the resident bytes."""
    after = account.optimizer_step_bytes(joined.problem.output_bytes)
    return max(graph_peak_bytes + account.resident_bytes, after)


def smallest(joined: Joined, account: Account) -> tuple[int, str]:
    """The smallest budget in bytes for which `solve` finds a schedule, and a text on what dominates its peak."""
    taken, solution = _smallest_peak(joined)
    schedule = solution.schedule
    least = breakdown(taken.problem, schedule, least_on_card(taken, schedule, account))
    shown = [*least.rows[:3], *(row for row in least.rows[3:] if row[0] == "elsewhere")]
    largest = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in shown)
    return least.peak_bytes, f"{largest} (at {least.at})"


def least_on_card(joined: Joined, schedule: Schedule, account: Account) -> Account:
    """The account with the allocator's overhead for a schedule (`on_card`), by the segments with the lower peak."""
    found = [on_card(joined, schedule, one) for one in account.by_segments]
    return min(found, key=lambda one: breakdown(joined.problem, schedule, one).peak_bytes)


def recipes(joined: Joined, account: Account) -> tuple[Recipe, ...]:
    """The peak and the added time of each well-known recipe, such as checkpointing every block, by simulation."""
    seconds = joined.problem.seconds or 1.0
    return tuple(
        Recipe(one.name, step_peak_bytes(joined, account, one.peak_bytes) / GIB, one.added_seconds / seconds)
        for one in joined.portfolio.baselines()
    )
