"""Batches of many lengths: one capture with symbolic sizes, a few plans, every step within the budget and bitwise."""

from __future__ import annotations

import copy
import gc
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.export import Dim

import memopt
from examples.models.families import BY_NAME, loss_of
from memopt.capture.region import RecordedRegion
from memopt.run import recorder
from memopt.run.recorded_calls import RecordedCalls
from memopt.run.sizes import PlansBySize
from memopt.solver import Portfolio

pytestmark = pytest.mark.plans_always  # the plain steps would fit

EXACT: dict[str, Any] = {"precision": "fp32", "allow": {"recompute", "reinplace"}}
VOCABULARY = 128


def batch_of(samples: int, length: int) -> dict[str, Any]:
    ids = torch.randint(VOCABULARY, (samples, length), generator=torch.Generator().manual_seed(length))
    return {"input_ids": ids, "labels": ids}


def tight_budget(model: nn.Module, batch: dict[str, Any]) -> float:
    plan = memopt.plan(copy.deepcopy(model), 1, batch, **EXACT)
    return (plan.smallest_gb() + plan.plain_peak_gb) / 2


def steps_are_bitwise(model: nn.Module, plain: nn.Module, shapes: list[tuple[int, int]], budget: float) -> None:
    """Train both on batches of these shapes; losses and parameters are equal, and peaks within the budget."""
    optimizers = [torch.optim.AdamW(trained.parameters(), 1e-3) for trained in (model, plain)]
    for number, shape in enumerate(shapes):
        loss_of(model(**batch_of(*shape))).backward()  # plans: the meter would note every operator of that
        model.zero_grad()
        losses = []
        for trained, optimizer in zip((model, plain), optimizers, strict=True):
            resident = sum(p.untyped_storage().nbytes() for p in plain.parameters())
            torch.manual_seed(number)
            with memopt.measure_peak() as peak:
                loss = loss_of(trained(**batch_of(*shape)))
                loss.backward()
                optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if trained is model:
                assert 3 * resident + peak.allocated_bytes <= budget * 2**30
        assert losses[0] == losses[1]
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2-sdpa", "llama"])
def test_lengths_make_two_captures(name: str, captures: list[RecordedRegion]) -> None:
    model = BY_NAME[name].make()
    plain = copy.deepcopy(model)
    budget = tight_budget(model, batch_of(4, 96))
    captures.clear()
    memopt.optimize(model, budget, **EXACT)
    shapes = [(4, 48), (4, 64), (4, 32), (3, 70), (4, 96), (1, 5), (4, 90), (2, 33)]
    steps_are_bitwise(model, plain, shapes, budget)
    assert len(captures) <= 3  # one with fixed sizes, one with symbols, one for the batch of a single sample


@pytest.mark.slow
def test_declared_sizes_make_one_capture(captures: list[RecordedRegion]) -> None:
    model = BY_NAME["gpt2-sdpa"].make()
    plain = copy.deepcopy(model)
    budget = tight_budget(model, batch_of(4, 96))
    captures.clear()
    sizes = {0: Dim("samples", max=4), 1: Dim("length", max=96)}
    dynamic = {"input_ids": sizes, "labels": sizes}
    memopt.optimize(model, budget, example_inputs=batch_of(4, 48), dynamic=dynamic, **EXACT)
    assert "input_ids.shape[1] ≤ 96 (seen 48)" in memopt.plan_of(model).table()
    assert memopt.plan_of(model).ceiling_bytes <= budget * 2**30
    steps_are_bitwise(model, plain, [(4, 96), (3, 50), (4, 7), (2, 96)], budget)
    assert len(captures) == 1


@pytest.mark.slow
def test_a_plan_for_declared_sizes_is_for_the_largest() -> None:
    model = BY_NAME["gpt2-sdpa"].make()
    dynamic = {"input_ids": {1: Dim("length", max=96)}, "labels": {1: Dim("length", max=96)}}
    plan = memopt.plan(model, 1, batch_of(4, 48), dynamic=dynamic, **EXACT)
    largest = memopt.plan(model, 1, batch_of(4, 96), **EXACT)
    assert plan.predicted_peak_gb == largest.predicted_peak_gb


