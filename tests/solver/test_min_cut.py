import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.models.problems import chain, random_problem, transformer
from memopt.solver.min_cut import CutNetwork, lower_hull, needed_by_backward
from tests.solver.reference import closed_choices


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.sampled_from([1e-6, 0.03, 0.1, 0.5, 1e4]))
def test_is_the_cheapest_choice_of_all(number: int, price: float) -> None:
    state = random.Random(number)
    problem = random_problem(state, state.randint(1, 5))
    cut = CutNetwork(problem).cut(price)
    cheapest = min(seconds + price * saved for saved, seconds in closed_choices(problem, needed_by_backward(problem)))
    assert cut.recompute_seconds + price * cut.saved_bytes == pytest.approx(cheapest, rel=1e-9, abs=1e-9)
    assert cut.bound <= cheapest * (1 + 1e-12)
    assert cut.bound == pytest.approx(cheapest, rel=1e-9, abs=1e-6)


def test_saves_nothing_at_a_high_price_and_recomputes_nothing_at_a_low_one() -> None:
    problem = chain(5)
    network = CutNetwork(problem)
    dear, cheap = network.cut(1e6), network.cut(1e-6)
    assert (dear.saved, dear.saved_bytes, dear.recompute_seconds) == (frozenset(), 0, 4.0)
    assert (cheap.saved, cheap.saved_bytes, cheap.recompute_seconds) == (frozenset({0, 1, 2, 3}), 40, 0.0)


def test_seconds_of_microseconds_and_bytes_of_gigabytes_stay_exact() -> None:
    hull = lower_hull(CutNetwork(transformer(12)))
    slopes = [
        (right.recompute_seconds - left.recompute_seconds) / (right.saved_bytes - left.saved_bytes)
        for left, right in itertools.pairwise(hull)
    ]
    assert slopes == sorted(slopes)
    assert hull[-1].recompute_seconds == 0.0
