"""Sizes that depend on data within the regions of a call that breaks: observed, guarded, and planned once more."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memopt
from memopt.errors import GIB

EXACT: dict[str, Any] = {"precision": "fp32", "allow": {"recompute", "reinplace"}, "elsewhere_gb": 0}
WORDS, WIDTH = 2000, 64


class DistinctWords(nn.Module):
    """Embeds and encodes each distinct word of a batch once, as recommenders do, the padding as the first of them; its
    Python code looks at the values of the hidden states before it goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Tanh())
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        distinct = ids[ids > 0].unique()  # nothing limits its size for torch
        encoded = self.encoder(self.embedding(distinct))
        hidden = encoded[torch.searchsorted(distinct, ids)]
        if not torch.isfinite(hidden).all():
            raise FloatingPointError("the hidden states are not finite")
        return F.cross_entropy(self.head(hidden[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def batch(distinct: int) -> torch.Tensor:
    return torch.randint(0, distinct, (8, 64), generator=torch.Generator().manual_seed(distinct))


def train(model: nn.Module, ids: torch.Tensor) -> tuple[list[str], int]:
    """The fingerprints of the loss and the gradients of a step, and its peak in bytes."""
    model.zero_grad()
    gc.collect()
    with memopt.measure_peak() as peak:
        loss = model(ids)
        loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    values = [value.detach().numpy().tobytes() for value in (loss, *gradients)]
    return [hashlib.sha256(value).hexdigest() for value in values], peak.bytes


@pytest.fixture
def one_thread() -> Iterator[None]:
    """With several, the plain model's own gradients differ from step to step: that of an index sums in any order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_batch_with_more_is_planned_again() -> None:
    torch.manual_seed(0)
    model = DistinctWords()
    few, many = batch(20), batch(400)
    steps = few, few, many, few
    roomy = memopt.plan(model, 1000, many, optimizer=None, **EXACT)
    budget_gb = 0.5 * (roomy.smallest_gb() + roomy.plain_peak_gb)
    assert roomy.captured is not None
    assert any(sizes.allowed != sizes.seen for sizes in roomy.captured.run_sizes)
    del roomy
    expected = [train(model, ids)[0] for ids in steps]
    memopt.optimize(model, budget_gb, example_inputs=few, optimizer=None, **EXACT)
    for number, ids in enumerate(steps):
        found, peak_bytes = train(model, ids)
        assert found == expected[number], number
        assert peak_bytes <= budget_gb * GIB, number
