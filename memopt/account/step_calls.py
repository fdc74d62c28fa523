"""The calls of torch's allocator in the forward and backward of a schedule."""

from __future__ import annotations

from collections.abc import Mapping

from memopt.solver import Op, RematProblem, Schedule
from memopt.solver.problem import BlockCall
from memopt.solver.simulator import lifetimes


def step_calls(problem: RematProblem, schedule: Schedule) -> list[BlockCall]:
    """The allocator's calls in one forward and backward. Blocks that die after the last evaluation are left
    allocated. Raises `ValueError` where the schedule breaks a rule."""
    schedule.check(problem)
    evaluations = schedule.evaluations
    born: list[dict[int, int]] = [{} for _ in evaluations]
    dying: list[list[int]] = [[] for _ in evaluations]
    last = len(evaluations) - 1
    versions = lifetimes(problem, evaluations, schedule.offloads)
    for number, (storage, made, dies) in enumerate(versions):
        born[made][storage] = number
        if dies < last or not problem.storages[storage].kept:
            dying[dies].append(number)
    calls: list[BlockCall] = []
    unused = len(versions)
    for position, index in enumerate(evaluations):
        op = problem.ops[index]
        within = _renumbered(problem, op, born[position], unused)
        unused += 1 + max((block for _, block, _ in op.calls), default=0)
        allocated = {number for allocates, number, _ in within if allocates}
        for storage, number in born[position].items():
            if number not in allocated:
                calls.append(BlockCall(True, number, problem.storages[storage].bytes))
        calls += within or _workspace(op, unused - 1)
        calls += (BlockCall(False, number, 0) for number in dying[position])
    return calls


def _workspace(op: Op, number: int) -> list[BlockCall]:
    """The calls for a workspace of which no more is known than its bytes."""
    nbytes = op.workspace_bytes
    return [BlockCall(True, number, nbytes), BlockCall(False, number, nbytes)] if nbytes else []


def _renumbered(problem: RematProblem, op: Op, versions: Mapping[int, int], unused: int) -> list[BlockCall]:
    """The calls within an operator, with the numbers of the versions of the storages that it makes, and with numbers
    from `unused` on for the blocks of its workspace."""
    found = []
    for allocates, block, nbytes in op.calls:
        if block >= len(op.makes):
            found.append(BlockCall(allocates, unused + block, nbytes))
        elif allocates and op.makes[block] in versions:
            storage = op.makes[block]
            found.append(BlockCall(True, versions[storage], problem.storages[storage].bytes))
    return found
