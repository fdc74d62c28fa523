"""Tests that need a GPU: `pytest tests/end_to_end/test_gpu.py` on a machine with one; skipped elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import memopt
from memopt.errors import GIB

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def make() -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=2048, n_positions=256, n_embd=256, n_layer=8, n_head=4, use_cache=False, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.2,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).train().cuda()
    model.loss_type = "ForCausalLM"
    return model


def batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 2048, (8, 256), generator=torch.Generator().manual_seed(1)).cuda()
    return {"input_ids": tokens, "labels": tokens}


def gradients(model: nn.Module) -> tuple[torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(3)
    loss = model(**batch()).loss
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7])
def test_dropout_is_the_plain_models_however_often_it_is_evaluated(share: float) -> None:
    """A model with dropout: recomputing it with other random numbers would show in every gradient."""
    options: dict[str, Any] = {"precision": "fp32", "allow": {"recompute"}}
    plan = memopt.plan(make(), 1e3, batch(), **options)
    least = plan.smallest_gb()
    budget_gb = 1.0001 * least + share * (plan.plain_peak_gb - least)
    model = make()
    memopt.optimize(model, budget_gb, backend="aten", **options)
    with memopt.measure_peak("cuda") as peak:
        loss, ours = gradients(model)
    tight = memopt.plan_of(model)
    assert tight.schedule is not None
    again = tight.schedule.recomputed()
    assert again
    assert share > 0 or max(again.values()) > 1
    assert peak.bytes <= budget_gb * GIB - tight.account.uncounted_bytes
    plain_loss, plain = gradients(make())
    assert torch.equal(loss, plain_loss)
    for mine, its in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_the_budget_is_kept_for_a_hundred_steps_in_a_capped_process(backend: str) -> None:
    plan = memopt.plan(make(), 1e3, batch(), precision="bf16")
    budget_gb = (plan.smallest_gb() + plan.plain_peak_gb) / 2
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((budget_gb * GIB - plan.account.context) / total)
    try:
        model = make()
        memopt.optimize(model, budget_gb, precision="bf16", backend=backend)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        step = memopt.TrainStep(model, optimizer)
        losses = [float(step(batch()).loss) for _ in range(100)]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert losses[-1] < losses[0]
