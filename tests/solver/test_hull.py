import itertools
import random

import pytest
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.models.problems import random_problem, transformer
from memopt.solver.min_cut import CutNetwork, lower_hull, needed_by_backward
from tests.solver.reference import closed_choices


@settings(max_examples=60)
@given(st.integers(0, 10**6))
def test_no_choice_lies_below_the_hull(number: int) -> None:
    state = random.Random(number)
    problem = random_problem(state, state.randint(1, 5))
    hull = lower_hull(CutNetwork(problem))
    assert [cut.saved_bytes for cut in hull] == sorted({cut.saved_bytes for cut in hull})
    choices = list(closed_choices(problem, needed_by_backward(problem)))
    for left, right in itertools.pairwise(hull):
        assert left.recompute_seconds > right.recompute_seconds
        slope = (right.recompute_seconds - left.recompute_seconds) / (right.saved_bytes - left.saved_bytes)
        for saved_bytes, seconds in choices:
            line = left.recompute_seconds + slope * (saved_bytes - left.saved_bytes)
            assert seconds >= line - 1e-6
    assert hull[0].saved_bytes == min(saved_bytes for saved_bytes, _ in choices)
    assert hull[-1].recompute_seconds == pytest.approx(min(seconds for _, seconds in choices), abs=1e-6)


def test_the_limit_keeps_the_ends() -> None:
    network = CutNetwork(transformer(2))
    whole, few = lower_hull(network), lower_hull(network, limit=4)
    assert len(few) <= 4
    assert (few[0].saved_bytes, few[-1].saved_bytes) == (whole[0].saved_bytes, whole[-1].saved_bytes)


def test_a_transformer_of_two_layers() -> None:
    problem = transformer(2)
    lines = [
        f"{c.saved_bytes:>11,} bytes {c.recompute_seconds * 1e6:>7.1f} us" for c in lower_hull(CutNetwork(problem))
    ]
    assert_expected_inline(
        "\n".join(lines),
        """\
          0 bytes   708.5 us
 25,165,824 bytes   568.7 us
 37,748,736 bytes   536.5 us
113,246,208 bytes   361.4 us
139,198,464 bytes   314.8 us
176,947,200 bytes   247.7 us
189,530,112 bytes   227.7 us
290,193,408 bytes    87.9 us
416,022,528 bytes    29.3 us
479,264,768 bytes     0.0 us""",
    )
