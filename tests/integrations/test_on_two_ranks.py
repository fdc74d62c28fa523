"""The training loops of other libraries under DDP on two ranks, with memopt and without: the same losses and weights to
the bit, peaks within the budget, and a run that goes on where it was saved after one of its processes was killed."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
from torch.multiprocessing.spawn import ProcessExitedException

from tests.integrations.parts import KILLED_AT, SAVED_AT, Part, as_by_torchrun
from tests.integrations.training import Run, assert_same, assert_within
from tests.two_ranks import on_two_ranks

for needed in ("accelerate", "lightning", "trl"):
    pytest.importorskip(needed)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
LOOPS = {
    "loops_on_ranks.by_accelerate": 0.2,
    "loops_on_ranks.by_fabric": 0.2,
    "loops_on_ranks.by_lightning": 0.2,
    "trainers_on_ranks.gpt2_by_trainer": 0.18,
    "trainers_on_ranks.bert_by_trainer": 0.165,
    "trainers_on_ranks.llama_by_sft": 0.16,
}
"""By each loop the budget in GB, between the smallest one and the peak of its plain steps."""


def loop_named(name: str) -> Callable[[int, Part], Run]:
    """The loop, whose library is imported by the processes that need it only."""
    module, _, function = name.partition(".")
    found: Callable[[int, Part], Run] = getattr(import_module(f"tests.integrations.{module}"), function)
    return found


def runs_of(rank: int, name: str, parts: list[Part]) -> list[Run]:
    """The parts of a run, one after the other in one process."""
    as_by_torchrun(rank)
    loop, found = loop_named(name), []
    for part in parts:
        found.append(loop(rank, part))
        gc.collect()
    return found


@pytest.mark.parametrize("name", LOOPS)
def test_the_same_within_the_budget_saved_killed_and_resumed(name: str, tmp_path: Path) -> None:
    budget_gb = LOOPS[name]
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        on_two_ranks(runs_of, name, [Part(tmp_path, budget_gb, killed=True)])
    resumed_then_plain = [Part(tmp_path, budget_gb, resumed=True), Part(tmp_path / "plain", None)]
    for rank, (resumed, plain) in enumerate(on_two_ranks(runs_of, name, resumed_then_plain)):
        before = json.loads(Part(tmp_path, None).losses_of(rank).read_text())
        assert before == plain.losses[:KILLED_AT]
        assert_same(resumed, Run(plain.losses[SAVED_AT:], plain.weights))
        assert_within(resumed, budget_gb, plain)
