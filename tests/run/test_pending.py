"""Values that a forward's outputs are computed from, held until an optimiser has stepped."""

from __future__ import annotations

import weakref

import torch

from memopt.run.pending import hold_over, release_all


class Value:
    def release(self) -> None:
        pass


def held() -> weakref.ref[Value]:
    value = Value()
    hold_over([value])
    return weakref.ref(value)


def test_a_value_is_held_until_an_optimizer_has_stepped() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    value = held()
    assert value() is not None
    torch.optim.SGD([parameter], lr=0.1).step()
    assert value() is None


def test_a_value_is_held_no_longer_than_to_the_next_forward() -> None:
    value = held()
    release_all()
    assert value() is None
