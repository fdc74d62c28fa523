"""A call is captured, traced and solved once, however it was planned and whatever situation it is made in."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from examples.models.families import causal_batch, loss_of
from memopt.capture import joint as joint_graphs
from memopt.capture.region import RecordedRegion
from memopt.compat.fakes import FakeTensor
from memopt.solver import Portfolio
from tests.end_to_end.odd_models import CLASSES, WIDTH, BreakInLoop
from tests.end_to_end.usual import gpt2
from tests.shortened import SHORT

EXACT: dict[str, Any] = {"precision": "fp32", "allow": {"recompute", "reinplace"}}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the regions that Dynamo hands over, the traces of AOTAutograd, and the solutions, by budget; plans are not
    kept on disk, where the next test would find them."""
    monkeypatch.setenv("MEMOPT_CACHE", "0")
    counts: Counter[str] = Counter()
    record, trace, solve = RecordedRegion.record.__func__, joint_graphs.trace_region, Portfolio.solve

    def counted_record(cls: Any, *args: Any, **kwargs: Any) -> RecordedRegion:
        counts["captures"] += 1
        return record(cls, *args, **kwargs)

    def counted_trace(*args: Any, **kwargs: Any) -> Any:
        counts["traces"] += 1
        return trace(*args, **kwargs)

    def counted_solve(self: Portfolio, budget_bytes: int, *args: Any, **kwargs: Any) -> Any:
        counts[f"solutions within {budget_bytes}"] += 1
        return solve(self, budget_bytes, *args, **kwargs)

    monkeypatch.setattr(RecordedRegion, "record", classmethod(counted_record))
    monkeypatch.setattr(joint_graphs, "trace_region", counted_trace)
    monkeypatch.setattr(Portfolio, "solve", counted_solve)
    return counts


def tight_budget(model: nn.Module, batch: dict[str, Any], **options: Any) -> float:
    plan = memopt.plan(copy.deepcopy(model), 1, batch, **EXACT, **options)
    return (plan.smallest_gb() + plan.plain_peak_gb) / 2


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Any], accumulate: int = 1) -> None:
    optimizer.zero_grad()
    for _ in range(accumulate):
        (loss_of(model(**batch)) / accumulate).backward()
    optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("name", ["gpt2-sdpa", "llama"])
def test_five_steps_make_one_capture_and_one_solution_per_budget(name: str, ahead: bool, counted: Counter[str]) -> None:
    family = SHORT[name]
    model, batch = family.make(), family.batch("usual")
    optimizer = torch.optim.AdamW(model.parameters())
    budget = tight_budget(model, batch)
    counted.clear()
    memopt.optimize(model, budget, example_inputs=batch if ahead else None, optimizer=optimizer, **EXACT)
    for _ in range(5):
        train(model, optimizer, batch)
    assert counted["captures"] == counted["traces"] == 1
    assert {count for key, count in counted.items() if key.startswith("solutions")} == {1}
    assert sum(count for key, count in counted.items() if key.startswith("solutions")) == 1


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [True, False])
def test_another_budget_adds_a_plan_and_no_capture(ahead: bool, counted: Counter[str]) -> None:
    """The plan is the one that a fresh copy of the model gets within that budget."""
    model, batch = gpt2(), causal_batch("usual")
    fresh = copy.deepcopy(model)
    given = {"example_inputs": batch if ahead else None, "optimizer": torch.optim.SGD, **EXACT}
    budget = tight_budget(model, batch)
    counted.clear()
    memopt.optimize(model, 1, **given)
    loss_of(model(**batch)).backward()
    model.zero_grad()
    memopt.optimize(model, budget, **given)
    torch.manual_seed(0)
    loss_of(model(**batch)).backward()
    assert counted["captures"] == counted["traces"] == 1
    memopt.optimize(fresh, budget, **given)
    torch.manual_seed(0)
    loss_of(fresh(**batch)).backward()
    again, first = memopt.plan_of(model), memopt.plan_of(fresh)
    assert (again.budget_bytes, again.regions, again.account) == (first.budget_bytes, first.regions, first.account)
    assert again.added_seconds > 0
    for ours, theirs in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_regions_are_kept_for_another_budget_and_solved_anew(counted: Counter[str]) -> None:
    torch.manual_seed(0)
    model = BreakInLoop().train()
    batch = {"x": torch.randn(32, WIDTH), "labels": torch.randint(0, CLASSES, (32,))}
    options = {"example_inputs": batch, "optimizer": None, **EXACT}
    budget = tight_budget(copy.deepcopy(model), batch, optimizer=None)
    fresh = memopt.optimize(copy.deepcopy(model), budget, **options)
    memopt.optimize(model, 1, **options)
    loss_of(model(**batch)).backward()
    model.zero_grad()
    counted.clear()
    memopt.optimize(model, budget, **options)
    loss_of(model(**batch)).backward()
    assert counted["captures"] == counted["traces"] == 0
    assert memopt.plan_of(model).regions == memopt.plan_of(fresh).regions


