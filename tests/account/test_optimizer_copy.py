"""Optimisers of one's own are tried on copies with all that they hold, and stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import optim
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memopt.account.optimizer_account import optimizer_account
from memopt.account.optimizer_trial import attributes_of, held_tensors
from memopt.meter import measure_peak
from tests.account.optimizers_of_ones_own import GUESSED, TRIED, Lookahead, Slotted, closure_for, parameters
from tests.marks import slow


def held_bytes(optimizer: optim.Optimizer) -> int:
    inner = [value for _, value in attributes_of(optimizer) if isinstance(value, optim.Optimizer)]
    tensors = [tensor for one in (optimizer, *inner) for tensor in held_tensors(one)]
    own = {p.data_ptr() for group in optimizer.param_groups for p in group["params"]}
    return sum({t.data_ptr(): t.nbytes for t in tensors if t.data_ptr() not in own}.values())


def stepped(optimizer: optim.Optimizer) -> int:
    """The most bytes that a step makes."""
    own = [p for group in optimizer.param_groups for p in group["params"]]

    def closure() -> torch.Tensor:
        for p in own:
            p.grad = torch.randn_like(p) if p.grad is None else p.grad
        return torch.zeros(())

    closure()
    with measure_peak("cpu") as peak, torch.compiler.set_stance("force_eager"):
        optimizer.step(*closure_for(optimizer, closure))
    return peak.allocated_bytes


def marked(some: dict[str, Any]) -> list[Any]:
    """Optimisers as parameters of a test; those that are slow take seconds on copies, or half a minute."""
    return [slow(make) if name in ("until-small", "muon-adamw") else make for name, make in some.items()]


@pytest.mark.parametrize("make", marked(TRIED), ids=TRIED.keys())
def test_state_and_temporaries_are_those_of_real_steps(make: Callable[[Any], optim.Optimizer]) -> None:
    optimizer = make(parameters())
    new = optimizer_account(optimizer, [])
    before = held_bytes(optimizer)
    first, second = stepped(optimizer), stepped(optimizer)
    assert not new.guess
    assert new.state_bytes == pytest.approx(held_bytes(optimizer), abs=128)
    temporaries = max(first - (held_bytes(optimizer) - before), second)
    assert temporaries <= new.step_temporary_bytes <= 1.01 * temporaries + 256
    used = optimizer_account(optimizer, [])
    assert (used.state_bytes, used.step_temporary_bytes) == (new.state_bytes, new.step_temporary_bytes)


@pytest.mark.parametrize("make", marked(TRIED | GUESSED), ids=(TRIED | GUESSED).keys())
def test_the_instance_stays_as_it_is(make: Callable[[Any], optim.Optimizer]) -> None:
    optimizer = make(parameters())
    for _ in range(2):
        own = [p for group in optimizer.param_groups for p in group["params"]]
        attributes = {name: (value, repr(value)) for name, value in attributes_of(optimizer)}
        values = [(tensor, tensor.detach().clone()) for tensor in (*own, *held_tensors(optimizer))]
        optimizer_account(optimizer, [])
        now = dict(attributes_of(optimizer))
        assert now.keys() == attributes.keys()
        assert all(now[name] is value and repr(now[name]) == text for name, (value, text) in attributes.items())
        assert all(torch.equal(tensor, value) for tensor, value in values)
        stepped(optimizer)


@pytest.mark.parametrize("make", marked(GUESSED), ids=GUESSED.keys())
def test_where_no_step_can_be_tried_the_memory_is_guessed(make: Callable[[Any], optim.Optimizer]) -> None:
    optimizer = make(parameters())
    every = sum(p.nbytes for group in optimizer.param_groups for p in group["params"])
    new = optimizer_account(optimizer, [])
    assert type(optimizer).__name__ in new.guess
    assert (new.state_bytes, new.step_temporary_bytes) == (2 * every, every + 64)
    stepped(optimizer)
    assert optimizer_account(optimizer, []).state_bytes == every == held_bytes(optimizer)


def test_parameters_without_gradients_have_no_state_but_what_is_there() -> None:
    own = parameters()
    for make in (optim.AdamW, Slotted):
        optimizer = make(own)
        every, some = optimizer_account(optimizer, own), optimizer_account(optimizer, own, idle=own[:6])
        copies = every.state_bytes // sum(p.nbytes for p in own)
        assert some.state_bytes == pytest.approx(every.state_bytes - copies * 6 * own[0].nbytes, abs=6 * 4)
    optimizer = optim.AdamW(own)
    stepped(optimizer)
    assert optimizer_account(optimizer, own, idle=own[:6]).state_bytes == held_bytes(optimizer)


def test_no_hook_sees_the_trial() -> None:
    seen: list[object] = []
    optimizer = Lookahead(parameters())
    optimizer.inner.register_step_post_hook(lambda *args: seen.append(args))
    handle = register_optimizer_step_pre_hook(lambda *args: seen.append(args))
    try:
        optimizer_account(optimizer, [])
    finally:
        handle.remove()
    assert not seen
