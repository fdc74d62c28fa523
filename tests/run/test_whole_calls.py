"""Calls that are one region: recorded once, emitted for each situation."""

from __future__ import annotations

import contextvars

import pytest
import torch

from memopt.capture.dynamo import GraphBreak
from tests.run.pieces import calls_of, gradients, latest, make

pytestmark = pytest.mark.plans_always  # the plain steps would fit

X = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
CALL = ((X,), {})


def test_capture_records_a_call_and_does_not_run_it() -> None:
    model = make()
    call = calls_of(model).recorded.capture_whole(CALL)
    assert call is not None
    assert call.whole
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_run_after_the_capture_finds_the_call_recorded() -> None:
    model = make()
    calls = calls_of(model)
    call = calls.recorded.capture_whole(CALL)
    loss = calls(X)
    assert calls.recorded.capture_whole(CALL) is call
    for found, expected in zip(gradients(model, loss), gradients(model, model(X)), strict=True):
        assert torch.equal(found, expected)


def test_another_situation_gets_code_of_its_own() -> None:
    model = make()
    calls = calls_of(model)
    plans = []
    for _ in range(3):
        calls(X).backward()
        plans.append(latest(calls))
    assert not plans[0].account.gradients_held  # type: ignore[union-attr]
    assert plans[1].account.gradients_held  # type: ignore[union-attr]
    assert plans[1] is plans[2]


def test_steady_steps_leave_no_context_variable_behind() -> None:
    """Context variables of functions are never freed: torch's `config.patch` makes one each time."""
    calls = calls_of(make())
    before = []
    for _ in range(5):
        calls(X).backward()
        before.append(len(contextvars.copy_context()))
    assert before[2] == before[4]


def test_a_graph_break_is_said_and_nothing_runs() -> None:
    with pytest.raises(GraphBreak):
        calls_of(make(breaks=True)).recorded.capture_whole(CALL)


def test_tensors_keep_their_own_marks_of_changing_sizes() -> None:
    def marks(batch: torch.Tensor) -> list[set[int]]:
        kinds = ("dynamic", "weak_dynamic", "propagated_dynamic")
        return [set(getattr(batch, f"_dynamo_{kind}_indices", ())) for kind in kinds]

    calls = calls_of(make())
    batches = [X[:48].clone(), X[:56].clone(), X[:40].clone()]
    torch._dynamo.maybe_mark_dynamic(batches[1], 1)
    before = [*map(marks, batches)]
    for batch in batches:
        calls(batch).backward()
    assert calls.recorded._first.has_symbols
    assert [*map(marks, batches)] == before


def test_sizes_that_another_model_of_the_class_was_called_with_are_no_symbols() -> None:
    for rows in (48, 64, 40):
        call = calls_of(make()).recorded.capture_whole(((X[:rows],), {}))
        assert call is not None
        assert not call.regions[0].changing
