"""Two ranks train alike or stop together: other terms, a refusal and a lost rank end all of them, and nothing hangs."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import memopt
from tests.two_ranks import check_refused_together, ended, on_two_ranks

pytestmark = pytest.mark.slow  # each case starts two processes
EXACT: dict[str, Any] = {"precision": "fp32", "allow": {"recompute", "reinplace"}}


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layers(x).square().mean()
        return loss


def wrapped(budget_gb: float = 1.0, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return memopt.optimize(DistributedDataParallel(Layers()), budget_gb, **{**EXACT, **options})


def stepped(model: nn.Module, rows: int = 64) -> tuple[str, str]:
    return ended(lambda: model(torch.ones(rows, 64)).backward())


def other_budget(rank: int) -> Any:
    return stepped(wrapped(1.0 + rank))


def other_levers(rank: int) -> Any:
    return stepped(wrapped(allow={"recompute"} if rank else EXACT["allow"]))


def other_version(rank: int) -> Any:
    if rank:
        torch.__version__ = "2.99.0"  # type: ignore[assignment]
    return stepped(wrapped())


def one_does_not_fit(rank: int) -> Any:
    """A step that fits on both, one whose batch is too large for rank 1, and a step after that."""
    model = wrapped(0.003)
    return [stepped(model), stepped(model, rows=65536 if rank else 64), stepped(model)]


def none_fits(rank: int) -> Any:
    return stepped(wrapped(0.003), rows=8192 * (1 + rank))


def one_cannot_be_planned_ahead(rank: int) -> Any:
    return ended(lambda: wrapped(0.003, example_inputs=(torch.ones(65536 if rank else 64, 64),)))


def own_error(rank: int) -> Any:
    model = wrapped()
    return ended(lambda: model(torch.ones(4, 63))) if rank else stepped(model)


def one_is_lost(rank: int, path: str) -> None:
    """Rank 1 is gone after two steps (DDP rebuilds its buckets before the second); rank 0 notes how its next one
    ends."""
    model = wrapped()
    stepped(model)
    stepped(model)
    if rank == 0:
        torch.save(stepped(model), path)
    os._exit(0)  # without the good-bye that the processes of other tests take


@pytest.mark.parametrize(
    ("case", "named"),
    [
        (other_budget, "the budget is 1 GB on rank 0, 2 GB on rank 1"),
        (other_levers, "allow is recompute, reinplace on rank 0, recompute on rank 1"),
        (other_version, "torch is 2.13.0+cpu on rank 0, 2.99.0 on rank 1"),
    ],
)
def test_other_terms_are_named_on_every_rank(case: Any, named: str) -> None:
    (kind, text), second = on_two_ranks(case)
    assert kind == "ValueError"
    assert named in text
    assert second == (kind, text)


def test_a_rank_that_cannot_fit_stops_all_and_a_later_step_is_taken() -> None:
    check_refused_together(on_two_ranks(one_does_not_fit))


def test_ranks_that_cannot_fit_name_the_budget_that_works_for_all() -> None:
    named = {re.search(r"([\d.]+) GB( leaves room|, dominated)", text)[1] for _, text in on_two_ranks(none_fits)}  # type: ignore[index]
    assert len(named) == 1


def test_a_refusal_ahead_of_training_is_that_of_all() -> None:
    (kind, text), second = on_two_ranks(one_cannot_be_planned_ahead)
    assert kind == "BudgetError"
    assert "on rank 1, and all ranks stop" in text
    assert second == (kind, text)


def test_any_other_error_of_a_rank_is_told() -> None:
    (kind, text), (own_kind, _) = on_two_ranks(own_error)
    assert kind == "RankError"
    assert text.startswith("rank 1 cannot train this step, and all ranks stop: ")
    assert own_kind != "RankError"


def test_a_lost_rank_ends_the_others(tmp_path: Path) -> None:
    path = tmp_path / "rank 0"
    with pytest.raises(FileNotFoundError):  # neither rank returns
        on_two_ranks(one_is_lost, str(path))
    kind, text = torch.load(path)
    assert kind == "RankError"
    assert text.startswith("a rank of this training has ended or does not answer: ")
    assert "Timed out" not in text  # the time within which ranks answer each other, half an hour
