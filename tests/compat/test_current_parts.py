"""The modules and parameters of a model at each call, found anew only where they have changed."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from memopt.compat.modules import CurrentParts, Parts


def model() -> nn.Sequential:
    inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    return nn.Sequential(inner, nn.Linear(2, 2), inner)


def replace_deep_child(changed: nn.Sequential) -> None:
    changed[0][1] = nn.Linear(2, 2)


def append_parameter(changed: nn.Sequential) -> None:
    changed[0].register_parameter("more", nn.Parameter(torch.ones(1)))


def replace_parameter(changed: nn.Sequential) -> None:
    changed[1].weight = nn.Parameter(torch.ones(2, 2))


def drop_child(changed: nn.Sequential) -> None:
    del changed[1]


def drop_bias(changed: nn.Sequential) -> None:
    changed[0][0].bias = None


def tie(changed: nn.Sequential) -> None:
    changed[1].weight = changed[0][0].weight


@pytest.mark.parametrize(
    "change", [replace_deep_child, append_parameter, replace_parameter, drop_child, drop_bias, tie]
)
def test_whatever_changes_is_seen(change: Callable[[nn.Sequential], None]) -> None:
    changed = model()
    parts = CurrentParts(changed)
    first = parts.now()
    assert parts.now() is first
    change(changed)
    found, anew = parts.now(), Parts.of(changed)
    assert found is not first
    assert list(map(id, found.modules)) == list(map(id, anew.modules))
    assert set(found.modules) == set(changed.modules())
    assert found.parameter_ids == anew.parameter_ids == frozenset(map(id, changed.parameters()))
    assert parts.now() is found


def test_a_bare_module_has_parts() -> None:
    class Bare(nn.Module):
        pass

    parts = CurrentParts(Bare())
    assert len(parts.now().modules) == 1
    assert not parts.now().parameters


def test_computed_parameters_are_not_kept() -> None:
    """Those that `functional_call` puts in place of a model's have a graph, which may hold the model."""
    called = model()
    parts = CurrentParts(called)
    adapted = {name: 2 * parameter for name, parameter in called.named_parameters()}
    with nn.utils.stateless._reparametrize_module(called, adapted):
        assert parts.now().parameter_ids == frozenset(map(id, adapted.values()))
    kept = weakref.ref(adapted["1.weight"])
    adapted.clear()
    assert kept() is None
    assert parts.now() is parts.now()
