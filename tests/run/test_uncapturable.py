"""A call that cannot be captured is refused at every step, and captured once, until its model changes."""

from __future__ import annotations

import os
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from memopt.capture import dynamo
from memopt.run import plain_counter
from memopt.run.ledger import Ledger
from memopt.run.recorded_calls import OtherPathTaken, RecordedCalls
from memopt.run.status import State

pytestmark = pytest.mark.plans_always  # the plain steps would fit

EXACT: dict[str, Any] = {"precision": "fp32", "allow": {"recompute"}, "optimizer": None}


class Closed(nn.Module):
    """A forward that nothing may compile, unless it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.open = nn.Linear(8, 8), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(x) if self.open else self.outside(x)

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).pow(2).mean()

    outside = torch.compiler.disable(inside)  # type: ignore[no-untyped-call]


def test_refused_without_a_second_capture_until_the_model_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    captures: list[int] = []
    own = RecordedCalls.run_whole

    def run(calls: RecordedCalls, *given: Any) -> Any:
        captures.append(1)
        return own(calls, *given)

    monkeypatch.setattr(RecordedCalls, "run_whole", run)
    model = memopt.optimize(Closed().train(), 1.0, **EXACT)
    texts = set()
    for _ in range(3):
        with pytest.raises(memopt.CaptureError) as refused:
            model(torch.ones(4, 8))
        texts.add(str(refused.value))
    assert len(texts) == len(captures) == 1
    assert "test_uncapturable.py:" in texts.pop()
    with pytest.raises(memopt.CaptureError):
        model(torch.ones(5, 8))
    assert len(captures) == 2
    model.open = True
    model(torch.ones(4, 8)).backward()
    assert len(captures) == 3
    assert memopt.plan_of(model).regions


class Growing(nn.Module):
    """Runs one more block each time, whatever its inputs and random numbers are."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.calls = {"so far": [0]}  # not among what is taken back when a forward is undone

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls["so far"][0] += 1
        h = self.a(x)
        torch._dynamo.graph_break()
        for _ in range(self.calls["so far"][0]):
            h = self.block(h)
        return h.pow(2).mean()

    def block(self, h: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return self.b(h).tanh()


def test_a_forward_that_never_repeats_itself_names_the_line() -> None:
    model = memopt.optimize(Growing().train(), 1.0, **EXACT)
    with pytest.raises(OtherPathTaken, match=r"test_uncapturable.py:\d+, in forward"):
        model(torch.ones(4, 8))


class GrowingWithState(Growing):
    """As `Growing`, with random numbers and running statistics before the graph breaks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.drop(self.norm(x)))


def test_a_forward_that_is_given_up_leaves_statistics_and_generators_as_they_were() -> None:
    model = memopt.optimize(GrowingWithState().train(), 1.0, **EXACT)
    buffers, state = [buffer.clone() for buffer in model.buffers()], torch.get_rng_state()
    with pytest.raises(OtherPathTaken) as refused:
        model(torch.randn(4, 8, generator=torch.Generator().manual_seed(0)))
    assert refused.value.undone
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, model.buffers(), buffers))


def test_the_line_of_an_error_is_the_innermost_of_the_user() -> None:
    with pytest.raises(RuntimeError) as failed:
        torch.ones(2) @ torch.ones(3)
    assert "tests/run/test_uncapturable.py:" in dynamo.in_brief_with_line(failed.value)
    assert dynamo.in_brief_with_line(ValueError("no line. More.")) == "no line"


class Product(nn.Module):
    """A sparse matrix times features."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(adjacency, self.linear(x)).square().mean()


def test_the_inputs_of_a_plain_step_on_sparse_tensors_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """They stayed until the next batch was counted, beside its step: 5% of the budget that a refusal named."""
    monkeypatch.delenv("MEMOPT_PLAN", raising=False)

    model = Product()
    memopt.optimize(model, 1)
    x, adjacency = torch.randn(16, 8), torch.eye(16).to_sparse()
    model(x, adjacency).backward()
    assert memopt.status(model).state is memopt.State.PLAIN
    with pytest.raises(memopt.CaptureError, match="cannot be shown: input 1 is a sparse COO tensor"):
        memopt.plan_of(model)
    alive = [weakref.ref(one) for one in (x, adjacency)]
    del x, adjacency
    assert [one() for one in alive] == [None, None]


def test_a_plain_step_is_not_refused_for_memory_that_no_tensor_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the first step was counted, `malloc` got memory back, and gave it out again later. A search of the device
    finds no tensors in it, but searches had taken their share of the time, so that the limit counted."""
    monkeypatch.delenv("MEMOPT_PLAN", raising=False)
    monkeypatch.setattr(Ledger, "may_look", lambda _: False)
    own, allocated = plain_counter.count_on_values, [2**30]

    def count(*given: Any, **options: Any) -> Any:
        allocated[0] = 2**30 - 300_000
        return own(*given, **options)

    monkeypatch.setattr(plain_counter, "count_on_values", count)
    monkeypatch.setattr(Ledger, "_reading", lambda _: ("allocator", allocated[0]))
    x, adjacency = torch.randn(4096, 8), torch.eye(4096).to_sparse()
    with pytest.raises(memopt.BudgetError) as refused:
        memopt.optimize(Product(), 2**-11)(x, adjacency)
    allocated[0] = 2**30
    model = memopt.optimize(Product(), refused.value.smallest_bytes / 2**30)
    for _ in range(3):
        model(x, adjacency).backward()
        assert memopt.status(model).state is memopt.State.PLAIN
        allocated[0] = 2**30


@pytest.mark.parametrize("switch", ["stance", "variable", "setting"])
def test_models_are_captured_although_torch_compile_is_switched_off(
    switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the plain model would run beside the budget, and nothing would say so."""
    off: AbstractContextManager[object] = nullcontext()
    if switch == "stance":
        off = torch.compiler.set_stance("force_eager")  # type: ignore[no-untyped-call]
    elif switch == "variable":
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    else:
        off = torch._dynamo.config.patch(disable=True)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    memopt.optimize(model, 1.0, **EXACT)
    with off:
        model(torch.ones(4, 8)).sum().backward()
    assert memopt.status(model).state is State.PLANNED
    assert os.environ.get("TORCHDYNAMO_DISABLE") == ("1" if switch == "variable" else None)
