"""A plan for a step that has the regions of one that is planned already, and further ones or larger sizes: the known
schedules stay as they are, and of new regions everything is saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memopt.planning.joined import Joined
from memopt.planning.on_card import within
from memopt.planning.plan import Plan, ReceiptRow
from memopt.planning.planner import LITTLE
from memopt.planning.receipt import schedule_rows
from memopt.planning.stages import Priced
from memopt.solver import Schedule, Solution, simulate

METHOD = "known regions as before"


def extended(plan: Plan, priced: Priced, known: Sequence[int | None]) -> Plan | None:
    """The plan of `priced` by the schedules of `plan`, without a search; None where that exceeds the budget, adds
    more time than the plan did, or the plan offloads.

    Args:
        known: for each region of `priced`, the number of the region of `plan` whose schedule it takes, or None.
    """
    before, schedule = plan.joined, plan.schedule
    assert before is not None
    assert schedule is not None
    if schedule.offloads or before.steps:
        return None
    joined = priced.step.problem
    taken = _schedule(joined, before, schedule, known)
    fitted = within(joined, taken, priced.account, plan.budget_bytes)
    if fitted is None:
        return None
    simulation = simulate(joined.problem, taken)
    solution = Solution(taken, simulation.peak_bytes, simulation.added_seconds, 0.0, METHOD)
    found = priced.planned(joined, solution, fitted, plan.budget_bytes, plan.effort)
    if found.ceiling_bytes > plan.budget_bytes or found.added_time > max(LITTLE, plan.added_time):
        return None
    rows = (ReceiptRow("", found.plain.peak_bytes, found.step_seconds), *schedule_rows(found))
    notes = found.notes + tuple(note for note in plan.notes if note not in _own_notes(plan))
    return replace(found, levers=plan.levers, receipt=rows, notes=notes)


def _own_notes(plan: Plan) -> tuple[str, ...]:
    """The notes of a plan that follow from its captured step."""
    assert plan.captured is not None
    return plan.captured.all_notes


def _schedule(joined: Joined, before: Joined, schedule: Schedule, known: Sequence[int | None]) -> Schedule:
    """The evaluations of all forwards in order, then of all backwards from the last to the first, each as before."""
    parts = _parts(before, schedule)
    forwards: list[int] = []
    backwards: list[list[int]] = []
    index_of = {owner: index for index, owner in enumerate(joined.owner)}
    for number, at in enumerate(known):
        problem = joined.prices[number].problem
        forward, backward = [*range(problem.forward_ops)], [*range(problem.forward_ops, len(problem.ops))]
        if at is not None and _same_ops(joined, number, before, at):
            forward, backward = parts[at]
        forwards += [index_of[number, local] for local in forward]
        backwards.append([index_of[number, local] for local in backward])
    return Schedule((*forwards, *(index for part in reversed(backwards) for index in part)))


def _parts(joined: Joined, schedule: Schedule) -> list[tuple[list[int], list[int]]]:
    """For each region the ops of its own problem in the order in which they are evaluated: up to the last op of the
    forward, and after it."""
    forwards: list[list[int]] = [[] for _ in joined.prices]
    backwards: list[list[int]] = [[] for _ in joined.prices]
    begun = [priced.problem.forward_ops == 0 for priced in joined.prices]
    for index in schedule.evaluations:
        region, local = joined.owner[index]
        (backwards if begun[region] else forwards)[region].append(local)
        begun[region] |= local == joined.prices[region].problem.forward_ops - 1
    return list(zip(forwards, backwards, strict=True))


def _same_ops(joined: Joined, number: int, before: Joined, at: int) -> bool:
    """Whether two regions have the same operators, whatever their sizes."""
    one, other = joined.prices[number].problem, before.prices[at].problem
    same = one.forward_ops == other.forward_ops and len(one.ops) == len(other.ops)
    return same and all(ours.name == theirs.name for ours, theirs in zip(one.ops, other.ops, strict=True))
