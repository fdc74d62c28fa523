"""The token count of a batch, against the losses of real models, whose sums are known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from examples.models import families
from memopt.train.effective_batch import count_of, shifts_labels
from tests.train import pieces

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
