import pytest

from memopt.solver.problem import Op, RematProblem, Storage
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
