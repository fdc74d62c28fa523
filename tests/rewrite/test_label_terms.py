import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memopt.rewrite.search import _Amounts, _LabelTerms
from memopt.solver.max_flow import ONE, ZERO


def random_terms(number: int) -> tuple[_LabelTerms, list[int]]:
    """Up to five labels with costs of their own, of differing, and of copies that several of them share."""
    state = random.Random(number)
    terms = _LabelTerms()
    labels = [terms.label() for _ in range(state.randint(1, 5))]

    def amounts() -> _Amounts:
        return _Amounts(state.randint(0, 9), state.randint(0, 9), state.randint(0, 9))

    for label in labels:
        terms.add(ZERO, label, amounts())
        terms.add(label, ONE, amounts())
        terms.add(label, state.choice(labels), amounts())
    for _ in range(state.randint(0, 4)):
        demanding = state.choices([*labels, ZERO, ONE], k=state.randint(1, 3))
        terms.shared(state.random() < 0.5, demanding, state.choice([*labels, ZERO, ONE]), amounts())
    return terms, labels


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.3, 2.0]))
def test_the_cut_has_the_least_total_of_all_choices(number: int, price: float) -> None:
    terms, labels = random_terms(number)
    found = terms.problem(price).cut(0.0)
    totals = []
    for choice in itertools.product([False, True], repeat=len(labels)):
        total = terms.total(terms.complete(dict(zip(labels, choice, strict=True))))
        totals.append(total.seconds + price * total.nbytes)
    assert found.cost == pytest.approx(min(totals), rel=1e-9, abs=1e-9)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6))
def test_flipping_is_the_difference_of_totals(number: int) -> None:
    terms, labels = random_terms(number)
    state = random.Random(number + 1)
    chosen = {label: state.random() < 0.5 for label in labels}
    flipped = {**chosen, labels[0]: not chosen[labels[0]]}
    before, after = (terms.total(terms.complete(item)) for item in (chosen, flipped))
    assert np.allclose(terms.flipping(labels[0], terms.complete(chosen)), after - before)


def test_a_cast_is_paid_once_for_all_that_read_it() -> None:
    terms = _LabelTerms()
    value, *readers = (terms.label() for _ in range(4))
    terms.shared(True, readers, value, _Amounts(seconds=1.0))
    low = dict.fromkeys(readers, True)
    assert terms.total(terms.complete({value: False, **low})).seconds == 1.0
    assert terms.total(terms.complete({value: True, **low})).seconds == 0.0
    assert terms.total(terms.complete({value: False})).seconds == 0.0
