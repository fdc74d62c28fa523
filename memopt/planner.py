"""From captured regions to a plan: price them, join them into one problem, solve it within the budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from memopt.budget.account import Account
from memopt.budget.breakdown import breakdown, is_receipt, live_versions, output_bytes
from memopt.capture.data_sizes import DataSizes
from memopt.capture.joint import JointGraph
from memopt.emit.partition import RegionSchedule
from memopt.errors import GIB, BudgetError
from memopt.plan import ModuleRow, Plan, Recipe
from memopt.pricing import Hardware
from memopt.pricing.node_prices import price_nodes
from memopt.pricing.price import PricedGraph, is_scheduled, price
from memopt.progress import stage
from memopt.solver import Infeasible, Op, Portfolio, RematProblem, Schedule, Solution, warm_up
from memopt.torch_compat import known_sizes


@dataclass(frozen=True)
class Captured:
    """The regions of one training call, in the order of their forwards, and the card that they are priced for."""

    model_name: str
    regions: tuple[JointGraph, ...]
    hardware: Hardware
    notes: tuple[str, ...] = ()
    data_sizes: DataSizes = field(default_factory=DataSizes)
    timed: bool = False
    """Whether ops are timed here, where that can be done."""

    @cached_property
    def _joined(self) -> dict[tuple[bool, bool], Joined]:
        return {}

    def joined(self, *, accumulating: bool, as_seen: bool = False) -> Joined:
        """The regions as one problem; `accumulating`: with gradients added to an existing `.grad`; `as_seen`: with
        data-dependent sizes as they were on the batch at hand rather than the most that is allowed."""
        key = (accumulating, as_seen and self.data_sizes.seen != self.data_sizes.allowed)
        if key not in self._joined:
            with known_sizes(self.data_sizes.seen if key[1] else self.data_sizes.allowed):
                self._joined[key] = join(self._prices(accumulating))
        return self._joined[key]

    def _prices(self, accumulating: bool) -> list[PricedGraph]:
        nodes = [node for region in self.regions for node in region.module.graph.nodes if is_scheduled(node)]
        price_of = price_nodes(nodes, self.hardware, timed=self.timed).__getitem__
        return [
            price(region.module, region.forward_outputs, price_of, region.parameter_gradients if accumulating else ())
            for region in self.regions
        ]


@dataclass(frozen=True)
class Joined:
    """Several regions as one problem: all forwards in order, then the backwards from the last region to the first."""

    problem: RematProblem
    owner: tuple[tuple[int, int], ...]
    """For each op, its region and its index there."""
    prices: tuple[PricedGraph, ...]

    @cached_property
    def portfolio(self) -> Portfolio:
        return Portfolio(self.problem)


def join(prices: Sequence[PricedGraph]) -> Joined:
    """One problem out of the regions' own. What one region hands to the next is an output of the first: kept."""
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
    # The last region's tangents come between its forward and its backward: nothing is evaluated before they are there.
    forward_ops = len(ops) + _tangents(prices[-1].problem)
    for region, priced in reversed(list(enumerate(prices))):
        add(region, range(priced.problem.forward_ops, len(priced.problem.ops)))
    storages = tuple(storage for priced in prices for storage in priced.problem.storages)
    return Joined(RematProblem(tuple(ops), storages, forward_ops), tuple(owner), tuple(prices))


def _tangents(problem: RematProblem) -> int:
    """How many ops at the start of the backward only receive the gradients of the outputs."""
    backward = problem.ops[problem.forward_ops :]
    return next((number for number, op in enumerate(backward) if not is_receipt(op)), len(backward))


def make_plan(captured: Captured, account: Account, budget_bytes: int) -> Plan:
    """The plan with the least added time whose peak, as simulated, is within the budget. Raises `BudgetError`."""
    joined = captured.joined(accumulating=account.gradients_held)
    with stage("loading the solver"):
        warm_up()
    with stage("solving"):
        solution = _solve(joined, account, budget_bytes)
    seen = captured.joined(accumulating=account.gradients_held, as_seen=True)
    return Plan(
        model=captured.model_name,
        hardware=captured.hardware.name,
        budget_bytes=budget_bytes,
        account=account,
        plain=breakdown(seen.problem, Schedule.save_all(seen.problem), account),
        planned=breakdown(seen.problem, solution.schedule, account),
        ceiling_bytes=breakdown(joined.problem, solution.schedule, account).peak_bytes,
        step_seconds=joined.problem.seconds,
        added_seconds=solution.added_seconds,
        held_bytes=held_after_forward(joined.problem, solution.schedule),
        bound_seconds=solution.lower_bound_seconds,
        method=solution.method,
        regions=split(joined, captured, solution.schedule),
        modules=module_rows(joined, solution.schedule),
        notes=captured.notes + captured.data_sizes.notes(),
        captured=captured,
        joined=joined,
        schedule=solution.schedule,
    )