@pytest.mark.slow
def test_a_planned_call_keeps_little_of_its_planning() -> None:
    """One joint graph and Dynamo's graph for each capture; no nodes that were erased, no emitted graphs, no solvers."""

    def alive(kind: type) -> int:
        gc.collect()
        return sum(type(found) is kind for found in gc.get_objects())

    model = BY_NAME["gpt2-sdpa"].make()
    budget = tight_budget(model, batch_of(4, 96))
    kinds = (fx.Node, Portfolio)
    before = [*map(alive, kinds)]
    memopt.optimize(model, budget, **EXACT)
    for length in (48, 64):
        loss_of(model(**batch_of(4, length))).backward()
    nodes, solvers = (now - then for now, then in zip(map(alive, kinds), before, strict=True))
    plan = memopt.plan_of(model)
    assert plan.captured is not None
    assert nodes < 4 * len(plan.captured.regions[0].module.graph.nodes)
    assert solvers == 0
    assert plan.smallest_gb() < budget  # solved again


@pytest.mark.slow
def test_gradients_held_need_no_capture(captures: list[RecordedRegion]) -> None:
    model = BY_NAME["gpt2-sdpa"].make()
    memopt.optimize(model, tight_budget(model, batch_of(4, 96)), **EXACT)
    captures.clear()
    for length in (48, 64, 56, 70, 33):
        loss_of(model(**batch_of(4, length))).backward()
    assert len(captures) == 2


@pytest.mark.slow
def test_short_batches_are_not_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans for smaller sizes are made on the same capture once they pay: at once where planning takes no time."""
    add = PlansBySize.add
    monkeypatch.setattr(PlansBySize, "add", lambda plans, ceiling, emitted, _: add(plans, ceiling, emitted, 0.0))
    model = BY_NAME["gpt2-sdpa"].make()
    budget = memopt.plan(copy.deepcopy(model), 1, batch_of(4, 96), **EXACT).smallest_gb() * 1.1
    memopt.optimize(model, budget, **EXACT)
    added = []
    for length in (90, 96, 20, 20, 20, 20, 96):
        loss_of(model(**batch_of(4, length))).backward()
        model.zero_grad()
        added.append(memopt.plan_of(model).added_time)
    assert added[1] > 0.1
    assert added[5] < added[1] / 2
    assert added[6] == added[1]


class Insists(nn.Module):
    """A model whose code takes its inputs' length as a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths = {8: 1.0, 16: 0.5, 24: 0.25}
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x).relu() * self.lengths[x.shape[1]]).pow(2).mean()


def train_both(model: nn.Module, plain: nn.Module, lengths: list[int]) -> None:
    """Run a model and its plain copy on inputs of these lengths; losses and gradients are equal."""
    for length in lengths:
        x = torch.randn(4, length, 8)
        loss, expected = model(x), plain(x)
        assert loss.item() == expected.item()
        loss.backward()
        expected.backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]


def test_a_model_that_insists_on_its_sizes_is_captured_for_each(captures: list[RecordedRegion]) -> None:
    model = Insists().train()
    plain = copy.deepcopy(model)
    memopt.optimize(model, 1, **EXACT)
    with pytest.warns(
        UserWarning, match=r"needs input 0\.shape\[1\] to be a constant at .*test_changing_sizes.py:\d+"
    ) as said:
        train_both(model, plain, [8, 16, 24, 16, 8, 24])
    assert len([warning for warning in said if "to be a constant" in str(warning.message)]) == 1
    assert len(captures) == 3


