"""Means over microbatches of different sizes, by weights that need no count ahead."""

from __future__ import annotations

import torch
from torch import nn

from memopt.train.effective_batch import EffectiveBatch, as_count

CPU, MODEL = torch.device("cpu"), nn.Linear(1, 1)


def added(losses_and_counts: list[tuple[float, int]], calls: int) -> tuple[EffectiveBatch, list[float]]:
    batch, weighted = EffectiveBatch.empty(CPU), []
    for loss, count in losses_and_counts:
        tokens = as_count(count, batch)
        batch = batch.expecting([tokens], calls, MODEL)
        weighted.append(batch.weighted(torch.tensor(loss), tokens))
        batch = batch.plus(weighted[-1], tokens)
    return batch, [float(loss) for loss in weighted]


def test_the_mean_is_that_over_all_tokens() -> None:
    batch, _ = added([(1.0, 2), (4.0, 6)], calls=2)
    assert (batch.calls, float(batch.tokens), float(batch.reference)) == (2, 8.0, 4.0)
    assert float(batch.mean_loss) == (1.0 * 2 + 4.0 * 6) / 8
    assert float(batch.correction) == 0.5


def test_equal_counts_are_weighted_exactly() -> None:
    batch, weighted = added([(3.0, 5), (6.0, 5), (9.0, 5)], calls=3)
    assert weighted == [float(torch.tensor(loss) * torch.tensor(1 / 3)) for loss in (3.0, 6.0, 9.0)]
    assert float(batch.correction) == 1.0


def test_a_microbatch_without_a_token_counts_as_nothing() -> None:
    batch, weighted = added([(float("nan"), 0), (4.0, 2)], calls=2)
    assert weighted[0] == 0.0
    assert float(batch.mean_loss) == 4.0


def test_counts_become_numbers_on_the_device() -> None:
    empty = EffectiveBatch.empty(CPU)
    for count in (3, 3.0, torch.tensor(3)):
        found = as_count(count, empty)
        assert (found.dtype, found.dim(), float(found)) == (torch.float64, 0, 3.0)
