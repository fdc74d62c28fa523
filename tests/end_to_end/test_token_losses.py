"""Losses of other kinds than the mean of a cross entropy, on whole models with many words.

Each fits where its logits do not, holds what its plan says, and has the plain gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import memopt
from examples.models.step import own_bytes, train_step
from memopt.errors import GIB
from tests.marks import slow
from tests.passes.test_chunk_rows import selective_log_softmax, selective_log_softmax_in_16_bits

WORDS, BATCH, LENGTH = 20_000, 4, 96


def labels_of(tokens: Tensor, mask: Tensor) -> Tensor:
    """The next token of each, with those that are no part of the text ignored."""
    return tokens.masked_fill(mask == 0, -100)[:, 1:]


class Loss(nn.Module):
    """A language model with its loss in the forward, and a frozen reference where the loss has one."""

    def __init__(self, model: nn.Module, reference: nn.Module, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss
        self.reference = reference.requires_grad_(False)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return self.loss(self, tokens, mask)

    def logits(self, tokens: Tensor, mask: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
        return logits[:, :-1]

    def logits_of_reference(self, tokens: Tensor, mask: Tensor) -> Tensor:
        with torch.no_grad():
            logits: Tensor = self.reference(input_ids=tokens, attention_mask=mask, use_cache=False).logits
        return logits[:, :-1]


def masked(loss: Loss, tokens: Tensor, mask: Tensor) -> Tensor:
    labels = labels_of(tokens, mask)
    each = F.cross_entropy(loss.logits(tokens, mask).transpose(1, 2), labels, reduction="none", label_smoothing=0.1)
    return (each * mask[:, 1:]).sum() / mask[:, 1:].sum()


def with_z_loss(loss: Loss, tokens: Tensor, mask: Tensor) -> Tensor:
    logits = loss.logits(tokens, mask).float().flatten(0, 1)
    each = F.cross_entropy(logits, labels_of(tokens, mask).flatten(), reduction="none")
    return (each + 1e-3 * logits.logsumexp(-1) ** 2).sum() / mask.sum()


def log_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    """TRL's, of whole texts."""
    select = selective_log_softmax if logits.dtype == torch.float32 else selective_log_softmax_in_16_bits
    return (select(logits, labels.clamp(min=0)) * (labels != -100)).sum(-1)


def dpo(loss: Loss, tokens: Tensor, mask: Tensor) -> Tensor:
    labels = labels_of(tokens, mask)
    of_policy = log_probabilities(loss.logits(tokens, mask), labels)
    of_reference = log_probabilities(loss.logits_of_reference(tokens, mask), labels)
    chosen, rejected = (of_policy - of_reference).chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def grpo(loss: Loss, tokens: Tensor, mask: Tensor) -> Tensor:
    labels, seen = labels_of(tokens, mask).clamp(min=0), mask[:, 1:]
    logits = loss.logits(tokens, mask) / 0.9
    of_policy = selective_log_softmax(logits, labels)
    of_reference = selective_log_softmax(loss.logits_of_reference(tokens, mask) / 0.9, labels)
    logarithms = F.log_softmax(logits, -1)
    entropy = -(logarithms.exp() * logarithms).sum(-1)
    ratio = torch.exp(of_policy - of_policy.detach())
    advantage = torch.linspace(-1, 1, len(tokens)).unsqueeze(1)
    clipped = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    divergence = torch.exp(of_reference - of_policy) - (of_reference - of_policy) - 1
    return ((-clipped + 0.04 * divergence - 0.01 * entropy) * seen).sum() / seen.sum()


def distilled(loss: Loss, tokens: Tensor, mask: Tensor) -> Tensor:
    student, teacher = loss.logits(tokens, mask) / 2, loss.logits_of_reference(tokens, mask) / 2
    each = F.kl_div(F.log_softmax(student, -1), F.log_softmax(teacher, -1), reduction="none", log_target=True)
    return (each.sum(-1) * mask[:, 1:]).sum() / mask[:, 1:].sum()


LOSSES = {
    "masked": masked,
    "z-loss": with_z_loss,
    "DPO": dpo,
    "GRPO": grpo,
    "distilled": distilled,
}


def llama(layers: int = 2) -> nn.Module:
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def make(loss: str) -> Loss:
    torch.manual_seed(0)
    return Loss(llama(), llama(1), LOSSES[loss]).train()


def batch(length: int = LENGTH, batch: int = BATCH) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(0, WORDS, (batch, length), generator=generator)
    ends = torch.randint(length // 2, length, (batch, 1), generator=generator)
    return {"tokens": tokens, "mask": (torch.arange(length) < ends).long()}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 2e-5) -> None:
    assert found.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        error = float((found[name] - gradient).abs().max()) / largest
        assert error <= tolerance, f"the gradient of {name} differs by {error:.1e} of the largest"


@pytest.mark.parametrize("loss", ["masked", *map(slow, ("GRPO", "z-loss", "DPO", "distilled"))])
def test_fits_where_its_logits_do_not(loss: str) -> None:
    plain = train_step(make(loss), batch())
    model = make(loss)
    own = own_bytes(model, batch())
    budget_gb = (own + 0.35 * (plain.peak_bytes - own)) / GIB
    memopt.optimize(model, budget_gb, optimizer=None, precision="fp32")
    step = train_step(model, batch())
    plan = memopt.plan_of(model)
    assert "chunked_loss" in plan.levers
    assert step.peak_bytes <= plan.predicted_peak_bytes <= min(budget_gb * GIB, 1.02 * step.peak_bytes)
    assert float(step.loss) == pytest.approx(float(plain.loss), rel=1e-5)
    assert_close(step.gradients, plain.gradients)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["DPO", "GRPO"])
def test_texts_of_other_lengths(loss: str) -> None:
    model, other = make(loss), make(loss)
    plain = train_step(other, batch())
    own = own_bytes(model, batch())
    memopt.optimize(model, (own + 0.4 * (plain.peak_bytes - own)) / GIB, optimizer=None, precision="fp32")
    for length in (LENGTH, 80, 65):
        step, expected = train_step(model, batch(length)), train_step(other, batch(length))
        assert float(step.loss) == pytest.approx(float(expected.loss), rel=1e-5)
        assert_close(step.gradients, expected.gradients)