def _solve(joined: Joined, account: Account, budget_bytes: int) -> Solution:
    """Solve for what the resident bytes leave of the budget; refuse where the optimiser's own step is above it."""
    portfolio = joined.portfolio
    if account.optimizer_step_bytes(output_bytes(joined.problem)) > budget_bytes:
        raise BudgetError(budget_bytes, *_smallest(joined, account))
    try:
        solution = portfolio.solve(budget_bytes - account.resident_bytes)
    except Infeasible:
        raise BudgetError(budget_bytes, *_smallest(joined, account)) from None
    if breakdown(joined.problem, solution.schedule, account).peak_bytes > budget_bytes:
        raise BudgetError(budget_bytes, *_smallest(joined, account))
    return solution


def smallest_budget(captured: Captured, account: Account) -> int:
    """The smallest budget, in bytes, that `make_plan` finds a plan for."""
    return _smallest(captured.joined(accumulating=account.gradients_held), account)[0]


def recipes(captured: Captured, account: Account) -> tuple[Recipe, ...]:
    """What hand-written checkpointing would reach, and what it would add."""
    joined = captured.joined(accumulating=account.gradients_held)
    after = account.optimizer_step_bytes(output_bytes(joined.problem))
    return tuple(
        Recipe(
            baseline.name,
            max(baseline.peak_bytes + account.resident_bytes, after) / GIB,
            baseline.added_seconds / joined.problem.seconds,
        )
        for baseline in joined.portfolio.baselines()
    )


def _smallest(joined: Joined, account: Account) -> tuple[int, str]:
    """The smallest budget that works, and what holds it up."""
    smallest = breakdown(joined.problem, joined.portfolio.smallest().schedule, account)
    largest = ", ".join(f"{name} {size / GIB:.3g} GB" for name, size in smallest.rows[:3])
    return smallest.peak_bytes, f"{largest} (at {smallest.at})"


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
    return tuple(
        RegionSchedule(region.fingerprint, tuple(names), boundary)
        for region, names, boundary in zip(captured.regions, evaluations, boundaries, strict=True)
    )


def module_rows(joined: Joined, schedule: Schedule) -> tuple[ModuleRow, ...]:
    """What each module keeps for the backward and evaluates again, in the order of the forward."""
    return tuple(_rows(joined, schedule).values())


def _rows(joined: Joined, schedule: Schedule) -> dict[str, ModuleRow]:
    problem = joined.problem
    boundary = _boundary(problem, schedule)
    again = schedule.recomputed()
    read_later = {s for index in schedule.evaluations[boundary:] for s in problem.ops[index].reads}
    made_again = {s for index in again for s in problem.ops[index].makes}
    rows: dict[str, ModuleRow] = {}
    for index, (region, local) in enumerate(joined.owner[: problem.forward_ops]):
        if is_receipt(problem.ops[index]):
            continue
        path = joined.prices[region].modules[local]
        row = rows.get(path, ModuleRow(path))
        op, times = problem.ops[index], again.get(index, 0)
        made = sum(problem.storages[s].bytes for s in op.makes)
        saved = sum(problem.storages[s].bytes for s in op.makes if s in read_later and s not in made_again)
        rows[path] = ModuleRow(
            path,
            row.ops + 1,
            row.saved_bytes + saved,
            row.recomputed_bytes + made * times,
            row.recomputed_ops + times,
            row.seconds + op.seconds,
            row.added_seconds + op.seconds * times,
        )
    return rows


def held_after_forward(problem: RematProblem, schedule: Schedule) -> int:
    """Bytes that the forward leaves for the backward and the caller."""
    boundary = _boundary(problem, schedule)
    live = live_versions(problem, schedule, boundary)
    made_inside = (
        storage for storage, made in live if made < boundary and not is_receipt(problem.ops[problem.producer[storage]])
    )
    return sum(problem.storages[storage].bytes for storage in made_inside)


def _boundary(problem: RematProblem, schedule: Schedule) -> int:
    """How many evaluations come before the backward: up to the last forward op's first."""
    return schedule.evaluations.index(problem.forward_ops - 1) + 1 if problem.forward_ops else 0
