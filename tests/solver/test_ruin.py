import random

import numpy as np
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from examples.models.problems import chain, random_problem, random_schedule, text
from memopt.solver.arrays import arrays_of, to_array, to_schedule
from memopt.solver.polish import next_reads, ruin
from memopt.solver.problem import Schedule
from memopt.solver.simulator import simulate


@given(st.integers(0, 10**6))
def test_gives_a_schedule_with_the_same_firsts(number: int) -> None:
    state = random.Random(number)
    problem = random_problem(state, state.randint(1, 12))
    before = random_schedule(state, problem)
    after = to_schedule(ruin(arrays_of(problem), to_array(before), np.random.default_rng(number)))
    assert simulate(problem, after).seconds >= simulate(problem, before).seconds
    assert set(before.recomputed()) <= set(after.recomputed())


def test_makes_a_value_again_right_before_it_is_read() -> None:
    problem = chain(5)
    plans = {
        text(
            problem,
            to_schedule(ruin(arrays_of(problem), to_array(Schedule.save_all(problem)), np.random.default_rng(n))),
        )
        for n in range(4)
    }
    assert_expected_inline(
        "\n".join(sorted(plans)),
        """\
0 1 2 3 4 loss.grad 4.grad 3.grad (0) (1) 2.grad (0) 1.grad
0 1 2 3 4 loss.grad 4.grad 3.grad 2.grad 1.grad""",
    )


def test_next_reads_of_a_chain() -> None:
    problem = chain(4)
    # 0 1 2 3 loss.grad 3.grad 2.grad 1.grad: from the third gradient on, what 0 and 1 made is read.
    reads = next_reads(arrays_of(problem), to_array(Schedule.save_all(problem)), 6)
    assert reads[:4].tolist() == [7, 6, -1, -1]
