"""The changes that a refusal suggests to the user: their figures hold once they are made."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import memopt
from examples.models.families import BY_NAME
from memopt import BudgetError, TrainStep
from memopt.account.optimizer_trial import fused
from memopt.planning.advice import _LowRank, with_low_rank
from memopt.planning.call_planner import CallPlanner
from tests.shortened import SHORT
from tests.smallest import smallest_gb

Batch = dict[str, torch.Tensor]
OPTIONS: dict[str, Any] = {"precision": "fp32", "allow": {"recompute", "microbatch"}}


def make() -> nn.Module:
    """5 MB of parameters."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=2048, n_positions=32, n_embd=192, n_layer=2, n_head=4, use_cache=False, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"
    return model


def batch(samples: int = 1) -> Batch:
    tokens = torch.randint(0, 2048, (samples, 32), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}


def refusal(budget_gb: float, batch: Batch, effort: Any = "default") -> str:
    with pytest.raises(BudgetError) as error:
        memopt.plan(make(), budget_gb, batch, effort=effort, **OPTIONS)
    return "; ".join(error.value.further)


def figure(text: str, words: str, budget_gb: float) -> float:
    """The budget in GB that the text says would do, from the share that it leaves to spare."""
    found = re.search(rf"{words}.*? this budget would do, with (\S+)% to spare", text)
    assert found, text
    return budget_gb * (1 - float(found[1]) / 100)


@pytest.mark.slow
def test_another_optimizer_or_adapters() -> None:
    resident = sum(parameter.nbytes for parameter in make().parameters()) / 2**30
    text = refusal(3 * resident, batch(), "best")  # AdamW holds as much again
    stateless, adapters = (figure(text, words, 3 * resident) for words in ("with a stateless optimizer", "with LoRA"))
    assert resident < adapters < stateless < 3 * resident
    assert "microbatches" not in text
    memopt.plan(make(), stateless, batch(), optimizer=torch.optim.SGD, **OPTIONS)
    memopt.plan(with_low_rank(make())[0], adapters, batch(), **OPTIONS)


ON_H100: dict[str, Any] = {"optimizer": None, "precision": "fp32", "allow": {"recompute"}, "device": "h100"}


@pytest.mark.slow
def test_growing_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expandable segments leave fewer holes between the blocks of torch's allocator."""
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    expanding = ON_H100 | {"allow": {"recompute", "expandable_segments"}}
    plain, growing = (smallest_gb(make(), batch(512), **options) for options in (ON_H100, expanding))
    assert growing < 0.97 * plain
    plan = memopt.plan(make(), 1.001 * growing, batch(512), **expanding)
    assert "expandable_segments" in plan.levers
    assert any("expandable segments" in note for note in plan.notes)
    assert "expandable_segments" not in memopt.plan(make(), 1.5 * plain, batch(512), **expanding).levers
    with pytest.raises(BudgetError) as error:
        memopt.plan(make(), 1.001 * growing, batch(512), **ON_H100)
    text = "; ".join(error.value.further)
    assert figure(text, "with 'expandable_segments' in allow", 1.001 * growing) == pytest.approx(growing, rel=1e-3)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    assert smallest_gb(make(), batch(512), **expanding) == plain, "the user has turned them off"


@pytest.mark.slow
@pytest.mark.parametrize("instance", [False, True])
def test_fused_kernels(instance: bool) -> None:
    """On CUDA, AdamW goes over all parameters at once, with as much again in temporaries."""
    model = make()
    options = ON_H100 | {"optimizer": torch.optim.AdamW(model.parameters()) if instance else torch.optim.AdamW}
    with_temporaries = smallest_gb(model, batch(), **options)
    least = smallest_gb(model, batch(), **ON_H100 | {"optimizer": partial(torch.optim.AdamW, fused=True)})
    assert least < 0.999 * with_temporaries
    with pytest.raises(BudgetError) as error:
        memopt.plan(model, between := (least + with_temporaries) / 2, batch(), **options)
    assert figure("; ".join(error.value.further), "with fused=True in the optimizer", between) == pytest.approx(
        least, rel=1e-3
    )
    assert fused(partial(torch.optim.AdamW, fused=True)) is None
    assert fused(torch.optim.Adafactor) is None


@pytest.mark.slow
def test_microbatches() -> None:
    samples = 32
    with pytest.raises(BudgetError) as error:
        memopt.plan(make(), 1e-3, batch(samples), **OPTIONS)
    budget_gb = 0.9 * error.value.smallest_gb
    pieces = figure(refusal(budget_gb, batch(samples)), f"{samples} samples into microbatches", budget_gb)
    model = memopt.optimize(make(), 1.01 * pieces, **OPTIONS)
    step = TrainStep(model, torch.optim.AdamW(model.parameters()))
    with pytest.warns(UserWarning, match=r"is trained in (8|16|32) microbatches"):
        step(batch(samples))


