"""Live tensors are found without a walk through all objects, and none is missed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from memopt.live_objects import _OldObjects, live_objects
from tests.marks import slow


def walked() -> set[int]:
    """The `id`s of all live tensors and optimizers, by a walk through all objects."""
    kinds = torch.Tensor, torch.optim.Optimizer
    return {id(one) for one in gc.get_objects() if issubclass(type(one), kinds)}


def found() -> set[int]:
    return {id(one) for one in live_objects(torch.Tensor, torch.optim.Optimizer)}


@pytest.fixture(autouse=True)
def searched_before() -> Iterator[None]:
    gc.unfreeze()  # a walk does not list what tests/conftest.py has frozen
    gc.collect()
    gc.disable()  # what is garbage would go away between a search and the walk beside it
    live_objects(torch.Tensor)
    yield
    gc.enable()
    gc.freeze()


@pytest.mark.parametrize("generations", [(), *map(slow, [(0,), (1,), (2,), (0, 1), (0, 0, 1, 2)]), (1, 0, 1)])
def test_none_is_missed_after_collections(generations: tuple[int, ...]) -> None:
    before, kept, model = found(), [], nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters())
    for generation in generations:
        kept += [torch.zeros(2), model(torch.ones(3)).sum(), nn.Parameter(torch.zeros(1))]
        gc.collect(generation)
    assert found() == walked()
    assert {id(optimizer), *map(id, kept)} <= found() - before
    del kept[:1]
    assert found() == walked()


def test_what_only_autograd_holds_is_found_as_by_a_walk() -> None:
    x = torch.randn(4, requires_grad=True)
    y = x.exp()
    z = y.sum()
    gc.collect()
    del y
    assert found() == walked()
    z.backward()
    assert found() == walked()


def test_frozen_objects_are_found_as_by_a_walk() -> None:
    kept: list[Any] = [torch.zeros(2)]
    gc.freeze()
    kept.append(torch.zeros(2))
    assert found() == walked()
    gc.unfreeze()
    assert found() == walked()
    assert len(kept) == 2


def test_a_search_keeps_nothing_alive() -> None:
    tensor = torch.zeros(3)
    gc.collect()
    assert id(tensor) in found()
    alive = weakref.ref(tensor)
    del tensor
    assert alive() is None
    assert found() == walked()


def test_only_the_first_search_goes_through_all_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    real = gc.get_objects

    def get_objects(generation: int | None = None) -> list[Any]:
        asked.append(generation)
        return real(generation)

    monkeypatch.setattr(gc, "get_objects", get_objects)
    live_objects(torch.Tensor)
    assert asked == [0, 1]


def test_the_first_search_finds_what_was_old_before() -> None:
    """As in a process that trains before anything of memopt is used: models, states and other tensors were missed."""
    old = torch.randn(3)
    gc.collect()
    objects = _OldObjects()
    try:
        assert id(old) in {id(one) for one in objects.with_young()}
    finally:
        gc.callbacks.remove(objects._before_collection)
