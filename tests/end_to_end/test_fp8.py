"""Steps with 8-bit layers and activations: gradients near bf16's, less saved, peaks as planned, equal bits again."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import memopt
from examples.models.families import integers
from examples.models.step import Step, train_step
from memopt.capture.on_fakes import capture_on_fakes
from memopt.device import CPU, hardware
from memopt.device.hardware import scaled_rate
from memopt.errors import GIB
from memopt.levers import lever_sets, levers_named, precision_rewriting
from memopt.planning.priced_step import PriceSettings, TracedStep
from memopt.planning.schedule_parts import held_after_forward
from memopt.rewrite.trace import trace_call
from memopt.solver import Schedule
from tests.smallest import smallest_gb

VOCABULARY, LENGTH = 512, 128
ROUNDING_E4M3 = 2.0**-4
BATCH = {"input_ids": integers(VOCABULARY, 4, LENGTH)}
BATCH["labels"] = BATCH["input_ids"]
SLOW = pytest.mark.slow
LEVERS = [
    {"fp8", "fp8_activations"},
    *(pytest.param({lever}, marks=SLOW) for lever in ("fp8", "fp8_delayed", "fp8_block", "mxfp8", "fp8_activations")),
]


def llama() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, use_cache=False,
        )  # fmt: skip
        model = LlamaForCausalLM(config).train()
    model.loss_type = "ForCausalLM"
    return model


def smallest(**options: Any) -> float:
    """Return the smallest budget in GB; without `"recompute"` in `allow` nothing is recomputed."""
    return smallest_gb(llama(), BATCH, optimizer=None, precision="bf16", **options)


def optimized(budget_gb: float, backend: str = "aten", **options: Any) -> nn.Module:
    options = {"optimizer": None, "precision": "bf16", **options}
    return memopt.optimize(llama(), budget_gb, example_inputs=BATCH, backend=backend, **options)


@cache
def in_bf16() -> tuple[float, Step]:
    """Return the smallest budget in bf16 without levers, and a step within it."""
    return smallest(allow=set()), train_step(optimized(1000, allow=set()), BATCH)


def error(found: Step, expected: Step) -> float:
    """Return the relative error of all gradients as one vector."""
    one, other = (torch.cat([step.gradients[name].flatten() for name in step.gradients]) for step in (found, expected))
    return float((one - other).norm() / other.norm())


@pytest.mark.slow
@pytest.mark.parametrize("allow", LEVERS, ids=lambda allow: "+".join(sorted(allow)))
def test_gradients_are_near_and_the_step_is_within_a_smaller_budget(allow: set[str]) -> None:
    """All gradients as one vector differ from bf16's by at most three roundings of e4m3: values, weights, gradients."""
    budget_gb = smallest(allow=allow)
    bf16_gb, expected = in_bf16()
    assert budget_gb < bf16_gb
    model = optimized(budget_gb, allow=allow)
    step, plan = train_step(model, BATCH), memopt.plan_of(model)
    assert set(plan.levers) == allow
    assert step.peak_bytes <= plan.predicted_peak_bytes <= budget_gb * GIB
    assert plan.predicted_peak_bytes <= 1.01 * step.peak_bytes
    assert 1e-3 < error(step, expected) < 3 * ROUNDING_E4M3
    assert abs(float(step.loss - expected.loss)) < 0.01 * float(expected.loss)


@pytest.mark.slow
def test_not_used_unless_memory_asks_for_it_or_it_is_faster() -> None:
    """A CPU is no faster in 8 bits."""
    plan = memopt.plan(llama(), 1000, BATCH, optimizer=None, precision="bf16", allow={"fp8", "fp8_activations"})
    assert plan.levers == ()


def test_refused_in_fp32_and_by_a_single_sentence() -> None:
    with pytest.raises(ValueError, match="'fp8' in allow needs a step in 16 bits"):
        memopt.plan(llama(), 1000, BATCH, precision="fp32", allow={"fp8"})


