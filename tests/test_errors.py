from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest

from memopt.errors import GIB, BudgetError, Way, as_text_has_it, round_up, would_do
from memopt.planning.options import budget_bytes
from memopt.run.safety_net import StepMemoryError
from memopt.solver.protocol import Infeasible
from passes.graph_pass import PassError
from passes.graphs.verify import VerifyError


@pytest.mark.parametrize(
    ("gb", "text"), [(1.0, "1"), (0.1234561, "0.123457"), (12.0000001, "12.0001"), (2**-17, "0.0000076294")]
)
def test_rounding_up_never_gives_too_little(gb: float, text: str) -> None:
    assert round_up(gb) == text
    assert float(text) >= gb


@pytest.mark.parametrize("nbytes", [1, 1023, 10**6 + 7, 2_651_234_567, 80 * 1024**3 - 1])
def test_the_bytes_of_a_figure_in_a_message_are_what_a_user_types(nbytes: int) -> None:
    named = as_text_has_it(nbytes)
    assert nbytes <= named <= 1.0001 * nbytes + 1
    assert budget_bytes(float(round_up(named / GIB))) == named == as_text_has_it(named)


def test_the_message_names_both_budgets_and_what_would_help() -> None:
    ways = [
        Way("SGD(…)", GIB // 2, "it learns otherwise", sentence="with SGD this budget would do"),
        Way("allow={'slow'}", GIB // 4, "long words " * 12, 0.0123, "with 'slow' in allow this budget would do"),
        Way("AdamW(…, fused=True)", 3 * GIB // 4, "the same numbers", 0.0, "with fused=True this budget would do"),
    ]
    error = BudgetError(GIB, 3 * GIB // 2, "activations (1.2 GB)", further=["a batch of 4 fits"], ways=ways)
    assert str(error).splitlines() == [
        "a budget of 1 GB is too small for this step: the smallest that works is 1.5 GB, dominated by activations "
        "(1.2 GB)",
        "missing: 0.5 GB, 50% of the budget",
        "note: a batch of 4 fits",
        "ways out, the cheapest first:",
        "  peak        time a step  what to type, and what it changes",
        "  0.75 GB     none         AdamW(…, fused=True)",
        "                             the same numbers",
        "  0.25 GB     +12.3 ms     allow={'slow'}",
        "                             long words long words long words long words long",
        "                             words long words long words long words long words",
        "                             long words long words long words",
        "  0.5 GB      not priced   SGD(…)",
        "                             it learns otherwise",
    ]
    assert error.sentence == str(error).splitlines()[0]
    assert error.ways == (ways[2], ways[1], ways[0])
    assert error.further == ("a batch of 4 fits", *(way.sentence for way in error.ways))
    more = error.adding("and a thing")
    assert (more.ways, more.notes) == (error.ways, ("a batch of 4 fits", "and a thing"))
    assert (error.budget_gb, error.smallest_gb, error.dominated_by) == (1.0, 1.5, "activations (1.2 GB)")
    assert error.proposals == ()
    assert error.smallest_with == {}


def test_a_budget_that_works_but_may_not_be_the_smallest() -> None:
    error = BudgetError(GIB, 2 * GIB, "the parameters", least=False)
    first, missing = str(error).splitlines()
    assert first == "a budget of 1 GB is too small for this step: 2 GB leaves room for the parameters"
    assert missing == "missing: at most 1 GB, 100% of the budget"
    assert error.ways == error.further == ()


def test_a_change_that_helps_names_no_budget_below_the_one_given() -> None:
    assert would_do(899, 1000) == "this budget would do, with 10.1% to spare"
    assert would_do(1000, 1000) == "this budget would do, with 0.0% to spare"


MADE = {
    BudgetError: lambda: BudgetError(
        GIB, 2 * GIB, "activations", least=False, further=["a note"], ways=[Way("x", GIB, "y")], untried=["z"]
    ),
    StepMemoryError: lambda: StepMemoryError("no memory", undone=True),
    Infeasible: lambda: Infeasible(3, 2, 1),
    PassError: lambda: PassError("pass", None, "problem", "mend"),
    VerifyError: lambda: VerifyError("node", "problem", "mend"),
}
CARRIERS = {"Insists", "RegionRecorded", "HoldsMore", "NothingToRewrite"}
"""Exceptions that carry graphs to where they are caught, which is always within memopt."""


def errors(kind: type[BaseException]) -> Iterator[type[BaseException]]:
    for inner in kind.__subclasses__():
        if inner.__module__.split(".")[0] in ("memopt", "passes") and inner.__name__ not in CARRIERS:
            yield inner
        yield from errors(inner)


def test_every_error_comes_back_from_another_process() -> None:
    found = set(errors(BaseException))
    assert found > MADE.keys()
    for kind in found:
        error = MADE.get(kind, lambda kind=kind: kind("text"))()  # type: ignore[misc]
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), vars(again)) == (kind, str(error), vars(error))
