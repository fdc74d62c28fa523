"""Which outputs a region defers, and what it returns instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memopt.capture.region import RecordedRegion
from tests.capture.recorded import recorded

WIDTH, CLASSES, ROWS = 16, 512, 64
X = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
MANY = X.repeat(8, 1)


class Model(nn.Module):
    """A loss, and beside it `head` of the hidden states."""

    def __init__(self, classes: int = CLASSES, dropout: float = 0.0, norm: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, classes)
        self.dropout, self.norm = nn.Dropout(dropout), norm or nn.Identity()

    def forward(self, x: Tensor) -> Any:
        hidden = self.norm(self.dropout(self.body(x).tanh()))
        return self.head(hidden)

    def head(self, hidden: Tensor) -> Any:
        logits = self.out(hidden)
        return F.cross_entropy(logits, torch.zeros(len(hidden), dtype=torch.int64)), logits


class Capped(Model):
    def head(self, hidden: Tensor) -> Any:
        logits = torch.tanh(self.out(hidden) / 30) * 30
        return F.cross_entropy(logits, torch.zeros(len(hidden), dtype=torch.int64)), logits


class Written(Model):
    def head(self, hidden: Tensor) -> Any:
        logits = self.out(hidden)
        logits /= 2
        return F.cross_entropy(logits, torch.zeros(len(hidden), dtype=torch.int64)), logits


class Dropped(Model):
    def head(self, hidden: Tensor) -> Any:
        logits = F.dropout(self.out(hidden), 0.5)
        return F.cross_entropy(logits, torch.zeros(len(hidden), dtype=torch.int64)), logits


class Hidden(Model):
    """Returns its hidden states, which no smaller value gives."""

    def head(self, hidden: Tensor) -> Any:
        return super().head(hidden)[0], hidden


def groups_of(region: RecordedRegion) -> list[tuple[tuple[int, ...], bool, bool]]:
    """For each group of deferred outputs: its positions, and whether it has a head and a second forward."""
    assert region.deferred is not None
    return [(group.positions, group.head is not None, group.forward is not None) for group in region.deferred.groups]


@pytest.mark.parametrize("kind", [Model, Capped])
def test_logits_are_withheld(kind: type[Model]) -> None:
    region = recorded(kind().train(), X)
    deferred = region.deferred
    assert deferred is not None
    assert groups_of(region) == [((1,), True, True)]
    assert (deferred.returned, deferred.released) == ((0,), {1})
    assert deferred.bytes == 4 * ROWS * CLASSES
    assert region.undifferentiated == {1}


@pytest.mark.parametrize("kind", [Model, Capped])
def test_both_ways_give_the_plain_values(kind: type[Model]) -> None:
    model = kind(dropout=0.5).train()
    region = recorded(model, X)
    assert region.deferred is not None
    (group,) = region.deferred.groups
    named = dict(model.named_parameters())
    torch.manual_seed(1)
    _, expected = model(X)
    torch.manual_seed(1)
    hidden = model.dropout(model.body(X).tanh())
    assert group.head is not None
    assert group.forward is not None
    weights = {id(value): value for value in named.values()}
    inputs = [weights.get(region.parameter_ids.get(number, 0), X) for number in range(len(region.inputs))]
    with torch.no_grad():
        found = group.head.run([*(inputs[number] for number in group.head.inputs), hidden])
        torch.manual_seed(1)
        again = group.forward.run([inputs[number] for number in group.forward.inputs])
    assert torch.equal(found[0], expected)
    assert torch.equal(again[0], expected)


@pytest.mark.parametrize("kind", [Written, Dropped])
def test_what_is_written_or_drawn_comes_from_a_second_forward_only(kind: type[Model]) -> None:
    assert groups_of(recorded(kind().train(), X)) == [((1,), False, True)]


def test_other_large_outputs_come_from_a_second_forward() -> None:
    assert groups_of(recorded(Hidden().train(), MANY)) == [((1,), False, True)]


def test_batch_statistics_are_not_computed_twice() -> None:
    region = recorded(Model(norm=nn.BatchNorm1d(WIDTH)).train(), X)
    assert region.deferred is not None
    assert groups_of(region) == [((1,), True, False)]
    assert not region.deferred.released, "the hidden states are held as long as the logits"
    assert recorded(Hidden(norm=nn.BatchNorm1d(WIDTH)).train(), MANY).deferred is None


@pytest.mark.parametrize(("classes", "options"), [(WIDTH, {}), (CLASSES, {"differentiate_all": True})])
def test_all_is_returned(classes: int, options: dict[str, Any]) -> None:
    """Small outputs, and those that are differentiated."""
    model = Model(classes)
    assert recorded(model.train(), X[:WIDTH] if classes == WIDTH else X, **options).deferred is None


def test_without_a_loss_all_is_returned() -> None:
    class NoLoss(Model):
        def head(self, hidden: Tensor) -> Any:
            return (self.out(hidden),)

    assert recorded(NoLoss().train(), X).deferred is None
