"""Frozen parameters on the host: the plain model's bits within budgets that the parameters alone exceed."""

from __future__ import annotations

import io
import mmap
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from memopt.errors import GIB
from memopt.units import size
from passes.ops.offload_ops import host_memory
from tests.end_to_end.hosted import (
    EXPERTS,
    GPT2,
    LEVERS,
    LLAMA,
    NF4,
    QUANTISED,
    QWEN3_MOE,
    STEPS,
    Frozen,
    assert_same,
    batch,
    frozen_bytes,
    gpt2,
    linked,
    options,
    trained,
)
from tests.marks import slow

__all__ = ["linked"]
pytestmark = [pytest.mark.plans_always, pytest.mark.usefixtures("linked")]  # the plain steps would fit
FAMILIES = [GPT2, LLAMA, EXPERTS, QWEN3_MOE]


@pytest.mark.parametrize("share", [0.1, *map(slow, (0.0, 0.25, 0.5, 1.0))])
@pytest.mark.parametrize(
    "family", [slow(GPT2), slow(LLAMA), EXPERTS, slow(QWEN3_MOE)], ids=lambda family: family.make.__name__
)
def test_twenty_steps_have_the_plain_bits(family: Frozen, share: float) -> None:
    plain, budget_gb = family.plain, family.between(share)
    model = family.optimized(share)
    ours, plan, host = trained(family, model), memopt.plan_of(model), host_memory("cpu")
    assert_same(ours, plain)
    assert max(ours.peaks) <= plan.predicted_peak_bytes <= budget_gb * GIB
    moves = sum(len(region.offloads) + len(region.hosted) for region in plan.regions)
    assert plan.hosted_bytes <= host.leased_bytes <= plan.hosted_bytes / 0.8 + moves * mmap.PAGESIZE
    assert host.most_leased_bytes <= plan.host_bytes / 0.8 + moves * mmap.PAGESIZE
    if share == 0:
        assert plan.hosted_bytes > 0.9 * frozen_bytes(model)
        assert budget_gb * GIB < sum(one.nbytes for one in model.parameters()), "the parameters alone exceed it"
        assert plan.brought_bytes > plan.hosted_bytes, "some are brought twice"
    assert (plan.hosted_bytes == 0) == (share == 1.0), "what fits is not moved"
    assert ("offload_parameters" in plan.levers) == (plan.hosted_bytes > 0)
    memopt.remove(model)


def _saved(model: nn.Module, optimizer: torch.optim.Optimizer) -> bytes:
    file = io.BytesIO()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}
    torch.save(state, file)
    return file.getvalue()


