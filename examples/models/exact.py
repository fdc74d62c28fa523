"""The best schedule of a wide class, by mixed-integer programming: the reference for tests and benchmarks of small
problems. It was one of the product's solvers, and left it since it changed no plan of a real model.

Schedules consist of stages: a stage recomputes ops in program order, each at most once, and then evaluates one op for
the first time. As in Checkmate (Jain et al., 2020, section 4), with three changes: the live bytes inside a stage are
exact; only the backward has stages unless the forward needs them to fit; and "closure cuts" demand that values read
later are either held when a stage begins or recomputed after it, without which the relaxation proves little.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from memopt.solver import RematProblem, Schedule, simulate
from memopt.solver.arrays import Floats, arrays_of, remove_dead, to_schedule
from memopt.solver.lower_bound import HeldBytes

Terms = Iterable[tuple[int, float]]
"""The terms of a linear expression, as pairs (variable, coefficient)."""


class _LinearModel:
    """Minimises a linear cost of variables between 0 and 1 under linear inequalities."""

    def __init__(self) -> None:
        self._cost: list[float] = []
        self._integral: list[int] = []
        self._lowest: list[float] = []
        self._rows: list[int] = []
        self._columns: list[int] = []
        self._values: list[float] = []
        self._most: list[float] = []

    def variable(self, cost: float = 0.0, *, integral: bool = False, lowest: float = 0.0) -> int:
        """Add a variable between `lowest` and 1, with `cost` as its coefficient in the cost; returns its number."""
        self._cost.append(cost)
        self._integral.append(int(integral))
        self._lowest.append(lowest)
        return len(self._cost) - 1

    @property
    def variables(self) -> int:
        """The number of variables."""
        return len(self._cost)

    def at_most(self, terms: Terms, most: float) -> None:
        """Add the constraint that the sum of the terms is at most `most`."""
        for variable, coefficient in terms:
            self._rows.append(len(self._most))
            self._columns.append(variable)
            self._values.append(coefficient)
        self._most.append(most)

    def within(self, variable: int, others: Iterable[int]) -> None:
        """Add the constraint that the variable is at most the sum of the others."""
        self.at_most([(variable, 1.0), *((other, -1.0) for other in others)], 0.0)

    def cost_at_most(self, most: float) -> None:
        """Add the constraint that the cost is at most `most`."""
        self.at_most([(v, cost) for v, cost in enumerate(self._cost) if cost], most)

    def solve(self, seconds: float, relative_gap: float, nodes: int | None = None) -> tuple[Floats | None, float, bool]:
        """The best values found (None without any), a lower bound on the cost, and whether the search was completed.

        The search ends after `seconds` of wall time, after `nodes` nodes of its tree, or within `relative_gap`.
        """
        if not self._cost:
            return (np.zeros(0), 0.0, True) if min(self._most, default=0.0) >= 0 else (None, float("inf"), True)
        shape = (len(self._most), len(self._cost))
        matrix = csr_array((self._values, (self._rows, self._columns)), shape=shape)
        result = milp(
            np.array(self._cost),
            integrality=np.array(self._integral),
            bounds=Bounds(np.array(self._lowest), np.ones(len(self._cost))),
            constraints=LinearConstraint(matrix, -np.inf, np.array(self._most)),
            options={
                "time_limit": seconds,
                "mip_rel_gap": relative_gap,
                **({} if nodes is None else {"node_limit": nodes}),
            },
        )
        if result.status == 2:
            return None, float("inf"), True
        bound = result.mip_dual_bound
        return result.x, 0.0 if bound is None else float(bound), result.status == 0


# The number of stages at whose beginning closure cuts are added.
_CLOSURES = 10


class StageModel:
    """The model of one problem and budget. Stage k recomputes ops and then evaluates the op `stages[k]`.

    Its variables for stage k are held[k][s]: storage s is in memory when the stage begins; again[k][o]: op o is
    recomputed in the stage; and, for each storage and each part of the stage between two ops that make or read it,
    whether the storage is in memory there.
    """

    def __init__(self, problem: RematProblem, budget_bytes: int) -> None:
        self.model = _LinearModel()
        self.impossible = False
        """True if some op exceeds the budget even without the movable storages that it reads."""
        self._problem = problem
        held = HeldBytes(problem)
        self._movable = held.movable.tolist()
        self._held_bytes, self._own_bytes = held.bytes, held.own_bytes
        self._allowed = budget_bytes - problem.resident_bytes
        # The model counts bytes in units that keep its coefficients between 0 and 1.
        self._unit = float(max(self._allowed, 1))
        self._readers = [self._forward_readers(s) for s in range(len(problem.storages))]
        self._first_stage = problem.forward_ops if self._forward_fits() else 0
        self._stages = list(range(self._first_stage, len(problem.ops)))
        self._useful = self._useful_from_each_stage()
        self._held: list[dict[int, int]] = [self._new_held(k) for k in range(len(self._stages))]
        self._again: list[dict[int, int]] = [self._new_again(k) for k in range(len(self._stages))]
        if self._first_stage:
            self._limit_first_pass()
        for k in range(len(self._stages)):
            self._add_stage(k)
        for k in np.unique(np.linspace(0, len(self._stages) - 1, _CLOSURES).astype(int)).tolist():
            self._add_closure(k)

    def evaluations(self, values: Floats) -> list[int]:
        """The schedule, as op indices, that the variables' values describe."""
        order = list(range(self._first_stage))
        for stage, again in zip(self._stages, self._again, strict=True):
            order += [op for op in sorted(again) if values[again[op]] > 0.5]
            order.append(stage)
        return order

    def _forward_readers(self, storage: int) -> list[int]:
        """The forward ops that read the storage, in order."""
        ops = self._problem.ops[: self._problem.forward_ops]
        return [index for index, op in enumerate(ops) if storage in op.reads]

    def _bytes(self, storage: int) -> float:
        """The storage's size in the model's unit."""
        return self._problem.storages[storage].bytes / self._unit

    def _forward_fits(self) -> bool:
        """Whether the forward fits the budget without recomputation if nothing is saved, so that it needs no stages."""
        return all(self._must_hold(op) <= self._allowed for op in range(self._problem.forward_ops))

    def _must_hold(self, op: int) -> int:
        """Live bytes at a forward op's first evaluation if nothing is recomputed in the forward nor saved."""
        producer = self._problem.producer
        live = [s for s, last in enumerate(self._readers) if self._movable[s] and producer[s] <= op]
        live = [s for s in live if producer[s] == op or (self._readers[s] and self._readers[s][-1] >= op)]
        return int(self._own_bytes[op]) + sum(self._problem.storages[s].bytes for s in live)

    def _useful_from_each_stage(self) -> list[set[int]]:
        """Per stage: the movable storages that it or a later stage reads, or from which those can be recomputed."""
        problem, wanted = self._problem, set[int]()
        useful: list[set[int]] = []
        for stage in reversed(self._stages):
            wanted.update(s for s in problem.ops[stage].reads if self._movable[s])
            closed = set(wanted)
            for op in range(min(stage, problem.forward_ops) - 1, -1, -1):
                if closed.intersection(problem.ops[op].makes):
                    closed.update(s for s in problem.ops[op].reads if self._movable[s])
            useful.append({s for s in closed if problem.producer[s] < stage})
        return useful[::-1]

    def _new_held(self, k: int) -> dict[int, int]:
        """New variables by storage: whether it is in memory when stage k begins."""
        return {s: self.model.variable(integral=True) for s in sorted(self._useful[k])}

    def _new_again(self, k: int) -> dict[int, int]:
        """New variables by op: whether stage k recomputes it, at the cost of its share of the step's seconds."""
        problem = self._problem
        ops = sorted({problem.producer[s] for s in self._useful[k]})
        total = problem.seconds or 1.0
        return {op: self.model.variable(problem.ops[op].seconds / total, integral=True) for op in ops}

    def _limit_first_pass(self) -> None:
        """Limit the storages saved from the forward so that they fit beside the live bytes of each forward op."""
        for op in range(self._first_stage):
            terms = []
            for s, variable in self._held[0].items():
                last = self._readers[s][-1] if self._readers[s] else -1
                if self._problem.producer[s] < op and last < op:
                    terms.append((variable, self._bytes(s)))
            self.model.at_most(terms, (self._allowed - self._must_hold(op)) / self._unit)

    def _add_stage(self, k: int) -> None:
        """Add the constraints of stage k: ops read only storages in memory, and live bytes fit the budget."""
        problem, model, stage = self._problem, self.model, self._stages[k]
        held, again = self._held[k], self._again[k]
        following = self._held[k + 1] if k + 1 < len(self._stages) else {}
        order = sorted(again)
        live: dict[int, list[tuple[int, float]]] = {op: [] for op in (*order, stage)}
        for s, entering in held.items():
            in_memory = entering
            place = problem.producer[s]
            readers = [op for op in self._readers[s] if op in again]
            stretches = [*((op, (op,)) for op in order if op < place)]
            for op, _ in stretches:
                live[op].append((in_memory, self._bytes(s)))
            making = self._stretch([in_memory, again[place]])
            model.within(again[place], [making])
            live[place].append((making, self._bytes(s)))
            in_memory, start = making, place
            for reader in readers:
                in_memory = self._stretch([in_memory])
                model.within(again[reader], [in_memory])
                for op in order:
                    if start < op <= reader:
                        live[op].append((in_memory, self._bytes(s)))
                start = reader
            in_memory = self._stretch([in_memory], certain=s in problem.ops[stage].reads)
            for op in order:
                if op > start:
                    live[op].append((in_memory, self._bytes(s)))
            live[stage].append((in_memory, self._bytes(s)))
            if s in following:
                model.within(following[s], [in_memory])
        self._limit_stage(stage, order, again, live)

    def _limit_stage(
        self, stage: int, order: list[int], again: dict[int, int], live: dict[int, list[tuple[int, float]]]
    ) -> None:
        """Limit the live bytes at each op of a stage; `live` lists per op the terms of the storages in memory."""
        problem = self._problem
        for op in order:
            fixed = sum(problem.storages[s].bytes for s in problem.ops[op].makes if not self._movable[s])
            unheld = sum(
                problem.storages[s].bytes
                for s in problem.ops[op].makes
                if self._movable[s] and s not in self._held[stage - self._first_stage]
            )
            work = (problem.ops[op].workspace_bytes + fixed + unheld) / self._unit
            room = (self._allowed - int(self._held_bytes[stage])) / self._unit
            self.model.at_most([*live[op], (again[op], work)], room)
        makes = sum(problem.storages[s].bytes for s in problem.ops[stage].makes if self._movable[s])
        room = (self._allowed - int(self._own_bytes[stage]) - makes) / self._unit
        self.impossible |= room < 0
        self.model.at_most(live[stage], room)

    def _stretch(self, sources: list[int], certain: bool = False) -> int:
        """A new variable that is at most the sum of `sources`, and is 1 if `certain`."""
        variable = self.model.variable(lowest=1.0 if certain else 0.0)
        self.model.within(variable, sources)
        return variable

    def _add_closure(self, k: int) -> None:
        """Demand that each storage read from stage k on is held when the stage begins, or recomputed after that,
        together with those of its inputs that are not held."""
        problem, model = self._problem, self.model
        held = self._held[k]
        later = {op: [again[op] for again in self._again[k:] if op in again] for op in self._again[k]}
        closure = {op: model.variable() for op in later}
        for op, variable in closure.items():
            model.within(variable, later[op])
            for s in problem.ops[op].reads:
                if s in held:
                    model.within(variable, [held[s], closure[problem.producer[s]]])
        read = {s for stage in self._stages[k:] for s in problem.ops[stage].reads}
        for s in sorted(read.intersection(held)):
            model.at_most([(held[s], -1.0), (closure[problem.producer[s]], -1.0)], -1.0)


