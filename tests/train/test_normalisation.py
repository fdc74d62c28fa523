"""However the tokens are spread over microbatches and calls, the gradient is that of the mean over all of them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from memopt import TrainStep
from tests.train import pieces
from tests.train.pieces import (
    Batch,
    bert_without_dropout,
    gpt2_without_dropout,
    gradients_of,
    largest_error,
    plain_gradients,
    t5_without_dropout,
    uneven_text,
)

MODELS = {"gpt2": gpt2_without_dropout, "bert": bert_without_dropout, "t5": t5_without_dropout}


def step_of(model: nn.Module, **options: Any) -> TrainStep:
    return TrainStep(model, torch.optim.SGD(model.parameters(), lr=1.0), max_grad_norm=None, **options)


def one_by_one(batch: Batch) -> list[Batch]:
    samples = len(batch["input_ids"])
    return [{name: each[number : number + 1] for name, each in batch.items()} for number in range(samples)]


def in_one_list(model: nn.Module, batch: Batch) -> tuple[TrainStep, Callable[[], Any]]:
    step = step_of(model)
    return step, lambda: step(one_by_one(batch))


def split(model: nn.Module, batch: Batch) -> tuple[TrainStep, Callable[[], Any]]:
    step = step_of(model, microbatches=4)
    return step, lambda: step(batch)


def over_calls(model: nn.Module, batch: Batch) -> tuple[TrainStep, Callable[[], Any]]:
    """The first call has no valid token, and no call knows of the later ones."""
    step = step_of(model, accumulate=4)
    return step, lambda: [step(microbatch) for microbatch in one_by_one(batch)][-1]


def over_calls_of_lists(model: nn.Module, batch: Batch) -> tuple[TrainStep, Callable[[], Any]]:
    step = step_of(model, accumulate=2)
    singles = one_by_one(batch)
    return step, lambda: [step(iter(singles[:3])), step(singles[3:])][-1]


WAYS = [in_one_list, split, over_calls, over_calls_of_lists]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_uneven_tokens_give_the_full_batch(name: str, way: Callable[..., Any]) -> None:
    """With a sample without any valid token among them."""
    model, batch = MODELS[name](), uneven_text()
    expected, loss = plain_gradients(model, batch), float(model(**batch).loss.detach())
    results: list[Any] = []
    step, run = way(model, batch)
    found = gradients_of(step, lambda: results.append(run()))
    assert largest_error(found, expected) < 1e-6
    assert float(results[0].loss) == pytest.approx(loss, rel=1e-6)
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in expected))
    assert float(results[0].grad_norm) == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_in_float64_it_is_exact(accumulate: int) -> None:
    """With a loss function and targets that it ignores."""
    x, targets = pieces.normals(8, 5, pieces.WIDTH).double(), pieces.integers(7, 8, 5)
    targets[torch.arange(8)[:, None] > torch.arange(5) + 3] = -100
    model, loss_fn = nn.Linear(pieces.WIDTH, 7).double(), lambda out, y: nn.functional.cross_entropy(out.mT, y)
    loss_fn(model(x), targets).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    singles = list(zip(x.split(2), targets.split(2), strict=True))
    step = step_of(model, loss_fn=loss_fn, accumulate=accumulate)
    found = gradients_of(
        step, lambda: step(singles) if accumulate == 1 else [step(microbatch) for microbatch in singles]
    )
    assert largest_error(found, expected) < 1e-14


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), min_size=1, max_size=4))
def test_any_spread_of_tokens_gives_the_mean_over_all(calls: list[list[int]]) -> None:
    """Each number is the valid targets of a microbatch of five, each list a call."""
    torch.manual_seed(0)
    model, loss_fn = nn.Linear(4, 3).double(), nn.functional.cross_entropy
    counts = [count for call in calls for count in call]
    x, targets = torch.randn(len(counts), 5, 4).double(), torch.randint(0, 3, (len(counts), 5))
    targets[torch.arange(5) >= torch.tensor(counts)[:, None]] = -100
    loss_fn(model(x).flatten(0, 1), targets.flatten()).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    singles = iter(zip(x, targets, strict=True))
    step = step_of(model, loss_fn=loss_fn, accumulate=len(calls))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        found = gradients_of(step, lambda: [step([next(singles) for _ in call]) for call in calls])
    if not any(counts):
        assert not found, "skipped"
    else:
        assert largest_error(found, expected) < 1e-12


def test_a_mean_of_means_is_not_the_full_batch() -> None:
    model, batch = gpt2_without_dropout(), uneven_text()
    expected = plain_gradients(model, batch)
    singles = one_by_one(batch)[1:]  # by hand, a sample without a valid token gives NaN
    for microbatch in singles:
        (model(**microbatch).loss / len(singles)).backward()
    wrong = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert largest_error(wrong, expected) > 0.1


def test_weights_without_the_shift_are_not_the_full_batch() -> None:
    """The first token of a sequence is predicted by none: counting it is a mistake of a few percent."""
    model, batch = gpt2_without_dropout(), uneven_text()
    expected = plain_gradients(model, batch)
    step = step_of(model, count=lambda each: (each["labels"] != -100).sum())
    assert largest_error(gradients_of(step, lambda: step(one_by_one(batch))), expected) > 0.01


def test_a_count_of_ones_own() -> None:
    """The mean over the positive entries only."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(pieces.WIDTH, 1)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return (self.linear(x).squeeze(-1) * mask).sum() / mask.sum()

    x, mask = pieces.points(8)[0], (torch.arange(8) % 3 > 0).float()
    model = pieces.seeded(Masked)()
    model(x, mask).backward()
    expected = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    for count in (lambda batch: batch[1].sum(), lambda batch: int(batch[1].sum())):
        step = step_of(pieces.seeded(Masked)(), microbatches=4, count=count)
        assert largest_error(gradients_of(step, lambda step=step: step((x, mask))), expected) < 1e-6


