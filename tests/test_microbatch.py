"""Batches taken as microbatches, and batches split into them."""

from __future__ import annotations

from collections import UserDict, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from memopt.microbatch import as_microbatches, samples_of, split

Pair = namedtuple("Pair", ["x", "y"])
X, Y = torch.arange(24.0).reshape(6, 4), torch.arange(6)


def test_every_tensor_is_cut_however_nested() -> None:
    mask = torch.ones(6, 1, 4, 4)
    batch = {"x": X, "more": (Y, [mask, None]), "temperature": torch.tensor(2.0), "return_loss": True}
    first, second = split(batch, 2)
    assert first.keys() == batch.keys()
    assert torch.equal(first["x"], X[:3])
    assert torch.equal(second["more"][0], Y[3:])
    assert second["more"][1][0].shape == (3, 1, 4, 4)
    assert second["more"][1][1] is None
    assert second["temperature"] is batch["temperature"]
    assert second["return_loss"] is True


def test_pieces_are_views() -> None:
    assert split((X,), 3)[1][0].untyped_storage().data_ptr() == X.untyped_storage().data_ptr()


def test_kinds_of_batches_stay() -> None:
    assert isinstance(split(Pair(X, Y), 2)[0], Pair)
    assert split(Pair(X, Y), 2)[1].y.tolist() == [3, 4, 5]
    assert torch.equal(split(X, 2)[1], X[3:])
    assert isinstance(split(UserDict(x=X), 2)[0], dict), "as Hugging Face's BatchEncoding"


def test_one_batch_is_one_microbatch_untouched() -> None:
    batch = {"x": X, "position": torch.zeros(1, 4)}
    assert as_microbatches(batch)[0] is batch


def test_a_list_with_a_tensor_is_how_loaders_collate_a_tuple() -> None:
    (batch,) = as_microbatches([X, Y])
    assert isinstance(batch, tuple)
    assert batch[1] is Y


@pytest.mark.parametrize("series", [list, iter])
def test_a_series_is_taken_as_it_is(series: Any) -> None:
    given_ = [(X[:1], Y[:1]), (X[1:], Y[1:])]
    assert [len(inputs[1]) for inputs in as_microbatches(series(given_))] == [1, 5]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6))
def test_pieces_joined_are_the_batch(pieces: int, size: int) -> None:
    x: Tensor = torch.arange(pieces * size * 2).reshape(-1, 2)
    cut = split({"x": x, "both": (x, x[:, 0])}, pieces)
    assert len(cut) == pieces
    assert torch.equal(torch.cat([piece["x"] for piece in cut]), x)
    assert torch.equal(torch.cat([piece["both"][1] for piece in cut]), x[:, 0])


@pytest.mark.parametrize(
    ("batch", "pieces", "message"),
    [
        ({}, 1, "it holds nothing"),
        ((), 1, "it holds nothing"),
        (torch.empty(0, 3), 1, "batch: 0"),
        ({"x": torch.empty(0, 3), "y": torch.empty(0)}, 1, r"batch\['x'\]: 0"),
        ([], 1, "list of microbatches is empty"),
        (iter([]), 1, "list of microbatches is empty"),
        ([{}], 1, "it holds nothing"),
        ((X, Y), 4, "6 samples cannot be split into 4 equal microbatches; choose a divisor of 6"),
        ((X, Y[:5]), 2, r"disagree in the first dimension \(batch\[0\]: 6, batch\[1\]: 5\)"),
        ({"x": 3}, 2, "no tensor with a first dimension"),
        ([(X, Y), (X, Y)], 2, "microbatches=2 splits one batch"),
    ],
)
def test_what_is_refused(batch: Any, pieces: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        as_microbatches(batch, pieces)


@pytest.mark.parametrize("batch", [3, "text", None, range(2), torch.utils.data.DataLoader([1, 2])])
def test_what_is_no_batch(batch: Any) -> None:
    with pytest.raises(TypeError, match="a batch must be a tuple"):
        as_microbatches(batch)


def test_samples() -> None:
    assert samples_of({"x": X, "y": Y, "scalar": torch.tensor(1.0)}) == 6