@dataclass(frozen=True)
class _ExactResult:
    """The outcome of `solve_exactly`."""

    schedule: Schedule | None
    """The schedule, which fits the budget; None if none was found."""
    added_seconds: float
    """Seconds that the schedule adds; infinite without a schedule."""
    bound_seconds: float
    """A lower bound on the seconds that any schedule of stages adds."""
    proven: bool
    """True if the search was completed: the schedule is optimal within the gap, or none exists."""


def solve_exactly(
    problem: RematProblem,
    budget_bytes: int,
    *,
    seconds: float = 60.0,
    gap_seconds: float | None = None,
    below_seconds: float | None = None,
    nodes: int | None = None,
    variables: int | None = None,
) -> _ExactResult:
    """The fastest schedule of stages with a peak of at most `budget_bytes`, found within `seconds` of wall time.

    `nodes` also limits the search tree, for a result that is the same in every run; problems whose program has more
    than `variables` are left unsolved. The search ends early when the best schedule is within `gap_seconds` of the
    bound (default: 1e-4 of the step). Schedules that add more than `below_seconds` are excluded.
    """
    if problem.forward_ops == len(problem.ops):
        fits = simulate(problem, Schedule.save_all(problem)).peak_bytes <= budget_bytes
        return _ExactResult(Schedule.save_all(problem), 0.0, 0.0, True) if fits else _nothing
    staged = StageModel(problem, budget_bytes)
    if staged.impossible:
        return _nothing
    if variables is not None and staged.model.variables > variables:
        return _ExactResult(None, float("inf"), 0.0, False)
    unit = problem.seconds or 1.0
    gap = _GAP if gap_seconds is None else gap_seconds / unit  # of the cost, which is at most about 1: a step's seconds
    if below_seconds is not None:
        staged.model.cost_at_most(below_seconds / unit)
    values, bound, complete = staged.model.solve(seconds, gap, nodes)
    if values is None:
        return _ExactResult(None, float("inf"), bound * unit, complete)
    schedule = to_schedule(remove_dead(arrays_of(problem), np.array(staged.evaluations(values), np.int64)))
    simulation = simulate(problem, schedule)
    if simulation.peak_bytes > budget_bytes:  # a second version of a kept storage outlived its making
        return _ExactResult(None, float("inf"), bound * unit, False)
    return _ExactResult(schedule, simulation.added_seconds, bound * unit, complete)


_GAP = 1e-4
_nothing = _ExactResult(None, float("inf"), float("inf"), True)
