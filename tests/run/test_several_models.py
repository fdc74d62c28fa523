"""Several optimised models in one step: each is planned beside what the others hold and will hold."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import count

import pytest
import torch
from torch import nn

import memopt
from memopt.errors import GIB
from memopt.meter import PeakMeter
from memopt.run.session import session_of
from tests.elsewhere import counted
from tests.marks import slow
from tests.run.several_models import (
    LOOPS,
    ROWS,
    Step,
    Trained,
    large_generator_and_critic,
    mlp,
    wgan_gp,
    wgan_gp_through_the_generator,
)

__all__ = ["counted"]

pytestmark = pytest.mark.usefixtures("counted")
MB = 2**20
EXACT = {"precision": "fp32", "allow": {"recompute", "reinplace"}}
STEPS = 4


def losses(models: list[Trained], step: Step, peaks: list[int]) -> Iterator[torch.Tensor]:
    """The loss of each step; its peak is added to `peaks`."""
    for number in range(STEPS):
        torch.manual_seed(number)
        with memopt.measure_peak() as peak:
            loss = step(models)
        peaks.append(peak.bytes)
        yield loss.clone()  # `mse_loss` leaves a number in as much memory as its operands have
        del loss


def made(make: Callable[[], list[Trained]], budget_bytes: int | None = None) -> list[Trained]:
    torch.manual_seed(0)
    models = make()
    for one in models if budget_bytes else ():
        memopt.optimize(one.model, budget_bytes / GIB, optimizer=one.optimizer, **EXACT)
    return models


def plain(name: str) -> tuple[list[torch.Tensor], int, int]:
    """The losses of the plain models, their peak, and what lasts between their steps."""
    make, step = LOOPS[name]
    models, peaks = made(make), []
    found = list(losses(models, step, peaks))
    gc.collect()
    lasting = sum(4 * parameter.nbytes for one in models for parameter in one.model.parameters())
    return found, max(peaks), lasting


def tried(name: str, budget_bytes: int, *, refusals: int) -> tuple[int, list[int], list[torch.Tensor]]:
    """The loop within a budget, or within one that a refusal names: the budget that worked, and peaks and losses."""
    make, step = LOOPS[name]
    for attempt in count():
        peaks: list[int] = []
        models = made(make, budget_bytes)
        try:
            return budget_bytes, peaks, list(losses(models, step, peaks))
        except memopt.BudgetError as refused:
            if attempt == refusals:
                raise
            budget_bytes = int(refused.smallest_gb * GIB) + 1
        del models
        gc.collect()
    raise AssertionError


def beside(name: str) -> int:
    """Bytes left on the device by other tests."""
    gc.collect()
    with memopt.measure_peak() as peak:
        pass
    return peak.bytes


@pytest.mark.slow
@pytest.mark.parametrize("part", [2, 3])
@pytest.mark.parametrize("name", LOOPS)
def test_within_a_part_of_the_activations(name: str, part: int) -> None:
    here = beside(name)
    expected, most, lasting = plain(name)
    budget = here + lasting + (most - here - lasting) // part
    _, peaks, found = tried(name, budget, refusals=0)
    assert max(peaks) <= budget, [peak / budget for peak in peaks]
    assert all(map(torch.equal, found, expected))


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_the_budget_that_the_first_refusal_names_works(name: str) -> None:
    expected, most, _ = plain(name)
    budget, peaks, found = tried(name, beside(name) + MB, refusals=1)
    assert max(peaks) <= budget, [peak / budget for peak in peaks]
    assert all(map(torch.equal, found, expected))
    if name == "wide_critics" and budget >= most:
        pytest.xfail("the budget that is named is one part in a hundred more than the plain loop takes")
    assert budget < most


@pytest.mark.slow
def test_a_gradient_penalty_beside_a_generator_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOOPS, "wgan_gp", (large_generator_and_critic, wgan_gp))
    test_within_a_part_of_the_activations("wgan_gp", 2)


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "widths"), [(1, (128, 128)), (2, (512, 256))])
def test_a_budget_that_is_named_for_a_gradient_penalty_works(
    layers: int, widths: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the generator runs plain or by a plan within it, and whether the critic does."""

    def make() -> list[Trained]:
        generator, critic = mlp(16, 32, layers=layers, width=widths[0]), mlp(32, 1, layers=1, width=widths[1])
        return [Trained.of(generator), Trained.of(critic)]

    monkeypatch.setitem(LOOPS, "wgan_gp", (make, wgan_gp_through_the_generator))
    expected, most, lasting = plain("wgan_gp")
    here = beside("wgan_gp")
    budget, peaks, found = tried("wgan_gp", here + lasting + (most - here - lasting) // 2, refusals=1)
    assert max(peaks) <= budget <= 1.3 * most
    assert all(map(torch.equal, found, expected))


# In `make test` one loop stands for all: the others take up to a minute each.
@pytest.mark.slow
@pytest.mark.parametrize("name", [name if name == "encoder_and_decoder" else slow(name) for name in LOOPS])
def test_steps_that_no_meter_watches(name: str) -> None:
    """The bytes on the CPU are read from `malloc` then."""
    make, step = LOOPS[name]
    expected, most, lasting = plain(name)
    here = beside(name)
    budget = here + lasting + (most - here - lasting) // 3
    models = made(make, budget)
    for number in range(STEPS):
        torch.manual_seed(number)
        with memopt.measure_peak() if number == STEPS - 1 else nullcontext() as peak:
            assert torch.equal(step(models), expected[number])
    assert isinstance(peak, PeakMeter)
    assert peak.bytes <= budget, peak.bytes / budget


@pytest.mark.plans_always
def test_parameters_and_inputs_of_a_forward_that_waits_lie_elsewhere() -> None:
    first, second = (mlp(32, 32).train() for _ in range(2))
    for model in (first, second):
        memopt.optimize(model, 1.0, optimizer=None, **EXACT)
    batch = torch.randn(ROWS, 32)
    made = first(batch)
    session = session_of(second)
    assert session is not None
    found = session.forward.share.look(((made.detach(),), {}))
    (waiting,) = session_of(first).forward.share.entry.waiting()  # type: ignore[union-attr]
    parameters = sum(parameter.nbytes for parameter in first.parameters())
    assert found.other == pytest.approx(2 * parameters + batch.nbytes + waiting.held_bytes, rel=0.05)


def report(names: list[str]) -> None:
    """Print how each loop does, for people."""
    for name in names or LOOPS:
        started = time.time()
        try:
            expected, most, lasting = plain(name)
            here = beside(name)
            print(f"{name}: plain {most / MB:.1f} MB, lasting {lasting / MB:.1f}, beside {here / MB:.1f}")
            for part in (0, 2, 3):
                budget = here + (lasting + (most - here - lasting) // part if part else MB)
                try:
                    budget, peaks, found = tried(name, budget, refusals=part == 0)
                    right = all(map(torch.equal, found, expected))
                    within = " ".join(f"{peak / budget:.1%}" for peak in peaks)
                    print(f"  1/{part or '-'}: {budget / MB:.1f} MB, peaks {within}, {right=}", flush=True)
                except Exception as error:
                    said = f"{type(error).__name__} {str(error)[:400]}"
                    print(f"  1/{part or '-'}: {budget / MB:.1f} MB: {said}", flush=True)
        finally:
            print(f"  {time.time() - started:.0f} s", flush=True)


if __name__ == "__main__":
    report(sys.argv[1:])


class WithTrunk(nn.Module):
    """An encoder of which only the last layer is trained, as its forward runs the others without gradients, though
    their parameters require some."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = mlp(32, 256, layers=2, width=1024), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            features = self.trunk(x)
        return self.head(features)


@pytest.mark.slow
def test_another_model_is_not_planned_beside_gradients_that_never_come() -> None:
    peaks: dict[float, list[int]] = {}

    def trained(budget_bytes: float) -> list[torch.Tensor]:
        torch.manual_seed(0)
        encoder, decoder = WithTrunk(), mlp(64, 8, layers=2)
        optimizer = torch.optim.Adam([*encoder.head.parameters(), *decoder.parameters()])
        for model in (encoder, decoder) if budget_bytes else ():
            memopt.optimize(model, budget_bytes / GIB, optimizer=optimizer, **EXACT)
        found = []
        peaks[budget_bytes] = []
        for _ in range(3):
            with memopt.measure_peak() as peak:
                loss = decoder(encoder(torch.randn(256, 32))).square().mean()
                for model in (encoder, decoder):
                    model.zero_grad()
                loss.backward()
                optimizer.step()
            peaks[budget_bytes].append(peak.bytes)
            found.append(loss.detach().clone())
        return found

    expected = trained(0)
    trunk = sum(parameter.nbytes for parameter in WithTrunk().trunk.parameters())
    budget = max(peaks[0]) + trunk / 2
    assert all(map(torch.equal, trained(budget), expected))
    assert max(peaks[budget]) <= budget
