import random

from hypothesis import given
from hypothesis import strategies as st

from examples.models.problems import random_problem, random_schedule
from memopt.solver.lower_bound import HeldBytes
from memopt.solver.problem import Op, RematProblem, Schedule, Storage
from memopt.solver.simulator import simulate


def step_by_step(problem: RematProblem) -> list[set[int]]:
    """The definition, op by op."""
    movable = [
        op < problem.forward_ops and problem.ops[op].recomputable and not problem.storages[storage].kept
        for storage, op in enumerate(problem.producer)
    ]
    last_read = {storage: index for index, op in enumerate(problem.ops) for storage in op.reads}
    alive: set[int] = set()
    held = []
    for index, op in enumerate(problem.ops):
        alive = {s for s in alive if problem.storages[s].kept or last_read.get(s, -1) >= index}
        held.append(set(alive))
        alive.update(s for s in op.makes if not movable[s])
    return held


@given(st.integers(0, 10**6))
def test_is_what_the_definition_says(number: int) -> None:
    state = random.Random(number)
    problem = random_problem(state, state.randint(1, 12))
    held = HeldBytes(problem)
    size = [storage.bytes for storage in problem.storages]
    for index, expected in enumerate(step_by_step(problem)):
        op = problem.ops[index]
        assert held[index] == expected
        assert held.bytes[index] == sum(size[s] for s in expected)
        fixed = expected.union(s for s in op.makes if not held.movable[s])
        assert held.own_bytes[index] == op.workspace_bytes + sum(size[s] for s in fixed)
        present = expected.union(op.reads, op.makes)
        assert held.needs[index] == problem.resident_bytes + op.workspace_bytes + sum(size[s] for s in present)


@given(st.integers(0, 10**6))
def test_no_schedule_needs_less_at_any_op(number: int) -> None:
    state = random.Random(number)
    problem = random_problem(state, state.randint(1, 12))
    schedule = random_schedule(state, problem)
    live = simulate(problem, schedule).live_bytes
    first = {op: position for position, op in reversed(list(enumerate(schedule.evaluations)))}
    assert all(live[first[index]] >= need for index, need in enumerate(HeldBytes(problem).needs))


def test_a_result_is_held_from_its_making_and_a_gradient_until_it_is_read() -> None:
    ops = (
        Op("a", 1.0, (), (0, 1)),
        Op("loss", 1.0, (0,), (2,)),
        Op("backward of loss", 1.0, (1, 2), (3,)),
        Op("backward of a", 1.0, (3,), (4,)),
        Op("end", 0.0, (), ()),
    )
    sizes = (3, 5, 7, 11, 13)
    storages = tuple(Storage(str(number), size, kept=number in (2, 4)) for number, size in enumerate(sizes))
    problem = RematProblem(ops, storages, forward_ops=2)
    assert HeldBytes(problem).bytes.tolist() == [0, 0, 7, 7 + 11, 7 + 13, 7 + 13]
    assert simulate(problem, Schedule.save_all(problem)).peak_bytes == max(HeldBytes(problem).needs)
