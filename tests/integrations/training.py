"""What the tests of all loops share: a GPT-2, its texts, a meter of steps, and the comparison of two runs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import memopt
from examples.models.ddp import fingerprint
from examples.models.families import GPT2, VOCABULARY, integers, library

EXACT: dict[str, Any] = {"allow": {"recompute", "reinplace"}}
BATCH, LENGTH = 4, 96
gpt2 = library("GPT2", "GPT2LMHeadModel", "ForCausalLM", **{**GPT2, "n_layer": 4})
BUDGET_GB = 0.036
"""Between the smallest budget and the plain peak, 0.048 GB, of a step of `gpt2` on one batch of texts with AdamW."""


def texts(count: int) -> list[dict[str, Tensor]]:
    """Texts of one length, whose first tokens are not trained in every other one."""
    rows = integers(VOCABULARY, count, LENGTH)
    return [text(row, 30 * (number % 2)) for number, row in enumerate(rows)]


def text(tokens: Tensor, untrained: int = 0) -> dict[str, Tensor]:
    """A text whose first tokens are not among its labels."""
    labels = tokens.clone()
    labels[:untrained] = -100
    return {"input_ids": tokens, "labels": labels}


def batches(count: int) -> Iterator[dict[str, Tensor]]:
    """Batches of `texts`."""
    rows = texts(count * BATCH)
    for first in range(0, len(rows), BATCH):
        chosen = rows[first : first + BATCH]
        yield {name: torch.stack([row[name] for row in chosen]) for name in chosen[0]}


@dataclass
class Run:
    """Losses, weights and peaks of a run."""

    losses: list[float] = field(default_factory=list)
    weights: dict[str, str] = field(default_factory=dict)
    """A hash of each weight: the weights themselves would be measured in the runs that follow."""
    peaks_gb: list[float] = field(default_factory=list)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """A step, whose peak is noted."""
        gc.collect()
        with memopt.measure_peak("cpu") as peak:
            yield
        self.peaks_gb.append(peak.gb)

    def ended(self, model: nn.Module) -> Run:
        """Note the weights."""
        self.weights = {name: fingerprint(value) for name, value in model.state_dict().items()}
        return self


def assert_same(run: Run, plain: Run) -> None:
    """Assert that losses and weights are the same bits."""
    assert run.losses == plain.losses
    assert run.weights == plain.weights


def assert_within(run: Run, budget_gb: float, plain: Run) -> None:
    """Assert that all steps but the first, which is planned, are within a budget that plain steps are above."""
    assert max(run.peaks_gb[1:]) <= budget_gb < max(plain.peaks_gb[1:])
