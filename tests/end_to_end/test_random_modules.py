"""Random modules, budgets, optimisers and schedules: a few seeds of `python -m benchmarks.fuzz`, and those it found."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import memopt
from examples.models import random_trials
from examples.models.random_reference import Reference
from examples.models.random_trials import trials
from examples.models.twins import FUSED_FLOOR, ROUNDING, Run, Twin, difference, loss_of
from memopt.capture.dynamo_graph import BITS_DEPART
from tests.marks import slow

SEEDS = (1, 6)
FOUND = (300, 222, 78, 555, 3967)
"""Seeds that were not right once."""


@pytest.mark.plans_always
@pytest.mark.parametrize("seed", [SEEDS[0], slow(SEEDS[1]), *map(slow, FOUND)])
def test_a_random_module_trains_as_the_plain_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_CACHE", "0")
    verdicts = [(found.verdict, found) for found in trials(seed)]
    assert all(verdict == "right" for verdict, _ in verdicts), verdicts


@pytest.mark.slow
@pytest.mark.plans_always
@pytest.mark.parametrize("seed", [72, 77, 93])
def test_a_random_module_trains_in_16_bits(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_CACHE", "0")
    verdicts = [(found.verdict, found) for found in trials(seed, low=True)]
    assert all(verdict == "right" for verdict, _ in verdicts), verdicts


def test_a_buffer_that_is_zero_but_for_rounding_has_the_scale_of_its_kind() -> None:
    """The running mean of normalised values was said to be wrong by a ten-thousandth: of 1e-13."""

    def run(noise: float) -> Run:
        means = {"accumulated: buffer a.running_mean": noise, "accumulated: buffer b.running_mean": 0.5}
        return Run([1.0], {name: torch.tensor([value]) for name, value in means.items()}, [])

    assert difference(run(1e-13), run(2e-13), FUSED_FLOOR)[0] < ROUNDING
    assert difference(run(1e-2), run(2e-2), FUSED_FLOOR)[0] > ROUNDING


def test_a_case_after_one_that_failed_starts_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that are held need more than the smallest budget: each case after a failed one was refused."""
    held = []

    def failing(twin: Twin) -> Iterator[Run]:
        held.append(any(parameter.grad is not None for parameter in twin.model.parameters()))
        loss_of(twin.model(**twin.batch)).backward()
        raise ArithmeticError("after the backward")

    monkeypatch.setattr(random_trials, "steps_of", failing)
    assert [found.verdict for found in trials(1, cases=3)] == ["error not ours"] * 3
    assert held == [False] * 3


def test_a_budget_that_is_refused_though_it_is_not_too_small_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """All budgets of the trials are at least the smallest that works, so that no case may be refused for its budget."""

    def refused(twin: Twin) -> Iterator[Run]:
        raise memopt.BudgetError(1, 2, "activations")

    monkeypatch.setattr(random_trials, "steps_of", refused)
    assert [found.verdict for found in trials(1, cases=1)] == ["budget refused"]


@pytest.mark.parametrize(
    ("apart", "number", "verdict"), [(2e-6, 0, "right"), (2e-5, 0, "wrong"), (2e-5, 1, "right"), (2e-2, 1, "wrong")]
)
def test_rounding_of_compiled_code_may_grow_by_the_steps_of_the_optimiser(
    apart: float, number: int, verdict: str
) -> None:
    def run(name: str, value: float) -> Run:
        return Run([1.0], {f"{name}: gradient of weight": torch.tensor([value])}, [(0.0, 0.0, 0.0)])

    plain = Reference((run("step 1", 1.0), run("accumulated", 1.0)), None)
    ours = run(("step 1", "accumulated")[number], 1.0 + apart)
    assert plain.judge(ours, number, (), fused=True)[0] == verdict


@pytest.mark.parametrize(("apart", "verdict"), [(3e-5, "rounding, named"), (3e-4, "wrong")])
def test_rounding_that_is_named_is_judged_by_what_the_last_bits_of_the_weights_change(
    apart: float, verdict: str
) -> None:
    """The gradient of a router's bias is a sum of terms that cancel: it was 2.9e-5 off behind a GRU."""

    def run(value: float) -> tuple[Run]:
        return (Run([1.0], {"step 1: gradient of weight": torch.tensor([value])}, [(0.0, 0.0, 0.0)]),)

    plain = Reference(run(1.0), None, lambda: run(1.0 + 1e-5))
    assert plain.judge(run(1.0 + apart)[0], 0, (f"gru {BITS_DEPART}",))[0] == verdict
    assert plain.judge(run(1.0 + apart)[0], 0, ())[0] == "wrong"
    compiled, _ = plain.judge(run(1.0 + apart)[0], 0, (), fused=True)
    assert compiled == ("wrong" if verdict == "wrong" else "right")


@pytest.mark.plans_always
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 130))
def test_further_random_modules(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_CACHE", "0")
    verdicts = [(found.verdict, found) for found in trials(seed)]
    assert all(verdict in ("right", "rounding, named") for verdict, _ in verdicts), verdicts
