"""Means over microbatches of different sizes, weighted by their terms, which are counted on one rank or several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from examples.models import families
from examples.models.families import integers, normals
from memopt import TrainStep
from memopt.compat.ddp import unwrapped
from memopt.train.effective_batch import EffectiveBatch, as_count, count_of, mean_over_ranks, shifts_labels
from tests.train import pieces
from tests.two_ranks import on_two_ranks

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


MEANS = ["gpt2-sdpa", "llama", "mixtral", "bert", "t5", "whisper", "vit", "clip"]


def counted(model: nn.Module, batch: Any, count: Any = None, *, with_targets: bool = False) -> float:
    return float(count_of(batch, model, count, with_targets=with_targets))


@pytest.mark.parametrize("name", MEANS[:-1])
def test_the_count_is_what_the_loss_divides_by(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen at the cross entropy that the model calls, whichever way it shifts and masks."""
    family = families.BY_NAME[name]
    model, batch = family.make(), family.batch("shorter")
    seen: list[int] = []
    real = nn.functional.cross_entropy

    def spy(logits: torch.Tensor, target: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(int((target != -100).sum()))
        return real(logits, target, *args, **kwargs)

    monkeypatch.setattr(nn.functional, "cross_entropy", spy)
    with torch.no_grad():
        model(**batch)
    assert seen[-1:] == [counted(model, batch)]


@pytest.mark.parametrize(
    ("name", "shifts"),
    [("gpt2-sdpa", True), ("llama", True), ("bert", False), ("t5", False), ("whisper", False), ("vit", False)],
)
def test_who_shifts(name: str, shifts: bool) -> None:
    assert shifts_labels(families.BY_NAME[name].make()) is shifts


def test_a_head_without_a_loss_type_shifts() -> None:
    """Hugging Face falls back to the causal loss."""
    model: Any = pieces.gpt2()
    model.loss_type = None
    assert shifts_labels(model)


def test_who_is_not_of_that_library_does_not_shift() -> None:
    assert not shifts_labels(pieces.regression())


LABELS = torch.tensor([[1, -100, 2], [-100, -100, 3]])


@pytest.mark.parametrize(
    ("batch", "with_targets", "expected"),
    [
        ({"x": torch.zeros(2, 3), "labels": LABELS}, False, 3),
        ({"x": torch.zeros(2, 3), "labels": LABELS.float()}, False, 2),
        ({"x": torch.zeros(2, 3), "labels": LABELS > 0}, False, 2),
        ({"x": torch.zeros(2, 3), "labels": None}, False, 2),
        ({"x": torch.zeros(2, 3), "shift_labels": LABELS, "labels": LABELS[:, :2]}, False, 3),
        ((torch.zeros(2, 3), LABELS), True, 3),
        ((torch.zeros(2, 3), LABELS), False, 2),
        ((torch.zeros(2, 3), torch.zeros(2)), True, 2),
        (torch.zeros(5, 3), False, 5),
    ],
)
def test_defaults(batch: Any, with_targets: bool, expected: int) -> None:
    assert counted(pieces.regression(), batch, with_targets=with_targets) == expected


def test_causal_labels_of_a_dictionary() -> None:
    assert counted(pieces.gpt2(), {"labels": LABELS}) == 2
    assert counted(pieces.gpt2(), {"labels": LABELS, "shift_labels": LABELS}) == 3


@pytest.mark.parametrize(("value", "expected"), [(3, 3), (2.5, 2.5), (torch.tensor([4]), 4), (0, 0)])
def test_ones_own_count(value: Any, expected: float) -> None:
    assert counted(pieces.regression(), (), lambda _: value) == expected


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ("three", TypeError, "not 'three'"),
        (None, TypeError, "not None"),
        (True, TypeError, "not True"),
        (torch.ones(2), TypeError, r"shape \(2,\)"),
        (-1, ValueError, "zero or more, not -1"),
        (float("nan"), ValueError, "not nan"),
    ],
)
def test_counts_that_are_none(value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        counted(pieces.regression(), (), lambda _: value)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="disagree"):
        counted(pieces.regression(), (torch.zeros(2, 3), torch.zeros(3)))
    with pytest.raises(ValueError, match="num_items_in_batch"):
        counted(pieces.gpt2(), {"labels": LABELS, "num_items_in_batch": 3})


TOKENS = [[3, 0], [7, 1]]
"""Valid targets of each rank's microbatches."""


def built() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(8, 5)


def batch(rank: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    seed = 2 * rank + number
    targets = integers(5, 8, seed=seed)
    targets[TOKENS[rank][number] :] = -100
    return normals(8, 8, seed=seed), targets


def step_of(model: nn.Module, **options: Any) -> TrainStep:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return TrainStep(model, optimizer, loss_fn=nn.functional.cross_entropy, **options)


def counted_exchange(seen, bucket):
    """Not annotated: torch compares annotations, which are strings here."""
    seen.append(bucket.index())
    return default_hooks.allreduce_hook(None, bucket)


def train_rank(rank: int) -> dict[int, dict[str, Any]]:
    results = {}
    for accumulate in (1, 2):
        model = DistributedDataParallel(built())
        exchanges: list[int] = []

        model.register_comm_hook(exchanges, counted_exchange)
        step = step_of(model, accumulate=accumulate)
        microbatches = [batch(rank, number) for number in range(2)]
        result = [step(microbatch) for microbatch in ([microbatches] if accumulate == 1 else microbatches)][-1]
        poisoned = (torch.full((8, 8), float("nan") if rank else 1.0), batch(rank, 0)[1])
        skipped = [step(poisoned) for _ in range(accumulate)][-1].skipped
        results[accumulate] = {
            "weight": model.module.weight.detach(),
            "loss": float(result.loss),
            "norm": float(result.grad_norm),  # type: ignore[arg-type]
            "exchanges": len(exchanges),
            "skipped": skipped,
        }
    return results


@pytest.mark.filterwarnings("ignore")
def test_two_ranks_with_uneven_tokens_are_one() -> None:
    ranks = on_two_ranks(train_rank)
    model = built()
    result = step_of(model)([batch(rank, number) for rank in range(2) for number in range(2)])
    for found in (rank[accumulate] for rank in ranks for accumulate in (1, 2)):
        torch.testing.assert_close(found["weight"], model.weight.detach(), rtol=1e-6, atol=1e-7)
        assert found["loss"] == pytest.approx(float(result.loss), rel=1e-6)
        assert found["norm"] == pytest.approx(float(result.grad_norm), rel=1e-6)  # type: ignore[arg-type]
        assert found["exchanges"] == 2, "once an effective batch, the skipped one included"
        assert found["skipped"], "on both ranks, though only one has seen the NaN"


def test_alone() -> None:
    model = nn.Linear(1, 1)
    assert unwrapped(model) is model
    values = torch.ones(2)
    assert mean_over_ranks(values, model) is values