def test_a_refused_budget_leaves_the_graphs_to_the_plan_before(counted: Counter[str]) -> None:
    model, batch = gpt2(), causal_batch("usual")
    options = {"example_inputs": batch, "optimizer": None, **EXACT}
    memopt.optimize(model, 1, **options)
    with pytest.raises(memopt.BudgetError):
        memopt.optimize(model, 1e-4, **options)
    loss_of(model(**batch)).backward()
    assert memopt.plan_of(model).budget_bytes == 2**30
    assert counted["captures"] == counted["traces"] == 1


@pytest.mark.slow
def test_other_options_are_captured_anew(counted: Counter[str]) -> None:
    model, batch = gpt2(), causal_batch("usual")
    for outputs in ("loss", "all"):
        memopt.optimize(model, 1, example_inputs=batch, optimizer=None, outputs=outputs, **EXACT)
        loss_of(model(**batch)).backward()
    assert counted["captures"] == counted["traces"] == 2


@pytest.mark.slow
def test_accumulation_adds_a_plan_and_no_capture(counted: Counter[str]) -> None:
    """Nor does it where nothing was planned ahead."""
    model, batch = gpt2(), causal_batch("usual")
    optimizer = torch.optim.AdamW(model.parameters())
    budget = tight_budget(model, batch)
    counted.clear()
    memopt.optimize(model, budget, optimizer=optimizer, **EXACT)
    for _ in range(3):
        train(model, optimizer, batch, accumulate=3)
    assert counted["captures"] == counted["traces"] == 1
    assert sum(count for key, count in counted.items() if key.startswith("solutions")) == 2  # without, with gradients


@pytest.mark.plans_always
@pytest.mark.slow
def test_a_capture_for_all_sizes_keeps_no_memory_of_operators(captures: list[RecordedRegion]) -> None:
    """Torch remembers each operator that ran on fakes, for as long as the graphs live."""
    family = SHORT["llama"]
    model = family.make()
    memopt.optimize(model, 1, **EXACT)
    optimizer = torch.optim.AdamW(model.parameters())
    for scale in ("shorter", "usual"):
        train(model, optimizer, family.batch(scale))
    changing = [region for region in captures if region.changing]
    modes = [value.fake_mode for region in changing for value in region.inputs if isinstance(value, FakeTensor)]
    assert modes
    assert not any(mode.shape_env.fake_tensor_cache for mode in modes)
    joint = memopt.plan_of(model).captured.regions[0]
    assert not any("tensor_meta" in node.meta for node in joint.module.graph.nodes)


@pytest.mark.slow
@pytest.mark.plans_always
def test_hooks_and_forwards_in_waiting_add_no_capture(counted: Counter[str]) -> None:
    family = SHORT["bert"]
    model, batch = family.make(), family.batch("usual")
    memopt.optimize(model, 1, optimizer=None, **EXACT)
    first, second = loss_of(model(**batch)), loss_of(model(**batch))
    (first + second).backward()
    next(model.parameters()).register_hook(lambda gradient: gradient)
    loss_of(model(**batch)).backward()
    assert counted["captures"] == counted["traces"] == 1


def test_a_forward_in_regions_is_captured_once_by_its_values(counted: Counter[str]) -> None:
    torch.manual_seed(0)
    model = BreakInLoop().train()
    batch = {"x": torch.randn(32, WIDTH), "labels": torch.randint(0, CLASSES, (32,))}
    memopt.optimize(model, 1, example_inputs=batch, optimizer=None, **EXACT)
    regions = counted["captures"]
    for _ in range(3):
        model.zero_grad()
        loss_of(model(**batch)).backward()
    assert counted["captures"] == counted["traces"] == regions
