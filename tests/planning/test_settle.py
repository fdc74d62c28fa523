"""Steps come right after the operators that they wait for, or at the end of the backward where recomputation reads the
parameter later."""

from __future__ import annotations

from dataclasses import replace

import torch

from memopt.device import hardware
from memopt.optimizers import Stepping
from memopt.planning.joined import Joined, place_steps, solve_stepping
from memopt.planning.planner import Request, smallest, solve_with_steps
from memopt.planning.priced_step import PricedStep
from memopt.planning.schedule_parts import split
from memopt.solver import Offload, Schedule, Solution, simulate
from tests.planned import ACCOUNT, captured, reading_late, region

STEPPING = Stepping(((((16, 16), (16, 1), torch.float32), 512),))
STEPPED = replace(ACCOUNT, gradients=0, optimizer_temporaries=0)


def joined(step: PricedStep) -> Joined:
    return step.priced_for(stepping=STEPPING).problem


def by_name(problem: Joined, *names: str) -> tuple[int, ...]:
    names_of = {op.name.partition(" ")[0]: index for index, op in enumerate(problem.problem.ops)}
    return tuple(names_of[name] for name in names)


def names(problem: Joined, schedule: Schedule) -> list[str]:
    return [problem.problem.ops[index].name.partition(" ")[0] for index in schedule.evaluations]


def late(problem: Joined) -> Schedule:
    """A schedule that recomputes the first layer at the end of the backward, after its weight is stepped."""
    order = list(range(len(problem.problem.ops)))
    end = order.index(by_name(problem, "mul")[0])
    return Schedule((*order[:end], *by_name(problem, "mm", "gelu"), *order[end:]))


def test_a_weight_that_is_read_after_its_step_is_found() -> None:
    problem = joined(captured(reading_late()))
    schedule = late(problem)
    schedule.check(problem.problem)
    assert place_steps(problem, schedule) == (schedule, {0})


def test_such_a_weight_is_stepped_at_the_end() -> None:
    problem = joined(captured(reading_late()))

    def solve(joined: Joined) -> Solution:
        schedule = late(joined)
        return Solution(schedule, simulate(joined.problem, schedule).peak_bytes, 0.0, 0.0, "by hand")

    found, solution = solve_stepping(problem, solve)
    assert found.left == {0}
    assert [*found.steps.values()] == [1]
    assert solution.peak_bytes == simulate(found.problem, solution.schedule).peak_bytes
    assert found is problem.leaving(frozenset({0}))  # type: ignore[misc]


def test_a_step_moves_up_to_the_operator_that_it_waits_for() -> None:
    problem = joined(captured(region(2)))
    order = list(range(len(problem.problem.ops)))
    step = order.index(by_name(problem, "step_of_input_1")[0])
    schedule = Schedule((*order[:step], *by_name(problem, "mm"), *order[step:]))
    moved, wrong = place_steps(problem, schedule)
    assert not wrong
    assert names(problem, moved)[step - 1 : step + 2] == ["mm_3", "step_of_input_1", "mm"]
    assert place_steps(problem, moved) == (moved, frozenset())


def test_offloads_keep_their_neighbours() -> None:
    problem = joined(captured(region(2)).priced_for(hardware=replace(hardware("h100"), least_moved_bytes=0)))
    order = list(range(len(problem.problem.ops)))
    step = order.index(by_name(problem, "step_of_input_1")[0])
    (gelu,) = by_name(problem, "gelu")
    storage = problem.problem.ops[by_name(problem, "mm")[0]].makes[0]
    # "mm" of the first layer is offloaded until the recomputed "gelu" that comes before the step.
    evaluations = (*order[:step], gelu, *order[step:])
    schedule = Schedule(evaluations, (Offload(storage, gelu, gelu + 1, step - 1, step),))
    schedule.check(problem.problem)
    moved, wrong = place_steps(problem, schedule)
    assert not wrong
    assert names(problem, moved)[step - 1 : step + 2] == ["mm_3", "step_of_input_1", "gelu"]
    (offload,) = moved.offloads
    assert (offload.fetch_from, offload.back_before) == (step - 1, step + 1)


def test_a_plan_says_which_inputs_are_stepped() -> None:
    step = captured(region(3)).priced_for(stepping=STEPPING)
    problem, solution = solve_with_steps(step.problem, Request(STEPPED, 10**9))
    (schedule,) = split(problem, step.traced, solution.schedule)
    assert schedule.steps == (0, 1, 2)
    assert all(name and "step" not in name for name in schedule.evaluations)
    assert step.stepping_as([schedule.steps]).problem.problem == problem.problem
    assert step.stepping_as([(1,)]).problem.steps.keys() != problem.steps.keys()


def test_the_smallest_budget_works() -> None:
    for layers in (2, 5):
        problem = joined(captured(region(layers)))
        least = smallest(problem, STEPPED)[0]
        solve_with_steps(problem, Request(STEPPED, least))
        plain = captured(region(layers)).problem
        assert least < smallest(plain, ACCOUNT)[0]


def test_several_regions_step_at_their_ends() -> None:
    """Autograd gets the gradients of a region when its backward ends, and steps then."""
    step = captured(region(2, loss=False), region(2, first=2)).priced_for(stepping=STEPPING)
    problem = step.problem
    assert not problem.steps
    ends = [op for op in problem.problem.ops if op.name.startswith("hand_over_gradients")]
    assert [op.workspace_bytes for op in ends] == [512, 512]
    assert step.priced_for(stepping=None).problem.problem.ops[-1].workspace_bytes == 0
