"""Levers on whole models: each lowers the smallest budget, pairs lower it further, and gradients remain right."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

import memopt
from examples.models.step import Step, train_step
from memopt.errors import GIB
from tests import smallest
from tests.end_to_end.steps import assert_equal

VOCABULARY, LENGTH = 4096, 128
ROUNDING = 2e-5
"""Of the largest value of all gradients, over four layers in fp32. Some gradients, as of the keys' biases, are zero but
for rounding."""
LEVERS = {"fused_ops", "fused_attention", "chunked_loss"}


def gpt2(layers: int = 4) -> nn.Module:
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=64, n_layer=layers, n_head=4, attn_implementation="eager",
        use_cache=False, bos_token_id=0, eos_token_id=0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation="eager", use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def opt() -> nn.Module:
    config = OPTConfig(
        vocab_size=VOCABULARY, hidden_size=64, ffn_dim=128, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=LENGTH, word_embed_proj_dim=64, attn_implementation="eager", use_cache=False,
        attention_dropout=0.0,
    )  # fmt: skip
    return OPTForCausalLM(config)


MODELS = {"small": partial(gpt2, 2), "gpt2": gpt2, "llama": llama, "opt": opt}


SLOW = pytest.mark.slow
QUICK_FIRST = ["small", *(pytest.param(name, marks=SLOW) for name in ("gpt2", "llama", "opt"))]
# Llama's SiLU and OPT's ReLU are operators already.
EACH = pytest.mark.parametrize(
    ("name", "lever"),
    [
        ("small", "chunked_loss"),
        *(pytest.param("gpt2", lever, marks=SLOW) for lever in sorted(LEVERS)),
        *(
            pytest.param(name, lever, marks=SLOW)
            for name in ("llama", "opt")
            for lever in sorted(LEVERS - {"fused_ops"})
        ),
    ],
)


def levers_of(name: str) -> set[str]:
    """Return the levers that change something in a model."""
    return LEVERS if name in ("small", "gpt2") else LEVERS - {"fused_ops"}


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name]().train()
    model.loss_type = "ForCausalLM"
    return model


def batch() -> dict[str, Any]:
    tokens = torch.randint(0, VOCABULARY, (4, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}


@cache
def plain(name: str) -> Step:
    return train_step(make(name), batch())


@cache
def smallest_gb(name: str, allow: frozenset[str]) -> float:
    """Return the smallest budget with these levers."""
    options: dict[str, Any] = {"optimizer": None, "precision": "fp32", "allow": allow}
    return smallest.smallest_gb(make(name), batch(), **options)


def train(name: str, allow: Collection[str], budget_gb: float) -> tuple[memopt.Plan, Step]:
    model = make(name)
    memopt.optimize(model, budget_gb, optimizer=None, precision="fp32", allow=allow)
    step = train_step(model, batch())
    return memopt.plan_of(model), step


def planned(name: str, allow: Collection[str], budget_gb: float) -> memopt.Plan:
    options: dict[str, Any] = {"optimizer": None, "precision": "fp32", "allow": allow}
    return memopt.plan(make(name), budget_gb, batch(), **options)


def check(name: str, plan: memopt.Plan, step: Step, budget_gb: float) -> None:
    assert step.peak_bytes <= budget_gb * GIB
    assert step.peak_bytes <= plan.predicted_peak_bytes <= 1.02 * step.peak_bytes
    assert_close(step, plain(name))


def assert_close(step: Step, plain: Step) -> None:
    assert float(step.loss) == pytest.approx(float(plain.loss), rel=1e-6)
    assert step.gradients.keys() == plain.gradients.keys()
    largest = max(float(gradient.abs().max()) for gradient in plain.gradients.values())
    for name, expected in plain.gradients.items():
        error = float((step.gradients[name] - expected).abs().max()) / largest
        assert error <= ROUNDING, f"the gradient of {name} differs by {error:.1e} of the largest"


@pytest.mark.slow
@EACH
def test_a_lever_saves_recomputation(name: str, lever: str) -> None:
    least = 1.1 * smallest_gb(name, frozenset({"recompute"}))
    alone = planned(name, {"recompute"}, least)
    plan, step = train(name, {"recompute", lever}, least)
    assert plan.levers == (lever,)
    assert plan.step_seconds + plan.added_seconds < 0.99 * (alone.step_seconds + alone.added_seconds)
    check(name, plan, step, least)


@pytest.mark.slow
@EACH
def test_recomputation_goes_below_a_lever(name: str, lever: str) -> None:
    least = smallest_gb(name, frozenset({"recompute", lever}))
    assert least < 0.9 * smallest_gb(name, frozenset({lever}))
    plan, step = train(name, {"recompute", lever}, least)
    assert plan.added_time > 0
    check(name, plan, step, least)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"small"}))
def test_levers_together_without_recomputation(name: str) -> None:
    least = smallest_gb(name, frozenset(LEVERS))
    assert least < 0.97 * min(smallest_gb(name, frozenset({lever})) for lever in levers_of(name))
    plan, step = train(name, LEVERS, least)
    assert (set(plan.levers), plan.added_time) == (levers_of(name), 0.0)
    check(name, plan, step, least)


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK_FIRST)
def test_all_together(name: str) -> None:
    every = frozenset({"recompute", *LEVERS})
    least = smallest_gb(name, every)
    assert least < 0.7 * smallest_gb(name, frozenset({"recompute"}))
    plan, step = train(name, every, 1.05 * least)
    assert set(plan.levers) == levers_of(name)
    check(name, plan, step, 1.05 * least)


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK_FIRST)
def test_reinplace(name: str) -> None:
    """The smallest budget falls, the step keeps it, and loss and gradients are bitwise the plain model's."""
    allow = frozenset({"recompute", "reinplace"})
    least = smallest_gb(name, allow)
    assert least < 0.8 * smallest_gb(name, frozenset({"recompute"}))
    plan, step = train(name, allow, least)
    assert plan.levers == ("reinplace",)
    assert step.peak_bytes <= least * GIB
    assert_equal(step, plain(name), ROUNDING if name == "llama" else 0.0)


