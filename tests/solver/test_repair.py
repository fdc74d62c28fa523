import random

from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from examples.models.problems import chain, random_problem, random_schedule, text, transformer
from memopt.solver.arrays import arrays_of, to_array, to_schedule
from memopt.solver.lower_bound import floor_bytes
from memopt.solver.min_cut import just_in_time
from memopt.solver.problem import Op, RematProblem, Schedule, Storage
from memopt.solver.repair import repair
from memopt.solver.simulator import simulate


def repaired(problem, schedule, cap_bytes, *exponents):
    evaluations, _ = repair(arrays_of(problem), to_array(schedule), cap_bytes, *exponents)
    return None if evaluations is None else to_schedule(evaluations)


def test_a_chain_at_ever_smaller_caps() -> None:
    problem = chain(6)
    lines = []
    for cap_bytes in (80, 70, 60, 50, 40, 30, 20):
        schedule = repaired(problem, Schedule.save_all(problem), cap_bytes)
        lines.append(f"{cap_bytes}: {None if schedule is None else text(problem, schedule)}")
    assert_expected_inline(
        "\n".join(lines),
        """\
80: 0 1 2 3 4 5 loss.grad 5.grad 4.grad 3.grad 2.grad 1.grad
70: 0 1 2 3 4 5 loss.grad 5.grad 4.grad 3.grad 2.grad 1.grad
60: 0 1 2 3 4 5 loss.grad 5.grad 4.grad 3.grad 2.grad (0) 1.grad
50: 0 1 2 3 4 5 loss.grad 5.grad 4.grad (2) 3.grad 2.grad (0) 1.grad
40: 0 1 2 3 4 5 loss.grad 5.grad 4.grad (0) (1) (2) 3.grad 2.grad (0) 1.grad
30: 0 1 2 3 4 5 loss.grad 5.grad (0) (1) (2) (3) 4.grad (0) (1) (2) 3.grad (0) (1) 2.grad (0) 1.grad
20: None""",
    )


def test_a_chain_of_fifty_in_seven_slots_recomputes_in_levels() -> None:
    problem = chain(50)
    schedule = repaired(problem, Schedule.save_all(problem), 70)
    assert schedule is not None
    assert simulate(problem, schedule).peak_bytes <= 70
    assert max(schedule.recomputed().values()) >= 2


def test_drops_a_long_skip_within_the_forward() -> None:
    storages = tuple(Storage(str(i), size) for i, size in enumerate((10, 50, 10, 10, 1, 1)))
    ops = (
        Op("start", 1.0, (), (0,)),
        Op("skip", 1.0, (0,), (1,)),
        Op("down", 1.0, (1,), (2,)),
        Op("middle", 1.0, (2,), (3,), workspace_bytes=60),
        Op("join", 1.0, (1, 3), (4,)),
        Op("grad", 1.0, (4,), (5,)),
    )
    problem = RematProblem(ops, storages, forward_ops=5)
    assert simulate(problem, Schedule.save_all(problem)).peak_bytes == 130
    schedule = repaired(problem, Schedule.save_all(problem), 90)
    assert schedule is not None
    assert_expected_inline(text(problem, schedule), """start skip down middle (start) (skip) join grad""")


@given(st.integers(0, 10**6), st.floats(0.0, 1.0), st.sampled_from([(1.0, 1.0), (1.0, 0.0), (0.5, 0.5)]))
def test_fits_the_cap_or_says_so(number: int, share: float, exponents: tuple[float, float]) -> None:
    state = random.Random(number)
    problem = random_problem(state, state.randint(1, 12))
    seed = random_schedule(state, problem)
    floor, peak = floor_bytes(problem), simulate(problem, seed).peak_bytes
    cap_bytes = int(floor + share * (peak - floor))
    schedule = repaired(problem, seed, cap_bytes, *exponents)
    if schedule is not None:
        assert simulate(problem, schedule).peak_bytes <= cap_bytes
    assert repaired(problem, Schedule.save_all(problem), 10**9, *exponents) == Schedule.save_all(problem)


def test_a_transformer_from_a_plan_near_its_floor() -> None:
    problem = transformer(12)
    cap_bytes = int(1.05 * floor_bytes(problem))
    blocks = {op.reads[0] for op in problem.ops[: problem.forward_ops] if op.name.endswith("norm1")}
    schedule = repaired(problem, just_in_time(problem, blocks), cap_bytes)
    assert schedule is not None
    assert simulate(problem, schedule).peak_bytes <= cap_bytes
