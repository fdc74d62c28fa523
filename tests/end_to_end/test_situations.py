"""Training loops of all kinds at tight budgets: the plain model's bits, and within the budget or refused."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from examples.models.families import causal_batch, library
from tests.end_to_end import odd_models
from tests.end_to_end.odd_models import ROWS
from tests.end_to_end.pieces import GIB, assert_same, call, check, loss, plan, run, step, tight
from tests.end_to_end.usual import Dropping, batch, make, refusal, steps, usual
from tests.marks import slow

pytestmark = pytest.mark.plans_always  # the plain steps would fit

GPT2 = library(
    "GPT2", "GPT2LMHeadModel", "ForCausalLM", attn_implementation="sdpa",
    vocab_size=1024, n_positions=160, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
)  # fmt: skip


@pytest.mark.slow
def test_longer_sequences_then_shorter_ones() -> None:
    longer, shorter = causal_batch("longer"), causal_batch("usual")
    model = GPT2()
    budget = tight(model, longer)

    def piece(model: nn.Module) -> list[Tensor]:
        losses = []
        for inputs in (shorter, longer, shorter):
            model.zero_grad()
            losses.append(step(model, inputs))
        return losses

    trained = check(model, piece, budget, longer)
    assert trained.peak_bytes > 0.8 * budget * GIB, "the budget was not tight"


@pytest.mark.slow
def test_sequences_too_long_for_the_budget_are_refused_before_they_run() -> None:
    model, inputs, longer = make(), batch(), batch(4 * ROWS)
    budget = usual().tight
    memopt.optimize(model, budget, optimizer=None, precision="fp32", allow={"recompute"})
    step(model, inputs)
    model.zero_grad()
    error = refusal(model, lambda model: step(model, longer), budget, longer)
    check(memopt.remove(model), lambda model: step(model, longer), error.smallest_gb, longer)


def test_more_shapes_than_dynamo_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memopt.compat.dynamo.RECOMPILE_LIMIT", 2)
    model, lengths = make(), [batch(rows) for rows in (64, 80, 96, 112)]

    def piece(model: nn.Module) -> list[Tensor]:
        losses = steps(model, *lengths)
        model.zero_grad()
        return losses

    check(model, piece, 1.0, lengths[-1])


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_accumulate(set_to_none: bool) -> None:
    model, first, second = make(), batch(), batch(seed=3)
    budget = usual().tight
    held = usual().gradients if not set_to_none else 0.0

    def piece(model: nn.Module) -> list[Tensor]:
        losses = []
        for _ in range(2):
            model.zero_grad(set_to_none=set_to_none)
            losses += steps(model, first, second, first)
        return losses

    check(model, piece, budget + held, first)


def test_gradients_are_added_where_they_are() -> None:
    """With few rows gradients outweigh activations, and a second set of them would not fit."""
    model, few = make(), batch(rows=4)
    parameters = sum(p.numel() * 4 for p in model.parameters())
    memopt.optimize(model, 1.0, optimizer=None, precision="fp32", allow={"recompute"})
    step(model, few)
    before = [p.grad.data_ptr() for p in model.parameters() if p.grad is not None]
    trained = run(model, lambda model: step(model, few), few)
    assert [p.grad.data_ptr() for p in model.parameters() if p.grad is not None] == before
    assert trained.peak_bytes < 2.3 * parameters
    assert trained.peak_bytes <= memopt.plan_of(model).predicted_peak_gb * GIB


def test_the_loss_is_divided_in_place() -> None:
    model, inputs = make(), batch()

    def piece(model: nn.Module) -> None:
        for _ in range(2):
            value = loss(model, inputs)
            value /= 4
            value.backward()  # type: ignore[no-untyped-call]

    check(model, piece, usual().tight, inputs)


def test_a_regulariser_outside_of_the_model() -> None:
    model, inputs = make(), batch()

    def piece(model: nn.Module) -> None:
        weights: Any = model.get_parameter("head.weight")
        (loss(model, inputs) + 0.1 * weights.square().sum()).backward()

    check(model, piece, usual().tight + 0.1 / 1024, inputs)


def test_eval_and_no_grad_run_plain_in_between() -> None:
    model, inputs = make(), batch()

    def piece(model: nn.Module) -> list[Any]:
        first = step(model, inputs)
        with torch.no_grad():
            second = call(model, inputs)
        model.eval()
        third = loss(model, inputs)
        third.backward()  # type: ignore[no-untyped-call]
        model.train()
        return [first, second, third.detach(), step(model, inputs)]

    plain = run(copy.deepcopy(model), piece, inputs)
    memopt.optimize(model, usual().tight, optimizer=None, precision="fp32", allow={"recompute"})
    assert_same(run(model, piece, inputs), plain)


@pytest.mark.slow
def test_generation_in_between() -> None:
    model, inputs = GPT2(), causal_batch("usual")
    prompt = inputs["input_ids"][:2, :8]

    def piece(model: Any) -> list[Tensor]:
        losses = [step(model, inputs)]
        model.eval()
        words = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=True)
        model.train()
        return [*losses, words, step(model, inputs)]

    check(model, piece, tight(model, inputs), inputs)


def test_a_dropped_forward_is_forgotten() -> None:
    model, inputs = make(), batch()

    def piece(model: nn.Module) -> list[Tensor]:
        dropped = loss(model, inputs).item()
        assert isinstance(dropped, float)
        return [step(model, inputs), step(model, inputs)]

    check(model, piece, usual().tight, inputs)


@pytest.mark.parametrize("kind", [Dropping, odd_models.GraphBreak])
def test_nothing_of_a_step_is_kept(kind: type[nn.Module]) -> None:
    """After compilation neither the inputs nor any value computed from them is held."""
    model = make(kind)
    memopt.optimize(model, 1.0, optimizer=None, precision="fp32", allow={"recompute"})
    steps(model, batch(), batch(), batch())
    gc.collect()
    before = resident_bytes()
    pair = batch()
    step(model, pair)
    inputs = [weakref.ref(tensor) for tensor in pair]
    del pair
    assert not any(reference() is not None for reference in inputs)
    assert resident_bytes() == before


def resident_bytes() -> int:
    with memopt.measure_peak("cpu") as peak:
        pass
    return peak.resident_bytes


def two_backwards(model: nn.Module, first: Any, second: Any, latest_first: bool) -> None:
    losses = [loss(model, first), loss(model, second)]
    while losses:
        losses.pop(-1 if latest_first else 0).backward()  # type: ignore[no-untyped-call]


PAIRS: dict[str, Callable[..., Any]] = {
    "the latest first": lambda model, a, b: two_backwards(model, a, b, True),
    "in order": lambda model, a, b: two_backwards(model, a, b, False),
    "their sum": lambda model, a, b: (loss(model, a) + loss(model, b)).backward(),
    "their sum, accumulated": lambda model, a, b: [(loss(model, a) + loss(model, b)).backward() for _ in range(2)],
}


@pytest.mark.slow
@pytest.mark.parametrize("more", [1.0, slow(1.07)])
@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(pair, id=name, marks=[pytest.mark.slow] * (name != "their sum, accumulated"))
        for name, pair in PAIRS.items()
    ],
)
def test_two_forwards_before_their_backwards(pair: Callable[..., Any], more: float) -> None:
    model, first, second = make(), batch(), batch(seed=3)

    def piece(model: nn.Module) -> None:
        pair(model, first, second)

    error = refusal(model, piece, usual().tight, first)
    check(make(), piece, more * error.smallest_gb, first)


@pytest.mark.slow
def test_a_second_forward_that_fits_is_planned_beside_the_first() -> None:
    model, small, large = make(), batch(ROWS // 4), batch()
    roomy = plan(model, small)
    budget = max(usual().tight + roomy.held_bytes / GIB, roomy.plain_peak_gb + 1.1 * roomy.account.gradients / GIB)

    def piece(model: nn.Module) -> None:
        two_backwards(model, small, large, latest_first=True)

    check(model, piece, budget, large)
    assert memopt.plan_of(model).added_time > 0


def test_a_retained_graph_is_gone_through_twice() -> None:
    model, inputs = make(), batch()

    def piece(model: nn.Module) -> None:
        value = loss(model, inputs)
        value.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        value.backward()  # type: ignore[no-untyped-call]

    error = refusal(model, piece, usual().tight, inputs)
    assert "retain_graph" in str(error)
    assert all(parameter.grad is None for parameter in model.parameters())
    check(memopt.remove(model), piece, error.smallest_gb, inputs)