@pytest.mark.slow
def test_no_lever_is_used_that_is_not_needed() -> None:
    plan, step = train("small", {"recompute", *LEVERS}, planned("small", {"recompute"}, 1000).plain_peak_gb)
    assert (plan.levers, plan.added_time) == ((), 0.0)
    assert_equal(step, plain("small"))


def test_nothing_is_allowed() -> None:
    options: dict[str, Any] = {"optimizer": None, "precision": "fp32", "allow": frozenset()}
    as_plain = smallest.smallest_gb(make("small"), batch(), outputs="all", **options)
    assert as_plain >= plain("small").peak_bytes / GIB
    assert smallest_gb("small", frozenset()) < as_plain, "outputs are computed on demand"


@pytest.mark.slow
def test_the_receipt() -> None:
    every = frozenset({"recompute", *LEVERS})
    plan = planned("small", every, 1.05 * smallest_gb("small", every))
    rows = plan.receipt
    assert [row.lever for row in rows] == [
        "plain step",
        "one graph",
        "fused_ops",
        "fused_attention",
        "chunked_loss",
        "recompute",
    ]
    assert [row.peak_bytes for row in rows] == sorted((row.peak_bytes for row in rows), reverse=True)
    assert rows[-1].peak_bytes == plan.predicted_peak_bytes
    assert rows[-1].seconds == pytest.approx(plan.step_seconds + plan.added_seconds)
    assert "fused_attention" in plan.table()


@pytest.mark.slow  # test_outputs.py has it with default options
def test_logits_that_are_returned_are_no_obstacle() -> None:
    """A loss in chunks by default, and logits when they are looked at."""
    model, reference = make("gpt2"), make("gpt2")
    least = smallest_gb("gpt2", frozenset({"chunked_loss"}))
    memopt.optimize(model, least, optimizer=None, precision="fp32", allow={"chunked_loss"})
    torch.manual_seed(2)
    expected = reference(**batch()).logits
    torch.manual_seed(2)
    with pytest.warns(UserWarning, match="an output of the model was read"):
        assert torch.equal(model(**batch()).logits, expected)
    assert memopt.plan_of(model).levers == ("chunked_loss",)


@pytest.mark.slow
def test_a_loss_function_needs_no_logits_of_its_own() -> None:
    """`loss_fn(model(inputs), targets)` returns the loss alone."""

    def loss_fn(output: Any, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten())

    tokens = batch()["input_ids"]
    options: dict[str, Any] = {"loss_fn": loss_fn, "optimizer": None, "precision": "fp32", "allow": {"chunked_loss"}}
    pair = {"input_ids": tokens}, tokens
    plan = memopt.plan(make("gpt2"), smallest.smallest_gb(make("gpt2"), pair, **options), pair, **options)
    assert plan.levers == ("chunked_loss",)
    assert plan.predicted_peak_bytes < 0.8 * plan.receipt[0].peak_bytes
