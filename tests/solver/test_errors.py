from memopt.solver.errors import Infeasible, SolverError


def test_a_refusal_tells_both_figures_and_the_op() -> None:
    refusal = Infeasible(smallest_peak_bytes=110, floor_bytes=108, dominating_op=3)
    assert (refusal.smallest_peak_bytes, refusal.floor_bytes, refusal.dominating_op) == (110, 108, 3)
    assert str(refusal) == (
        "no schedule fits the budget: the smallest peak found is 110 bytes, "
        "and no schedule can go below 108 bytes, which op 3 needs"
    )


def test_a_solvers_error_is_a_value_error() -> None:
    assert issubclass(SolverError, ValueError)