@pytest.mark.skipif(torch.cuda.is_available(), reason="the default precision of a GPU has 16 bits")
def test_left_out_and_noted_where_the_default_precision_has_no_16_bits() -> None:
    plan = memopt.plan(llama(), 1000, BATCH, optimizer=None, allow={"fp8", "recompute"})
    if precision_rewriting("auto", hardware("cpu")).autocast is None:
        assert any("'fp8' in allow is not used" in note for note in plan.notes)
    assert plan.levers == ()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have plans take this CPU for one with 8-bit units."""
    cpu = hardware("cpu")
    rates = {**cpu.flops, "bfloat16": 1e9, scaled_rate(""): 1e15, scaled_rate("1x32"): 1e15}
    monkeypatch.setattr(type(CPU), "cards", lambda _: {"cpu": replace(cpu, flops=rates)})


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_recomputed_it_has_the_same_bits() -> None:
    """Where 8 bits are faster the lever is used whatever the budget, and recomputation comes on top."""
    held = optimized(1000, allow={"fp8", "recompute"})
    expected = train_step(held, BATCH)
    plan = memopt.plan_of(held)
    assert (plan.levers, plan.added_time) == (("fp8",), 0.0)
    budget_gb = (plan.smallest_gb() + plan.plain_peak_gb) / 2
    model = optimized(budget_gb, allow={"fp8", "recompute"})
    step = train_step(model, BATCH)
    again = memopt.plan_of(model)
    assert again.levers == ("fp8",)
    assert any("fp8_" in text for text in _recomputed(again))
    assert step.peak_bytes <= budget_gb * GIB
    assert torch.equal(step.loss, expected.loss)
    for name, gradient in expected.gradients.items():
        assert torch.equal(step.gradients[name], gradient)


def _recomputed(plan: memopt.Plan) -> list[str]:
    assert plan.captured is not None
    assert plan.schedule is not None
    problem = plan.joined.problem
    return [problem.ops[index].name for index, times in plan.schedule.recomputed().items() if times]


@pytest.mark.slow
@pytest.mark.parametrize("allow", [{"fp8"}, {"fp8_delayed"}], ids=str)
def test_it_trains(allow: set[str]) -> None:
    def losses(allow: set[str]) -> list[float]:
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        options = {"optimizer": optimizer, "precision": "bf16", "allow": allow}
        memopt.optimize(model, smallest_gb(model, BATCH, **options), backend="aten", **options)
        step = memopt.TrainStep(model, optimizer)
        found = [float(step(BATCH).loss) for _ in range(8)]
        assert set(memopt.plan_of(model).levers) == allow
        return found

    plain, narrow = losses(set()), losses(allow)
    assert plain[-1] < 0.9 * plain[0]
    assert narrow == pytest.approx(plain, rel=0.01)


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("lever", ["fp8", "mxfp8"])
def test_through_inductor(lever: str) -> None:
    model = optimized(1000, backend="inductor", allow={lever})
    step = train_step(model, BATCH)
    step = train_step(model, BATCH)
    plan = memopt.plan_of(model)
    assert plan.levers == (lever,)
    assert step.peak_bytes <= plan.predicted_peak_bytes <= 1.05 * step.peak_bytes
    assert 1e-3 < error(step, in_bf16()[1]) < 3 * ROUNDING_E4M3


def large_llama() -> nn.Module:
    """Two layers of the size of Llama 3.2 1B's on the meta device, with a vocabulary that makes the loss small."""
    config = LlamaConfig(
        vocab_size=512, hidden_size=2048, intermediate_size=8192, num_hidden_layers=2, num_attention_heads=32,
        num_key_value_heads=8, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).train()
    model.loss_type = "ForCausalLM"
    return model


def kept(allow: set[str]) -> tuple[int, int, float]:
    """Return what `large_llama` saves for the backward on an H100 with all levers of `allow`: 4 x 2,048 tokens.

    Bytes in all, bytes of copies of parameters, and seconds of the step.
    """
    tokens, card = torch.zeros(4, 2048, dtype=torch.long), hardware("h100")
    call = ((), {"input_ids": tokens, "labels": tokens})
    captured = capture_on_fakes(large_llama(), call, None, torch.device("cpu"), differentiate_all=False)
    used = lever_sets(precision_rewriting("bf16", card), levers_named({"chunked_loss", *allow}), card)[-1]
    (region,) = trace_call(captured, replace(used, needed=""))
    problem = TracedStep("Llama", (region,)).price(PriceSettings(card)).problem.problem
    copies: set[torch.fx.Node] = set()
    for number, node in enumerate(region.module.graph.nodes):
        inputs = node.all_input_nodes
        if number in region.parameter_inputs or (inputs and copies.issuperset(inputs)):
            copies.add(node)
    names = {node.name for node in copies}
    read = {storage for op in problem.ops[problem.forward_ops :] for storage in op.reads}
    made = (op.makes for op in problem.ops[: problem.forward_ops] if op.name.partition(" of ")[0] in names)
    weights = sum(problem.storages[storage].bytes for makes in made for storage in makes if storage in read)
    return held_after_forward(problem, Schedule.save_all(problem)), weights, problem.seconds


@pytest.mark.slow
def test_what_llama_1b_keeps_for_the_backward() -> None:
    """At real sizes 8-bit layers save at least a tenth less, and with activations in 8 bits at least a quarter less."""
    bf16_bytes, bf16_weights, bf16_seconds = kept(set())
    fp8_bytes, fp8_weights, fp8_seconds = kept({"fp8"})
    assert fp8_bytes < 0.9 * bf16_bytes
    for lever in ("fp8", "fp8_block", "mxfp8"):
        assert kept({lever, "fp8_activations"})[0] < 0.75 * bf16_bytes
    assert fp8_weights < 0.52 * bf16_weights
    assert fp8_seconds < 0.9 * bf16_seconds