def _train(family: Frozen, model: nn.Module, first: int, state: bytes | None = None) -> tuple[list[float], bytes]:
    """The losses of the steps from `first` on, and the state after half of all steps; from a saved state, if any."""
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    torch.manual_seed(2)
    if state is not None:
        loaded: dict[str, Any] = torch.load(io.BytesIO(state), weights_only=True)
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        torch.set_rng_state(loaded["random"])
    losses, middle = [], b""
    for step in range(first, STEPS):
        if step == STEPS // 2:
            middle = _saved(model, optimizer)
        loss = family.loss(model, family.batch(seed=step))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, middle


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.make.__name__)
def test_killed_and_resumed(family: Frozen) -> None:
    expected, _ = _train(family, family.make(), 0)
    losses, state = _train(family, family.optimized(0.1), 0)
    assert losses == expected
    for share in (0.1, 1.0):  # the same parameters on the host, and none
        losses, _ = _train(family, family.optimized(share), STEPS // 2, state)
        assert losses == expected[STEPS // 2 :]
    losses, _ = _train(family, family.make(), STEPS // 2, state)
    assert losses == expected[STEPS // 2 :], "the state is the plain model's"


@pytest.mark.slow
def test_without_the_lever_it_does_not_fit() -> None:
    with pytest.raises(memopt.BudgetError) as refused:
        memopt.plan(gpt2(), GPT2.between(0.1), batch(), **options(allow=LEVERS - {"offload_parameters"}))
    assert "offload_parameters" in str(refused.value)


@pytest.mark.slow
def test_the_changes_of_a_plan_name_what_is_copied_to_the_device() -> None:
    plan = memopt.plan(gpt2(), GPT2.between(0.1), batch(), **options())
    (hosted,) = {region.hosted for region in plan.regions}
    assert hosted
    brought = {change.op for change in plan.diff().changes if change.kind == "offloaded"}
    names = [node.name for node in plan.captured.regions[0].module.graph.nodes]  # type: ignore[union-attr]
    assert brought & {names[number] for number in hosted}
    assert "bounds the step" in str(plan)
    assert not any("experts" in note for note in plan.notes)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "part"), [(QUANTISED, 0.9), (NF4, 0.7)], ids=["ours", "bitsandbytes"])
def test_weights_of_four_bits_are_copied_packed(family: Frozen, part: float) -> None:
    model = family.optimized(0.1)
    ours, plan = trained(family, model), memopt.plan_of(model)
    assert_same(ours, family.plain)
    assert max(ours.peaks) <= plan.predicted_peak_bytes
    assert plan.hosted_bytes > part * frozen_bytes(model)
    memopt.remove(model)


@pytest.mark.slow
def test_stacked_experts_are_copied_whole_and_the_plan_says_so() -> None:
    plan = memopt.plan(QWEN3_MOE.make(), QWEN3_MOE.between(0.1), QWEN3_MOE.batch(), **options())
    experts = 8 * 3 * 64 * 64 * 4
    assert plan.brought_bytes > experts
    assert any("stacks of matrices, as of experts" in note for note in plan.notes)


def test_kernels_of_convolutions_are_no_experts() -> None:
    layers = [layer for _ in range(6) for layer in (nn.Conv1d(64, 64, 9, padding=4), nn.ReLU())]
    model = nn.Sequential(*layers).requires_grad_(requires_grad=False).append(nn.Conv1d(64, 1, 1))
    x = torch.randn(1, 64, 32)
    smallest_gb = memopt.plan(model, 1.0, x, **options()).smallest_gb()
    plan = memopt.plan(model, 1.02 * smallest_gb, x, **options())
    assert plan.hosted_bytes
    assert not any("experts" in note for note in plan.notes)


def test_a_budget_below_the_smallest_is_refused() -> None:
    budget_gb = GPT2.between(0.0)
    with pytest.raises(memopt.BudgetError) as refused:
        memopt.plan(gpt2(), 0.9 * budget_gb, batch(), **options())
    assert refused.value.smallest_bytes <= budget_gb * GIB


@pytest.mark.slow
def test_planned_at_the_first_call_and_for_other_lengths() -> None:
    model, plain = memopt.optimize(gpt2(), GPT2.between(0.3), **options()), gpt2()
    for length in (16, 8, 16, 12):
        losses = []
        for one in (model, plain):
            torch.manual_seed(length)
            losses.append(GPT2.loss(one, batch(length)))
            losses[-1].backward()  # type: ignore[no-untyped-call]
        assert torch.equal(*losses)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad is None or (other.grad is not None and torch.equal(one.grad, other.grad))


@pytest.mark.slow
def test_a_tied_or_trained_parameter_stays() -> None:
    model: Any = gpt2()
    model.transformer.wte.weight.requires_grad_(True)  # and with it lm_head.weight, which is the same one
    plan = memopt.plan(model, 1000, batch(), **options())
    least = plan.at(plan.smallest_gb())
    assert 0 < least.hosted_bytes <= frozen_bytes(model)


@pytest.mark.slow
def test_the_host_has_a_budget() -> None:
    budget_gb, frozen = GPT2.between(0.1), frozen_bytes(gpt2())
    plan = memopt.plan(gpt2(), budget_gb, batch(), **options(host_gb=2 * frozen / GIB))
    assert plan.host_bytes <= 2 * frozen
    assert plan.host_room_bytes == 2 * frozen
    assert f" of {size(2 * frozen)}" in str(plan)
    with pytest.raises(memopt.BudgetError, match="host_gb") as refused:
        memopt.plan(gpt2(), budget_gb, batch(), **options(host_gb=0.2 * frozen / GIB))
    assert refused.value.smallest_bytes > budget_gb * GIB
    with pytest.raises(TypeError, match="host_gb"):
        memopt.plan(gpt2(), budget_gb, batch(), **options(host_gb="all"))
