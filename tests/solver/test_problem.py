import math

import pytest

from memopt.solver.problem import Link, Op, RematProblem, Storage
from tests.solver.small import small_step


def test_each_storage_has_its_producer_and_the_step_its_seconds() -> None:
    assert small_step().producer == (0, 1, 2, 3, 4)
    assert small_step().seconds == 31.0


def test_a_read_before_the_making_and_a_second_making_are_refused() -> None:
    storages = (Storage("x", 1),)
    make, read = Op("make", 1.0, (), (0,)), Op("read", 1.0, (0,), ())
    with pytest.raises(AssertionError, match=r"op read reads storages \[0\] before"):
        RematProblem((read, make), storages, 2)
    with pytest.raises(AssertionError, match=r"op make makes storages \[0\] that another"):
        RematProblem((make, make), storages, 2)
    with pytest.raises(AssertionError):
        RematProblem((make, read), storages, 3)


def test_transfers_take_latency_and_bytes_over_bandwidth() -> None:
    assert Link(25e9).transfer_seconds(50_000_000) == 0.002
    assert Link(10.0, latency_seconds=0.5).transfer_seconds(20) == 2.5
    assert Link(math.inf, latency_seconds=0.5).transfer_seconds(20) == 0.5
    assert Link(0.0).transfer_seconds(20) == math.inf


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"bytes_per_second": -1.0}, "bytes_per_second is 0 or more, not -1"),
        ({"bytes_per_second": math.nan}, "bytes_per_second is 0 or more, not nan"),
        ({"bytes_per_second": 1.0, "latency_seconds": -2.0}, "latency_seconds is 0 or more, not -2"),
        ({"bytes_per_second": 1.0, "host_bytes": -3}, "host_bytes is 0 or more, or None for no limit, not -3"),
    ],
)
def test_refuses_negative_figures(fields: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Link(**fields)  # type: ignore[arg-type]
