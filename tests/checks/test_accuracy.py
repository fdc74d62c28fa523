"""Errors of gradients against a reference: relative, largest, and infinite where one is missing."""

from __future__ import annotations

import math

import torch

from memopt.checks.reference import Accuracy


def test_errors_of_loss_and_gradients() -> None:
    exact = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.0, 12.0])}
    found = Accuracy.of(1.1, {"a": torch.tensor([3.0, 5.0]), "b": exact["b"]}, 1.0, exact)
    assert math.isclose(found.loss, 0.1)
    first, second = found.gradients
    assert (first.relative, first.largest) == (1 / 5, 1 / 4)
    assert math.isclose(first.share, 5 / 13)
    assert (second.relative, second.largest) == (0.0, 0.0)
    assert math.isclose(found.gradient, 1 / 13)
    assert found.worst is first


def test_a_missing_gradient_is_infinitely_wrong() -> None:
    found = Accuracy.of(1.0, {}, 1.0, {"a": torch.ones(2)})
    assert found.gradients[0].relative == found.gradient == math.inf


def test_a_zero_up_to_rounding_does_not_count() -> None:
    exact = {"zero": torch.tensor([1e-15]), "large": torch.tensor([1.0])}
    found = Accuracy.of(1.0, {"zero": torch.tensor([5e-15]), "large": torch.tensor([1.5])}, 1.0, exact)
    assert [error.name for error in found.worst_first] == ["large", "zero"]
    assert Accuracy.of(0.0, {}, 0.0, {}).worst is None
