"""The caller changes an input in place between the forward and its backward, which eager mode need not read again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memopt
from memopt.errors import GIB
from tests.elsewhere import counted

__all__ = ["counted"]

EXACT = {"precision": "fp32", "allow": {"recompute", "reinplace"}}


class Features(nn.Module):
    """Reads its input by an operator that needs no gradient: what it gives is saved, and cheaply computed once more
    where the wide layer leaves no room for it."""

    def __init__(self, outputs: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = nn.Linear(512, 8), nn.ReLU(), nn.Linear(8, 1024), nn.GELU(), nn.Linear(1024, outputs)
        self.layers = nn.Sequential(*layers)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images.sin())


def step(model: nn.Module, change: bool, rows: int = 1024) -> list[torch.Tensor]:
    """The gradients of a step."""
    model.zero_grad()
    torch.manual_seed(1)
    images = torch.rand(rows, 512)
    outputs = model(images)
    if change:
        images.div_(255)
    outputs.square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


SHARES = (0.9, 0.8, 0.7, 0.6)


def peak_bytes(plain: nn.Module) -> int:
    """The peak of the plain model's step."""
    with memopt.measure_peak("cpu") as peak:
        step(plain, change=False)
    return peak.bytes


def test_a_changed_input_is_not_taken_for_the_first_one() -> None:
    """An optimiser without state leaves no room for a copy in the first step; a later one saves what it needs."""
    expected = step(Features(), change=True)
    refused, most = [], peak_bytes(Features())
    for share in SHARES:
        planned = memopt.optimize(Features(), share * most / GIB, optimizer=None, **EXACT)
        try:
            gradients = step(planned, change=True)
        except memopt.BudgetError:
            continue
        except RuntimeError as error:
            refused.append(str(error))
            try:
                gradients = step(planned, change=True)
            except memopt.BudgetError:  # there is no such plan within the budget
                continue
        assert all(map(torch.equal, gradients, expected))
    assert refused, "no plan reads the input again"
    assert all("FloatTensor [1024, 512], has been modified by an inplace operation" in words for words in refused)


def test_a_plain_step_shows_that_an_input_is_changed() -> None:
    """Before the first step that is planned, which has no room for a copy of its own."""
    expected, states = step(Features(), change=True), []
    most = peak_bytes(Features())
    for share in SHARES:
        model = memopt.optimize(Features(), share * most / GIB, optimizer=None, **EXACT)
        step(model, change=True, rows=64)
        assert memopt.status(model).state is memopt.State.PLAIN
        try:
            gradients = step(model, change=True)
        except memopt.BudgetError:
            continue
        states.append(memopt.status(model).state)
        assert all(map(torch.equal, gradients, expected))
    assert memopt.State.PLANNED in states


@pytest.mark.slow
@pytest.mark.usefixtures("counted")
def test_a_loop_that_changes_its_inputs_trains_from_the_first_step_on() -> None:
    def train(budget_gb: float = 0) -> list[torch.Tensor]:
        model = Features(outputs=256)
        optimizer = torch.optim.Adam(model.parameters())
        if budget_gb:
            memopt.optimize(model, budget_gb, optimizer=optimizer, **EXACT)
        for _ in range(3):
            with memopt.measure_peak("cpu") as peak:
                step(model, change=True)
                optimizer.step()
            assert not budget_gb or peak.gb <= budget_gb
        return [parameter.detach() for parameter in model.parameters()]

    expected, trained = train(), 0
    state_bytes = 2 * sum(parameter.nbytes for parameter in Features(outputs=256).parameters())
    most = peak_bytes(Features(outputs=256)) + state_bytes
    for share in SHARES:
        try:
            found = train(share * most / GIB)
        except memopt.BudgetError:
            continue
        trained += 1
        assert all(map(torch.equal, found, expected))
    assert trained


@pytest.mark.parametrize("share", [0.9, 0.7])
def test_an_input_may_be_changed_after_the_backward(share: float) -> None:
    plain = Features()
    expected = step(plain, change=False)
    with memopt.measure_peak("cpu") as peak:
        step(plain, change=False)
    planned = memopt.optimize(Features(), share * peak.bytes / GIB, **EXACT)
    assert all(map(torch.equal, step(planned, change=False), expected))
