"""The decision on what runs in tiles, and what it is worth: a budget that nothing else reaches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import memopt
from memopt.capture.operators import OperatorGraph
from memopt.levers.tiles import _Tile
from tests.passes.capture import Sketch, aten
from tests.smallest import smallest_gb

pytestmark = pytest.mark.plans_always
OPTIONS: dict[str, Any] = {"optimizer": None, "precision": "fp32"}


def mlp(*, attended: bool = False) -> OperatorGraph:
    sketch = Sketch()
    x, weight, back = sketch.input("x", 64, 16), sketch.input("weight", 128, 16), sketch.input("back", 16, 128)
    hidden = sketch.call(aten.gelu.default, sketch.call(aten.linear.default, x, weight))
    if attended:
        hidden = sketch.call(aten.softmax.int, hidden, 0)
    return OperatorGraph(sketch.returns(sketch.call(aten.linear.default, hidden, back)), frozenset({1, 2}))


def test_the_note_says_which_and_how_many() -> None:
    decision = _Tile(4)(mlp())
    after = decision.pipeline(mlp().module)
    linears = [node for node in after.graph.nodes if node.target == aten.linear.default]
    assert [node.meta["val"].shape[0] for node in linears] == [16] * 8
    (note,) = decision.notes
    assert note == (
        "tiles: 1 operator sequences run in 4 tiles of rows, the largest linear to linear_1: 3 calls on 64 rows "
        "with 64 kB inside; equal but for rounding, as gradients are summed in another order"
    )


def test_the_note_says_how_many_calls_of_attention() -> None:
    sketch = Sketch()
    x, weight = sketch.input("x", 2, 4, 16, 8), sketch.input("weight", 8, 8)
    query = sketch.call(aten.matmul.default, x, weight)
    attended = sketch.call(aten.scaled_dot_product_attention.default, query, query, query)
    decision = _Tile(4)(OperatorGraph(sketch.returns(attended), frozenset({1})))
    assert decision.notes == (
        "tiles: 1 calls of attention on some of their heads at a time; equal but for rounding, as gradients are summed "
        "in another order",
    )


def test_nothing_to_run_in_tiles() -> None:
    decision = _Tile(4)(mlp(attended=True))
    assert len(decision.pipeline) == 0
    assert decision.notes[0].startswith("tiles: nothing is run in tiles")


def llama() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).train()
    model.loss_type = "ForCausalLM"
    tokens = torch.randint(0, 64, (1, 1024))
    return model, {"input_ids": tokens, "labels": tokens}


@pytest.mark.slow
def test_a_budget_that_nothing_else_reaches() -> None:
    model, batch = llama()
    before = smallest_gb(model, batch, allow=memopt.DEFAULT_LEVERS, **OPTIONS)
    allow = memopt.DEFAULT_LEVERS | {"tiles"}
    budget = 0.85 * before
    model(**batch).loss.backward()
    plain = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    memopt.optimize(model, budget, example_inputs=batch, allow=allow, elsewhere_gb=0, **OPTIONS)
    plan = memopt.plan_of(model)
    assert plan is not None
    assert "tiles" in plan.levers
    with memopt.measure_peak("cpu") as peak:
        model(**batch).loss.backward()
    held = sum(parameter.nbytes for parameter in model.parameters())
    assert peak.allocated_bytes + held <= plan.predicted_peak_bytes
    for name, parameter in model.named_parameters():
        error = (parameter.grad - plain[name]).abs().max() / plain[name].abs().max()
        assert error < 2e-6, name