def test_samples_count_where_there_are_no_labels() -> None:
    model, (x, y) = pieces.regression().eval(), pieces.points(8)
    model(x, y).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    step = step_of(model)
    found = gradients_of(step, lambda: step([(x[:1], y[:1]), (x[1:3], y[1:3]), (x[3:], y[3:])]))
    assert largest_error(found, expected) < 1e-6


def test_a_batch_without_any_token_is_skipped() -> None:
    model, batch = gpt2_without_dropout(), uneven_text()
    nothing = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    before = pieces.weights(model)
    step = step_of(model, accumulate=2)
    step(nothing)
    with pytest.warns(RuntimeWarning, match="step 1 was skipped: its loss is nan"):
        assert step(nothing).skipped
    assert pieces.same(pieces.weights(model), before)
    assert not step(batch).complete
    assert step(batch).stepped


def test_the_loss_of_calls_in_between_is_the_mean_up_to_there() -> None:
    model, batch = gpt2_without_dropout(), uneven_text()
    first, second = pieces.text(2, seed=5), {name: each[1:] for name, each in batch.items()}
    step = step_of(model, accumulate=3)
    losses = [float(model(**batch).loss.detach()) for batch in (first, second)]
    counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in (first, second)]
    results = [step(first), step(second)]
    assert [result.grad_norm for result in results] == [None, None]
    assert not any(result.complete or result.stepped or result.skipped for result in results)
    assert float(results[0].loss) == pytest.approx(losses[0])
    mean = (losses[0] * counts[0] + losses[1] * counts[1]) / sum(counts)
    assert float(results[1].loss) == pytest.approx(mean)


def test_fp16_does_not_overflow_by_the_sum_over_tokens() -> None:
    """Weights are relative to what is expected: the scale that does for one batch does for any number of calls."""
    model = pieces.gpt2()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    step = TrainStep(model, torch.optim.AdamW(model.parameters()), accumulate=8, scaler=scaler, autocast=torch.float16)
    results = [step(pieces.text(seed=seed)) for seed in range(8)]
    assert results[-1].stepped