@pytest.mark.slow
def test_a_budget_near_the_smallest_is_refused_without_another_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another capture takes longer than a plan: the smallest budget is named at once."""
    captured: list[object] = []
    on_fakes = CallPlanner.capture_on_fakes

    def counted(planner: CallPlanner, *args: Any) -> Any:
        captured.append(args)
        return on_fakes(planner, *args)

    monkeypatch.setattr(CallPlanner, "capture_on_fakes", counted)
    model, tokens = make(), batch(8)
    options: dict[str, Any] = {"precision": "bf16", "optimizer": torch.optim.AdamW}
    least = smallest_gb(model, tokens, **options)
    captures = {}
    for share in (0.995, 0.9):
        captured.clear()
        with pytest.raises(BudgetError) as error:
            memopt.plan(model, share * least, tokens, effort="best", **options)
        assert error.value.smallest_gb == least
        captures[share] = len(captured)
    assert captures[0.995] == 0
    assert captures[0.9] > 0


@pytest.mark.slow
def test_what_takes_longer_than_a_share_of_the_plan_is_tried_with_the_best_effort_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    captured: list[object] = []
    on_fakes = CallPlanner.capture_on_fakes
    monkeypatch.setattr(
        CallPlanner, "capture_on_fakes", lambda self, *args: captured.append(args) or on_fakes(self, *args)
    )
    model = SHORT["llama"].make()
    tokens = SHORT["llama"].batch("usual")
    options: dict[str, Any] = {"precision": "fp32", "allow": {"recompute", "microbatch"}}
    least = smallest_gb(model, tokens, **options)
    monkeypatch.setattr("memopt.planning.plan_search._AT_LEAST", 0)
    found = {}
    for effort in ("fast", "default", "best"):
        captured.clear()
        with pytest.raises(BudgetError) as error:
            memopt.plan(model, 0.95 * least, tokens, effort=effort, **options)
        found[effort] = error.value, len(captured)
        assert error.value.smallest_gb == least
    for effort in ("fast", "default"):
        refused, captures = found[effort]
        assert captures == 0
        assert [way.split()[0] for way in refused.untried] == ["'optimizer_in_backward'", "microbatches", "LoRA"]
        assert "effort='best'" in refused.notes[-1]
        assert refused.notes[-1] in str(refused)
        assert any(way.type.startswith("torch.optim.SGD") for way in refused.ways)
    refused, captures = found["best"]
    assert captures == 2
    assert refused.untried == ()
    assert {way.type.split()[0] for way in refused.ways} > {way.type.split()[0] for way in found["default"][0].ways}


def test_nothing_hopeless_is_said() -> None:
    assert refusal(1e-3, batch(4)).count("would do") == 0


@pytest.mark.parametrize("frozen", ["none", "all but adapters", "all but the head"])
def test_adapters_are_named_only_where_most_parameters_are_trained(frozen: str) -> None:
    """With effort "fast" nothing is tried, and all that may help is named."""
    model = make()
    if frozen == "all but adapters":
        model = with_low_rank(model, rank=4)[0]
    elif frozen == "all but the head":
        model.requires_grad_(False).get_submodule("transformer.ln_f").requires_grad_(True)
    options = OPTIONS | {"optimizer": torch.optim.SGD}
    least = smallest_gb(model, batch(), **options)
    with pytest.raises(BudgetError) as error:
        memopt.plan(model, 0.97 * least, batch(), effort="fast", **options)
    named = [way for way in error.value.untried if "LoRA" in way]
    assert len(named) == (frozen == "none")
    assert not any("LoRA" in way.type for way in error.value.ways)


def test_adapters_leave_the_head_and_the_rest_alone() -> None:
    model = BY_NAME["llama"].make()
    twin, number = with_low_rank(model, rank=4)
    layers = len(model.get_submodule("model.layers"))
    assert number == 7 * layers
    assert not isinstance(twin.get_submodule("lm_head"), _LowRank)
    learning = {name.rpartition(".")[2] for name, each in twin.named_parameters() if each.requires_grad}
    assert learning == {"down", "up"}
    assert all(parameter.device.type == "meta" for parameter in twin.parameters())
    assert all(parameter.device.type == "cpu" and parameter.requires_grad for parameter in model.parameters())
