import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.models.problems import chain, random_problem, transformer
from memopt.solver.min_cut import CutNetwork, lower_hull, needed_by_backward, offload_cuts
from memopt.solver.problem import Link
from tests.solver.offloading import three_way_choices


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.sampled_from([0.03, 0.1, 0.5]))
def test_the_cut_is_the_cheapest_of_all_three_way_choices(number: int, price: float) -> None:
    state = random.Random(number)
    problem = random_problem(state, state.randint(1, 5))
    offload_seconds = np.array([state.choice([0.0, 0.1, 1.0, 5.0, math.inf]) for _ in problem.storages])
    cut = CutNetwork(problem).cut(price, offload_seconds)
    cheapest = min(three_way_choices(problem, needed_by_backward(problem), price, offload_seconds.tolist()))
    offload_price = sum(offload_seconds[storage] for storage in cut.offloaded)
    assert cut.offloaded <= cut.saved
    assert cut.recompute_seconds + price * cut.saved_bytes + offload_price == pytest.approx(cheapest, abs=1e-6)
    assert cut.bound <= cheapest + 1e-9


def test_what_does_not_fit_the_link_is_not_offloaded() -> None:
    problem = transformer(4)
    network = CutNetwork(problem)
    hull = lower_hull(network)
    forward_seconds = sum(op.seconds for op in problem.ops[: problem.forward_ops])

    def busy(bandwidth: float) -> list[float]:
        cuts = offload_cuts(problem, network, hull, Link(bandwidth))
        return [sum(problem.storages[s].bytes for s in cut.offloaded) / bandwidth for cut in cuts]

    assert all(seconds <= forward_seconds for seconds in busy(1e10))
    assert max(busy(1e13)) > 0


def test_a_fast_link_saves_everything_on_the_host() -> None:
    problem = chain(8)
    network = CutNetwork(problem)
    cuts = offload_cuts(problem, network, lower_hull(network), Link(1e6))
    assert [(sorted(cut.saved), sorted(cut.offloaded), cut.saved_bytes) for cut in cuts] == [
        ([0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6], 0)
    ]
