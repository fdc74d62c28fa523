"""A backward that is refused leaves nothing in memory: the budget that it names has the room at the next try."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

import memopt
from tests.elsewhere import counted  # noqa: F401


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(4) for layer in (nn.Tanh(), nn.Linear(128, 128))]
        self.body = nn.Sequential(nn.Linear(64, 128), *layers)
        self.heads = nn.ModuleList(nn.Linear(128, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        hidden = self.body(x)
        return [head(hidden) for head in self.heads]


def refused(budget_gb: float) -> weakref.ref[nn.Module]:
    model = TwoHeads()
    memopt.optimize(model, budget_gb, precision="fp32", allow={"recompute", "reinplace"}, elsewhere_gb=0)
    losses = torch.stack([one.square().mean() for one in model(torch.randn(800, 64))])
    assert memopt.status(model).state is memopt.State.PLAIN
    try:
        losses.sum().backward(retain_graph=True)
    except memopt.BudgetError:
        return weakref.ref(model)
    raise AssertionError("the kept graph fits")


def test_what_autograd_was_about_to_run_is_freed() -> None:
    model = refused(4.0e-3)
    gc.collect()
    assert model() is None


def steps_until_refused(budget_gb: float) -> int:
    """The number of steps before one is refused that differentiates its forward twice; 4 where none is."""
    torch.manual_seed(0)
    model = TwoHeads()
    optimizer = torch.optim.Adam(model.parameters())
    memopt.optimize(model, budget_gb, precision="fp32", allow={"recompute"}, optimizer=optimizer)
    for step in range(4):
        first, second = (one.square().mean() for one in model(torch.randn(800, 64)))
        try:
            first.backward(retain_graph=True)
        except memopt.BudgetError:
            return step
        second.backward()
        optimizer.step()
        optimizer.zero_grad()
        del first, second
    return 4


@pytest.mark.plans_always
@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("budget_gb", [3.9e-3, 4.0e-3, 4.1e-3])
def test_a_kept_graph_that_later_steps_have_no_room_for_is_refused_in_the_first_step(budget_gb: float) -> None:
    assert steps_until_refused(budget_gb) in (0, 4)


def layers_with(budget_gb: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(128, 128), nn.GELU())])
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    if budget_gb:
        memopt.optimize(model, budget_gb, precision="fp32", allow={"recompute", "reinplace"}, optimizer=optimizer)
    return model, optimizer


def peaks_of(backward: Callable[[torch.Tensor], None], budget_gb: float = 0) -> list[int]:
    """The peaks of six steps; `backward` takes the output of the model."""
    model, optimizer = layers_with(budget_gb)
    peaks = []
    for _ in range(6):
        batch = torch.randn(512, 128)
        with memopt.measure_peak() as peak:
            made = model(batch)
            optimizer.zero_grad()
            backward(made)
            del made
            optimizer.step()
        peaks.append(peak.bytes)
    return peaks


def steps_that_keep_outputs(budget_gb: float = 0) -> list[int]:
    """The peaks of steps whose loop keeps all outputs, for an average at the end of the epoch."""
    kept = []

    def backward(made: torch.Tensor) -> None:
        kept.append(made)
        made.square().mean().backward()

    return peaks_of(backward, budget_gb)


def differentiate_two_losses(made: torch.Tensor) -> None:
    """One after the other, beside the gradients of the step before."""
    first, second = made.square().mean(), made.abs().mean()
    first.backward(retain_graph=True)
    second.backward()


@pytest.mark.slow
@pytest.mark.plans_always
@pytest.mark.usefixtures("counted")
def test_outputs_that_a_loop_keeps_are_named_and_end_no_training() -> None:
    """The backward of a later step was refused for what the step before had returned."""
    plain = max(steps_that_keep_outputs())
    with pytest.warns(UserWarning, match=r"the largest: float32 \[512, 128\]"):
        peaks = steps_that_keep_outputs(budget_gb := 0.7 * plain / 2**30)
    assert len(peaks) == 6
    assert max(peaks) <= budget_gb * 2**30


@pytest.mark.slow
@pytest.mark.plans_always
@pytest.mark.usefixtures("counted")
def test_a_step_whose_backward_keeps_its_graph_is_planned_so_from_then_on() -> None:
    """It was refused in the second step, although plans that save less fit with the kept graph too."""
    plain = max(peaks_of(differentiate_two_losses))
    peaks = peaks_of(differentiate_two_losses, budget_gb := 0.65 * plain / 2**30)
    assert max(peaks) <= budget_gb * 2**30
