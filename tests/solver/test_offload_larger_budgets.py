import pytest

from memopt.solver.arrays import arrays_of
from memopt.solver.offload import OffloadPortfolio
from memopt.solver.offload_search import OffloadSearch
from memopt.solver.portfolio import Portfolio
from memopt.solver.problem import Link
from memopt.solver.protocol import Effort
from tests.solver.small import SAVE_ALL, small_step


@pytest.mark.parametrize("has_plain", [True, False])
@pytest.mark.parametrize("effort", ["fast", "default"])
def test_the_plan_of_a_larger_budget_fits_with_an_offload(has_plain: bool, effort: Effort) -> None:
    problem, link = small_step(), Link(8.0)
    portfolio = Portfolio(problem)
    search = OffloadSearch(arrays_of(problem), 111, link)
    plain = portfolio.solve(111) if has_plain else None
    assert plain is None or plain.added_seconds == 1.0
    OffloadPortfolio(problem, portfolio)._improve(search, plain, effort, 1.0)
    assert search.best is not None
    assert tuple(search.best.evaluations) == SAVE_ALL
    assert search.best.added_seconds == 0.5  # the copy back of 4 bytes begins after d
    assert search.best.offloads[:, 0].tolist() == [0]
