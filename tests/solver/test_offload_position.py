import math

import pytest

from memopt.solver.lower_bound import HeldBytes, _Position
from memopt.solver.problem import Link
from tests.solver.small import small_step


def at_d() -> _Position:
    """The moment of d, which needs 108 bytes; a, of 4 bytes and 1 second, is held, recomputed or on the host then."""
    return _Position(small_step(), 3, HeldBytes(small_step()))


@pytest.mark.parametrize(
    ("budget_bytes", "link", "seconds"),
    [
        (112, Link(0.0), 0.0),
        (108, Link(0.0), 1.0),
        (107, Link(0.0), math.inf),
        (108, Link(math.inf), 0.0),
        (108, Link(math.inf, host_bytes=0), 1.0),
        (108, Link(1.0), 0.0),  # 4 seconds of transfers hide behind 7
        (108, Link(0.25), 1 - 1.75 / 4),  # 1.75 bytes can be out by then, at 1 second for 4 bytes
    ],
)
def test_the_bound_of_one_moment(budget_bytes: int, link: Link, seconds: float) -> None:
    assert at_d().added_seconds(budget_bytes, link) == pytest.approx(seconds, abs=1e-9)
