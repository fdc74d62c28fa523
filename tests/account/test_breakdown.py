"""Every byte of a peak under one heading, and never one more or less than the simulator counts."""

from __future__ import annotations

import random
from dataclasses import replace

from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.models.problems import random_problem, random_schedule
from memopt.account.account import Account, Breakdown, breakdown, live_bytes_by_kind, live_versions
from memopt.solver import Op, RematProblem, Schedule, Storage, simulate

NOTHING = Account(0, 0, 0, 0, 0, 0, 0)
ACCOUNT = Account(
    parameters=1000, buffers=30, inputs=200, optimizer_state=2000, optimizer_temporaries=40, gradients=1000, reserve=16
)


def layers() -> RematProblem:
    """Two layers and a loss; the gradient of the second needs what both made, that of the first what it made."""
    storages = ("a", 300), ("b", 300), ("loss", 4), ("tangent", 4), ("db", 300), ("dw2", 500), ("dw1", 500)
    kept = {"loss", "tangent", "dw2", "dw1"}
    return RematProblem(
        ops=(
            Op("first", 1.0, (), (0,), workspace_bytes=50),
            Op("second", 1.0, (0,), (1,)),
            Op("sum", 1.0, (1,), (2,), recomputable=False),
            Op("tangent", 0.0, (), (3,), recomputable=False),
            Op("second_backward", 1.0, (3, 1, 0), (4, 5), workspace_bytes=70, recomputable=False),
            Op("first_backward", 1.0, (4, 0), (6,), recomputable=False),
        ),
        storages=tuple(Storage(name, size, name in kept) for name, size in storages),
        forward_ops=3,
    )


def text(found: Breakdown) -> str:
    rows = "\n".join(f"{name}: {size}" for name, size in found.rows)
    return f"{found.peak_bytes} at {found.at}\n{rows}"


def test_golden() -> None:
    assert_expected_inline(
        text(breakdown(layers(), Schedule.save_all(layers()), replace(ACCOUNT, gradients=100, optimizer_state=0))),
        """\
2854 at first_backward
parameters: 1000
gradients: 1000
saved activations: 300
backward temporaries: 300
inputs: 200
buffers: 30
reserve: 16
outputs: 8""",
    )


def test_what_is_evaluated_again_has_a_row_of_its_own() -> None:
    schedule = Schedule((0, 1, 2, 3, 0, 1, 4, 5))
    schedule.check(layers())
    assert_expected_inline(
        text(breakdown(layers(), schedule, replace(NOTHING, gradients_held=True, gradients=7, other_forwards=9))),
        """\
1624 at first_backward
gradients: 1007
recomputed activations: 300
backward temporaries: 300
forwards in waiting: 9
outputs: 8""",
    )


def test_the_optimizer_step_may_be_the_peak() -> None:
    account = replace(ACCOUNT, gradients=1500, optimizer_temporaries=900)
    assert_expected_inline(
        text(breakdown(layers(), Schedule.save_all(layers()), account)),
        """\
5650 at optimizer.step()
optimizer state: 2000
gradients: 1500
parameters: 1000
optimizer temporaries: 900
inputs: 200
buffers: 30
reserve: 16
outputs: 4""",
    )


def test_by_kind_at_each_moment_of_the_forward() -> None:
    schedule = Schedule.save_all(layers())
    moments = [live_bytes_by_kind(layers(), schedule, position) for position in range(4)]
    assert_expected_inline(
        "\n".join(map(str, moments)),
        """\
{'saved activations': 300, 'workspace': 50}
{'saved activations': 600, 'workspace': 0}
{'saved activations': 600, 'outputs': 4, 'workspace': 0}
{'saved activations': 600, 'outputs': 8, 'workspace': 0}""",
    )


def test_a_kept_result_that_is_evaluated_again_is_kept_once() -> None:
    ops = (Op("a", 1.0, (), (0,)), Op("b", 1.0, (0,), (1,)), Op("db", 1.0, (0,), (2,)), Op("end", 1.0, (), (3,)))
    storages = (Storage("a", 100, kept=True), Storage("b", 1), Storage("db", 1), Storage("end", 500))
    problem = RematProblem(ops, storages, forward_ops=2)
    schedule = Schedule((0, 1, 0, 2, 3))
    assert sorted(live_versions(problem, schedule, 3)) == [(0, 0), (0, 2), (2, 3)]
    assert sorted(live_versions(problem, schedule, 4)) == [(0, 0), (3, 4)]
    assert breakdown(problem, schedule, NOTHING).peak_bytes == 600


def test_outputs_are_what_the_forward_keeps() -> None:
    assert layers().output_bytes == 4


@given(st.integers(0, 10**9), st.integers(2, 12), st.booleans())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_rows_sum_to_the_peak(seed: int, forward_ops: int, gradients_held: bool) -> None:
    chance = random.Random(seed)
    problem = random_problem(chance, forward_ops)
    schedule = random_schedule(chance, problem)
    sizes = (chance.randint(0, 60) for _ in range(7))
    others = {"other_forwards": chance.choice([0, 9])}
    account = Account(*sizes, gradients_held=gradients_held, **others)
    found = breakdown(problem, schedule, account)
    simulated = simulate(replace(problem, resident_bytes=account.resident_bytes), schedule)
    assert found.peak_bytes == max(simulated.peak_bytes, account.optimizer_step_bytes(problem.output_bytes))
    assert sum(size for _, size in found.rows) == found.peak_bytes
    for position, live in enumerate(simulated.live_bytes):
        rows = live_bytes_by_kind(problem, schedule, position)
        assert sum(rows.values()) == live - account.resident_bytes
