"""Precision by a minimum cut, and the weights of roundings in it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.fx import GraphModule

import memopt
from examples.models.families import BY_NAME, loss_of, without_dropout
from examples.models.step import train_step
from memopt.capture.operators import OperatorGraph
from memopt.device.devices import hardware
from memopt.errors import GIB
from memopt.levers import precision_rewriting
from memopt.rewrite.dtypes import AssignPrecision, PrecisionPlan, Rules, low_dtype
from memopt.rewrite.op_prices import OpPrices
from memopt.rewrite.search import differentiated, influence, search_precision
from tests.passes.capture import Sketch, aten

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PARAMETERS = frozenset({1, 2, 3})


def post_norm(rows: int = 4096, width: int = 1024) -> GraphModule:
    """A post-norm block: two linears with a GELU between, the residual, its norm, a dropout, and the loss."""
    sketch = Sketch()
    x = sketch.input("x", rows, width)
    first, second = (sketch.input(f"weight_{number}", width, width) for number in (1, 2))
    scale = sketch.input("scale", width)
    labels = sketch.input("labels", rows, dtype=torch.int64)
    hidden = sketch.call(aten.gelu.default, sketch.call(aten.linear.default, x, first))
    added = sketch.call(aten.add.Tensor, x, sketch.call(aten.linear.default, hidden, second))
    normed = sketch.call(aten.dropout.default, sketch.call(aten.layer_norm.default, added, [width], scale), 0.1, True)
    logits = sketch.call(aten.linear.default, normed, first)
    return sketch.returns(sketch.call(aten.cross_entropy_loss.default, logits, labels))


def searched(module: GraphModule, low: torch.dtype = BF16, most_error: float = 2.0, **options: Any) -> PrecisionPlan:
    prices = OpPrices(hardware("h100"), narrows=low == BF16)
    default = replace(AssignPrecision(low), **options)
    return search_precision(OperatorGraph(module, PARAMETERS), default, prices, most_error)


def dtypes(plan: PrecisionPlan) -> dict[str, torch.dtype]:
    return {name: choice.dtype for name, choice in plan.choices.items()}


def test_a_norm_that_only_products_read_gives_16_bits() -> None:
    """The default keeps it and the dropout behind it in fp32, to be cast for the next linear."""
    default, plan = AssignPrecision(BF16)(post_norm()), searched(post_norm())
    assert dtypes(default)["layer_norm"] == FP32
    assert dtypes(plan)["layer_norm"] == dtypes(plan)["dropout"] == BF16
    assert plan.choices["layer_norm"].reason.startswith("cut: saves ")
    assert plan.choices["linear"].reason == "as under torch.autocast"
    assert dtypes(plan)["cross_entropy_loss"] == FP32
    (note,) = plan.notes
    assert note.startswith("search: the dtypes found save ")


def test_rounding_more_than_the_default_must_be_allowed() -> None:
    plan = searched(post_norm(), most_error=1.0)
    assert dtypes(plan)["layer_norm"] == FP32
    assert plan.reasons["layer_norm"].startswith("fp32: cut: bf16 would save 16 kB for ")


def test_what_an_exponential_reads_keeps_all_of_its_bits() -> None:
    sketch = Sketch()
    x, weight = sketch.input("x", 4096, 1024), sketch.input("weight", 1024, 1024)
    wide = sketch.call(aten.to.dtype, sketch.call(aten.linear.default, x, weight), FP32)
    shifted = sketch.call(aten.sub.Tensor, wide, sketch.call(aten.amax.default, wide, [-1], True))
    scaled = sketch.call(aten.mul.Tensor, wide, 0.5)
    powers = sketch.call(aten.exp.default, sketch.call(aten.view.default, shifted, [-1, 512]))
    both = sketch.call(aten.linear.default, sketch.call(aten.view.default, powers, [-1, 1024]), weight)
    module = sketch.returns(sketch.call(aten.sum.default, sketch.call(aten.linear.default, scaled, both)))
    chosen = dtypes(searched(module, most_error=1e9))
    assert {name: chosen[name] for name in ("sub", "exp", "mul")} == {"sub": FP32, "exp": FP32, "mul": BF16}


def test_the_same_graph_gets_the_same_choices() -> None:
    prices = OpPrices(hardware("h100"), narrows=True)
    plans = [
        search_precision(OperatorGraph(post_norm(), PARAMETERS), AssignPrecision(BF16), item)
        for item in (prices, prices, OpPrices(hardware("h100"), narrows=True))
    ]
    assert plans[0] == plans[1] == plans[2]


def test_wishes_go_before_the_cut() -> None:
    plan = searched(post_norm(), rules=Rules.of({"layer_norm": "fp32", "gelu": "fp32"}))
    assert plan.reasons["layer_norm"] == "fp32: rule 'layer_norm'"
    assert plan.reasons["gelu"] == "fp32: rule 'gelu'"
    plan = searched(post_norm(), kept_out=(("layer_norm", "it overflows"),))
    assert plan.reasons["layer_norm"] == "fp32: it overflows"
    plan = searched(post_norm(), author_typed=frozenset({"layer_norm"}))
    assert "layer_norm" not in plan.choices


def test_fp16_gets_nothing_that_the_default_keeps_in_fp32() -> None:
    default, plan = AssignPrecision(FP16)(post_norm()), searched(post_norm(), FP16)
    assert default.choices.keys() == plan.choices.keys()
    kept = [name for name, choice in default.choices.items() if choice.dtype == FP32]
    assert kept == ["add", "layer_norm", "dropout", "cross_entropy_loss"]
    assert all(plan.choices[name].dtype == FP32 for name in kept)


def test_without_gradients_the_default_stays() -> None:
    graph = OperatorGraph(post_norm(), frozenset())
    prices = OpPrices(hardware("h100"), narrows=True)
    assert search_precision(graph, AssignPrecision(BF16), prices) == AssignPrecision(BF16)(post_norm())


@pytest.mark.parametrize(("name", "dtype"), [("t4", FP16), ("h100", BF16), ("cpu", BF16)])
def test_dtype_by_device(name: str, dtype: torch.dtype) -> None:
    for policy in ("search", {"default": "search", "layer_norm": "fp32"}):
        assert low_dtype(policy, hardware(name)) == dtype
        assert precision_rewriting(policy, hardware(name)).autocast == dtype


def small_gpt2() -> nn.Module:
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, **ends)
    return transformers.GPT2LMHeadModel(config).train()


@pytest.mark.slow
def test_gpt2_trains_a_step() -> None:
    model, tokens = small_gpt2(), torch.randint(0, 64, (2, 32))
    batch = {"input_ids": tokens, "labels": tokens}
    budget_gb = 0.01
    memopt.optimize(model, budget_gb, optimizer=None, precision="search")
    step = train_step(model, batch)
    assert step.peak_bytes <= budget_gb * GIB
    assert step.gradients.keys() == dict(model.named_parameters()).keys()
    assert all(gradient.isfinite().all() for gradient in step.gradients.values())
    made = memopt.plan_of(model)
    text = str(made.diff("precision"))
    assert "# bf16: cut: saves " in text
    assert "# fp32: cut: bf16 would " in text
    assert any(note.startswith("search: the dtypes found save ") for note in made.notes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "gpt2-eager", "llama", "t5", "vit"])
def test_gradients_are_as_exact_as_autocasts(name: str) -> None:
    model, batch = without_dropout(BY_NAME[name].make()), BY_NAME[name].batch("usual")

    def gradients(run: nn.Module) -> torch.Tensor:
        run.zero_grad()
        loss_of(run(**batch)).backward()
        return torch.cat(
            [parameter.grad.flatten().double() for parameter in run.parameters() if parameter.grad is not None]
        )

    exact = gradients(model.double())
    model.float()
    with torch.autocast("cpu", BF16):
        autocast = (gradients(model) - exact).norm()
    memopt.optimize(model, 1000, optimizer=None, precision="search")
    assert (gradients(model) - exact).norm() <= 1.15 * autocast


def test_a_residual_stream_weighs_all_and_its_branches_their_share() -> None:
    """Two blocks: the stream grows from 1 to 2 to 3, so that the branches are a half and a third of it."""
    sketch = Sketch()
    table, weight = sketch.input("table", 8, 8), sketch.input("weight", 8, 8)
    tokens, labels = (sketch.input(name, 4, dtype=torch.int64) for name in ("tokens", "labels"))
    stream = [sketch.call(aten.embedding.default, table, tokens)]
    branches = []
    for _ in range(2):
        normed = sketch.call(aten.layer_norm.default, stream[-1], [8])
        branches.append(sketch.call(aten.linear.default, normed, weight))
        stream.append(sketch.call(aten.add.Tensor, stream[-1], branches[-1]))
    loss = sketch.call(aten.cross_entropy_loss.default, stream[-1], labels)
    graph = sketch.returns(loss).graph
    found = influence(graph, differentiated(graph, {0, 1}))
    assert [found.of[value] for value in stream] == [pytest.approx(1.0)] * 3
    assert found.of[branches[1]] == pytest.approx(1 / 3)
    assert found.of[branches[0]] == pytest.approx(1 / 2 * (2 / 3 + 1 / 3))
    assert found.edge(stream[1], stream[2]) == pytest.approx(2 / 3)
    assert found.edge(loss, stream[0]) == 0.0


def test_masks_and_detached_values_do_not_weigh() -> None:
    sketch = Sketch()
    x, mask = sketch.input("x", 4, 8), sketch.input("mask", 4, 8)
    masked = sketch.call(aten.add.Tensor, x, mask)
    stopped = sketch.call(aten.detach.default, masked)
    result = sketch.call(aten.mul.Tensor, masked, stopped)
    graph = sketch.returns(sketch.call(aten.sum.default, result)).graph
    flowing = differentiated(graph, {0})
    assert mask not in flowing
    assert stopped not in flowing
    found = influence(graph, flowing)
    assert found.edge(x, masked) == 1.0
    assert mask not in found.of


def test_without_a_loss_all_results_weigh() -> None:
    sketch = Sketch()
    x = sketch.input("x", 4, 8)
    results = [sketch.call(aten.relu.default, x), sketch.call(aten.neg.default, x)]
    graph = sketch.returns(*results).graph
    found = influence(graph, differentiated(graph, {0}))
    assert [found.of[item] for item in (*results, x)] == [1.0, 1.0, 1.0], "no value weighs more than the loss"
