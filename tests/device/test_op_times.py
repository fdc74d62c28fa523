"""The operators that make up most of a step are timed by themselves."""

from __future__ import annotations

import pytest
import torch

from memopt.compat.fakes import FakeTensorMode
from memopt.device import op_times
from memopt.device.op_call import OpCall, describe
from memopt.device.op_times import call_key, dominant_calls, time_calls

aten = torch.ops.aten
CPU = torch.device("cpu")


def mm(size: int) -> OpCall:
    matrix = torch.empty(size, size, device="meta")
    return describe(aten.mm.default, (matrix, matrix), {}, matrix)


def embedding() -> OpCall:
    table, indices = torch.empty(40, 8, device="meta"), torch.empty(3, 5, dtype=torch.int64, device="meta")
    return describe(aten.embedding.default, (table, indices), {}, torch.empty(3, 5, 8, device="meta"))


def test_the_fewest_calls_that_make_up_the_share() -> None:
    seconds = {mm(1): 1.0, mm(2): 60.0, mm(3): 9.0, mm(4): 30.0}
    assert dominant_calls(seconds, 0.9) == (mm(2), mm(4))
    assert dominant_calls(seconds, 0.91) == (mm(2), mm(4), mm(3))
    assert dominant_calls({}) == ()


def test_a_larger_matmul_takes_longer() -> None:
    found = time_calls({mm(16): 1e-6, mm(400): 1e-3}, CPU)
    assert 0 < found[mm(16)] < found[mm(400)] < 1


def test_what_cannot_run_by_itself_is_left_out() -> None:
    singular = describe(
        aten.linalg_inv_ex.default,
        (torch.empty(2, 3, device="meta"),),
        {"check_errors": True},
        (torch.empty(2, 3, device="meta"), torch.empty((), device="meta")),
    )
    matrix = torch.empty(2, 2, device="meta")
    collective = describe(torch.ops._c10d_functional.wait_tensor.default, (matrix,), {}, matrix)
    huge = describe(aten.neg.default, (torch.empty(2**31, device="meta"),), {}, torch.empty(2**31, device="meta"))
    assert set(time_calls({singular: 1e-6, collective: 1e-6, huge: 1e-6, mm(8): 1e-6}, CPU)) == {mm(8)}


def test_no_more_is_timed_than_the_limit_allows() -> None:
    assert set(time_calls({mm(8): 1e-6, mm(9): 100.0}, CPU, limit_seconds=10)) == {mm(8)}
    assert time_calls({mm(8): 1e-6}, CPU, limit_seconds=0) == {}


def test_indices_are_valid_and_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(op_times, "_alone", lambda run: seen.append(run()) or 1.0)
    assert time_calls({embedding(): 1e-6}, CPU) == {embedding(): 1.0}
    rows = {tuple(row) for row in seen[0].flatten(0, 1).tolist()}
    assert len(rows) == 8, "as many rows as are valid in any dimension of the table"


def test_random_states_and_modes_of_the_caller_stay_out_of_it() -> None:
    before = torch.get_rng_state()
    x = torch.empty(4, 4, device="meta")
    dropout = describe(aten.native_dropout.default, (x, 0.5, True), {}, (x, x.bool()))
    with FakeTensorMode():
        assert time_calls({dropout: 1e-6}, CPU)[dropout] > 0
    assert torch.equal(torch.get_rng_state(), before)


def test_a_call_has_the_same_key_everywhere() -> None:
    assert call_key(mm(3)) == (
        "aten.mm.default (TensorSpec(size=(3, 3), stride=(3, 1), dtype=torch.float32), "
        "TensorSpec(size=(3, 3), stride=(3, 1), dtype=torch.float32)) ()"
    )
