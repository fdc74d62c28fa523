"""Stages of `torch.distributed.pipelining` train within a budget on two ranks as they do plain."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble

import memopt
from examples.models.ddp import fingerprint
from examples.models.pipeline import VOCABULARY, next_token_loss, pipeline_stages, stage_modules
from memopt.integrations.pipelining import optimize_schedule, remove_schedule
from tests.two_ranks import ended, on_two_ranks

pytestmark = pytest.mark.slow  # two ranks plan and train in each case
KINDS: dict[str, tuple[Any, int]] = {
    "gpipe": (ScheduleGPipe, 1),
    "1f1b": (Schedule1F1B, 1),
    "interleaved": (ScheduleInterleaved1F1B, 2),
    "zero bubble": (ScheduleInterleavedZeroBubble, 2),
}
EXACT: dict[str, Any] = {"allow": {"recompute", "reinplace"}}
SHARES = (0.85, 0.7)
Found = tuple[float, list[str]]


class Pipeline:
    """The stages of a rank with their schedule and optimiser."""

    def __init__(self, rank: int, kind: str, microbatches: int = 4) -> None:
        schedule, stages = KINDS[kind]
        self.rank = rank
        self.modules = stage_modules(rank, 2, stages, width=256, layers=4, length=64)
        found = pipeline_stages(self.modules, 2 * stages)
        self.schedule = schedule(found if stages > 1 else found[0], microbatches, loss_fn=next_token_loss)
        self.parameters = [value for module in self.modules.values() for value in module.parameters()]
        self.optimizer = torch.optim.AdamW(self.parameters)

    def step(self, number: int, texts: int = 32, *, return_outputs: bool = False) -> Found:
        """The peak in GB of a step, and the fingerprints of losses and gradients."""
        tokens = torch.randint(0, VOCABULARY, (texts, 64), generator=torch.Generator().manual_seed(number))
        losses: list[torch.Tensor] = []
        with memopt.measure_peak() as peak:
            if self.rank:
                self.schedule.step(target=tokens, losses=losses, return_outputs=return_outputs)
            else:
                self.schedule.step(tokens)
            gradients = [fingerprint(value.grad) for value in self.parameters if value.grad is not None]
            self.optimizer.step()
            self.optimizer.zero_grad()
        return peak.gb, [*map(fingerprint, losses), *gradients]


def plain_and_planned(rank: int, kind: str) -> tuple[list[Found], dict[float, list[Found]]]:
    """Two steps of the plain schedule, and as many within shares of its peak."""
    pipeline = Pipeline(rank, kind)
    plain = [pipeline.step(number) for number in range(2)]
    most = max(peak for peak, _ in plain)
    planned = {}
    for share in SHARES:
        del pipeline
        gc.collect()  # its stages refer to each other, and would be measured
        pipeline = Pipeline(rank, kind)
        optimize_schedule(pipeline.schedule, share * most, **EXACT)
        planned[share] = [pipeline.step(number) for number in range(2)]
    return plain, planned


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "interleaved"])
def test_steps_within_a_budget_are_those_of_the_plain_schedule(kind: str) -> None:
    for plain, planned in on_two_ranks(plain_and_planned, kind):
        most = max(peak for peak, _ in plain)
        for share, steps in planned.items():
            assert [values for _, values in steps] == [values for _, values in plain], share
            assert max(peak for peak, _ in steps) <= share * most


def refusals(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    pipeline = Pipeline(rank, "1f1b")
    optimize_schedule(pipeline.schedule, 1.0, **EXACT)
    found["roomy"] = pipeline.step(0)[1]
    optimize_schedule(pipeline.schedule, 0.03 if rank else 1.0, **EXACT)
    found["too small"] = ended(lambda: pipeline.step(1))
    found["outputs"] = ended(lambda: pipeline.step(1, return_outputs=True))
    optimize_schedule(pipeline.schedule, 1.0, **EXACT)
    found["after"] = pipeline.step(1)[1]
    remove_schedule(pipeline.schedule)
    found["removed"] = pipeline.step(2)[1]
    plain = Pipeline(rank, "1f1b")
    found["plain"] = [plain.step(number)[1] for number in range(3)]
    other = Pipeline(rank, "gpipe", microbatches=2 + 2 * rank)
    optimize_schedule(other.schedule, 1.0, **EXACT)
    found["terms"] = ended(lambda: other.step(0))
    zero_bubble = Pipeline(rank, "zero bubble").schedule
    found["zero bubble"] = ended(lambda: optimize_schedule(zero_bubble, 1.0))
    found["forwards"] = ended(lambda: optimize_schedule(plain.schedule, 1.0, forwards=2))
    return found


@pytest.fixture(scope="module")
def refused() -> list[dict[str, Any]]:
    return on_two_ranks(refusals)


@pytest.mark.filterwarnings("ignore")
def test_a_stage_that_cannot_fit_stops_all_ranks_with_one_message(refused: list[dict[str, Any]]) -> None:
    (kind, text), (other_kind, other_text) = (rank["too small"] for rank in refused)
    assert kind == other_kind == "BudgetError"
    assert text == other_text
    assert text.endswith("this is the error on rank 1, and all ranks stop")


@pytest.mark.filterwarnings("ignore")
def test_with_more_room_the_same_schedule_trains(refused: list[dict[str, Any]]) -> None:
    for rank in refused:
        assert [rank["roomy"], rank["after"], rank["removed"]] == rank["plain"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("outputs", "ValueError", "give step return_outputs=False"),
        ("terms", "ValueError", "ScheduleGPipe of 2 microbatches on rank 0, ScheduleGPipe of 4 microbatches on rank 1"),
        ("zero bubble", "ValueError", "use Schedule1F1B"),
        ("forwards", "ValueError", "forwards is decided by the schedule"),
    ],
)
def test_what_cannot_be_planned_is_said(refused: list[dict[str, Any]], case: str, kind: str, words: str) -> None:
    found = refused[1][case]
    assert found[0] == kind
    assert words in found[1]
