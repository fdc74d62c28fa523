import random

from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from examples.models.problems import chain, random_problem, random_schedule, text
from memopt.solver.arrays import arrays_of, to_array, to_schedule
from memopt.solver.min_cut import just_in_time
from memopt.solver.polish import polish
from memopt.solver.problem import Schedule
from memopt.solver.simulator import simulate


def polished(problem, schedule, cap_bytes, length_exponent=0.5):
    return to_schedule(polish(arrays_of(problem), to_array(schedule), cap_bytes, length_exponent))


def test_spends_what_is_left_and_no_more() -> None:
    problem = chain(8)
    schedule = just_in_time(problem, {3})
    assert simulate(problem, schedule).peak_bytes == 54
    lines = []
    for cap_bytes in (54, 64, 74):
        better = polished(problem, schedule, cap_bytes)
        lines.append(f"{cap_bytes}: {text(problem, better)}, {simulate(problem, better).peak_bytes} bytes")
    assert_expected_inline(
        "\n".join(lines),
        """\
54: 0 1 2 3 4 5 6 7 loss.grad 7.grad 6.grad 5.grad 4.grad (0) (1) (2) 3.grad 2.grad 1.grad, 54 bytes
64: 0 1 2 3 4 5 6 7 loss.grad 7.grad 6.grad 5.grad 4.grad (1) (2) 3.grad 2.grad 1.grad, 64 bytes
74: 0 1 2 3 4 5 6 7 loss.grad 7.grad 6.grad 5.grad 4.grad (2) 3.grad 2.grad 1.grad, 74 bytes""",
    )


def test_drops_what_only_the_dropped_needed() -> None:
    problem = chain(5)
    again_and_again = Schedule((0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 6, 0, 1, 2, 7, 0, 1, 8, 0, 9))
    assert polished(problem, again_and_again, 10**6) == Schedule.save_all(problem)


@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.5, 1.0]))
def test_stays_within_the_cap_and_never_adds(number: int, length_exponent: float) -> None:
    state = random.Random(number)
    problem = random_problem(state, state.randint(1, 12))
    schedule = random_schedule(state, problem)
    before = simulate(problem, schedule)
    cap_bytes = before.peak_bytes + state.choice([0, 0, 5, 20, 1000])
    after = simulate(problem, polished(problem, schedule, cap_bytes, length_exponent))
    assert after.peak_bytes <= cap_bytes
    assert after.added_seconds <= before.added_seconds


@given(st.integers(0, 10**6))
def test_leaves_nothing_that_could_be_dropped_alone(number: int) -> None:
    state = random.Random(number)
    problem = random_problem(state, state.randint(1, 8))
    schedule = random_schedule(state, problem)
    cap_bytes = simulate(problem, schedule).peak_bytes + state.choice([0, 5, 20])
    after = polished(problem, schedule, cap_bytes).evaluations
    for position in range(len(after)):
        if after[position] in after[:position]:
            fewer = Schedule(after[:position] + after[position + 1 :])
            assert simulate(problem, fewer).peak_bytes > cap_bytes