def test_of_the_sizes_that_a_model_insists_on_those_used_last_are_kept(
    captures: list[RecordedRegion], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "_MOST_VALUES", 2)
    model = Insists().train()
    model.lengths = {length: 1 / length for length in range(2, 12)}
    plain = copy.deepcopy(model)
    before = [calls for calls in gc.get_objects() if type(calls) is RecordedCalls]
    memopt.optimize(model, 1, **EXACT)
    with pytest.warns(UserWarning, match="to be a constant"):
        train_both(model, plain, [2, 3])
    train_both(model, plain, [4, 5, 4, 6, 4])
    assert len(captures) == 5
    train_both(model, plain, [5])
    assert len(captures) == 6
    gc.collect()
    alive = [calls for calls in gc.get_objects() if type(calls) is RecordedCalls and calls not in before]
    assert len([calls for calls in alive if calls.whole]) == 3


class Branches(nn.Module):
    """A model whose kernels, but not its Python code, are others above a length."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x).relu()
        if x.shape[1] > 10:
            hidden = hidden * 0.5
        return hidden.pow(2).mean()


def test_a_branch_on_a_size_makes_two_captures_with_symbols(captures: list[RecordedRegion]) -> None:
    model = Branches().train()
    plain = copy.deepcopy(model)
    memopt.optimize(model, 1, **EXACT)
    train_both(model, plain, [8, 9, 12, 7, 13, 14, 6])
    assert len(captures) == 3


def test_a_size_that_is_a_symbol_takes_no_more_memory() -> None:
    def peak(batch: torch.Tensor) -> float:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)))
        plan = memopt.plan(model, 1, (batch, 0), loss_fn=lambda output, _: output.sum(), elsewhere_gb=0, **EXACT)
        return plan.predicted_peak_gb

    batch = torch.randn(512, 16)
    alike = peak(batch)
    torch._dynamo.maybe_mark_dynamic(batch, 0)
    assert peak(batch) == alike


def test_a_batch_that_code_for_all_sizes_has_seen_is_captured_as_it_is(captures: list[RecordedRegion]) -> None:
    """Torch marks the inputs that such code saves, for all later captures in the process."""
    batch = torch.randn(8, 16)
    torch.compile(nn.Linear(16, 4), backend="aot_eager", dynamic=True)(batch).sum().backward()
    marks = dict(vars(batch))
    if "_dynamo_propagated_dynamic_indices" not in marks:
        pytest.skip("before torch 2.13 these marks cannot be told from those that users make")
    memopt.plan(nn.Linear(16, 4), 1, (batch, 0), loss_fn=lambda output, _: output.sum(), precision="fp32")
    assert not any(region.changing for region in captures)
    assert vars(batch) == marks


class Edges(nn.Module):
    """Insists on a size that never changes: edges are pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        if edges.shape[0] != 2:
            raise ValueError("edges are pairs")
        for layer in self.layers:
            x = x + torch.zeros_like(x).index_add(0, edges[1], layer(x).relu()[edges[0]])
        return x.square().mean()


def test_a_size_that_never_changes_is_not_warned_of() -> None:
    model = memopt.optimize(Edges().train(), 1, optimizer=None, precision="fp32", allow={"recompute"}, elsewhere_gb=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for size in (50, 42, 46):
            model(torch.randn(size, 16), torch.randint(0, size, (2, 2 * size))).backward()


class Carried(nn.Module):
    """An LSTM, whose operators are as many as the steps, with a state that the caller carries along."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor, state: tuple[Tensor, ...] | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
        y, state = self.layer(x, state)
        return y.square().mean(), tuple(one.detach() for one in state)


@pytest.mark.slow
def test_only_a_size_that_changes_is_said_to_be_needed_as_a_constant(recwarn: pytest.WarningsRecorder) -> None:
    model = memopt.optimize(Carried(), 1, **EXACT)
    state = None
    for number, length in enumerate((4, 4, 3, 4, 6)):
        loss, state = model(torch.randn(2, length, 8), None if number == 3 else state)
        loss.backward()
    said = [str(one.message) for one in recwarn if "to be a constant" in str(one.message)]
    assert [text.partition(" to be")[0] for text in said] == ["Carried needs input 0.shape[1]"]
