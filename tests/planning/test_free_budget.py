"""`optimize` without a budget takes what the model's card has free, and asks for one where the model is on a CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from memopt.device import CUDA, hardware
from memopt.planning.options import check_options, free_budget

GB = 1024**3


class OnCard(nn.Module):
    """A model that says that it is on a card."""

    def parameters(self, recurse: bool = True) -> Any:
        return iter([type("Parameter", (), {"device": torch.device("cuda", 0)})()])


@pytest.mark.parametrize(
    ("free", "own", "gb"), [(20.0, 0.0, 20.0), (10.0, 9.9, 19.875), (0.1, 0.0, 0.0625), (23.3, 0.0, 23.3125)]
)
def test_what_a_card_has_free(free: float, own: float, gb: float, monkeypatch: pytest.MonkeyPatch) -> None:
    card = hardware("rtx-4090")
    card = replace(card, memory_bytes=24 * GB, context_bytes=GB // 2)
    monkeypatch.setattr(type(CUDA), "hardware", lambda self, device: card)
    monkeypatch.setattr(type(CUDA), "free_bytes", lambda self, device: int(free * GB))
    monkeypatch.setattr(type(CUDA), "allocated_bytes", lambda self, device: int(own * GB))
    found, note = free_budget(OnCard())
    assert found == gb, "half a GB of context is this process's own, 0.48 GB are the margin"
    assert note == (
        f"no budget was given: {gb:.6g} GB is what this process can hold on cuda:0 now, less a margin of 0.48 GB"
    )


def test_the_notes_say_where_the_budget_comes_from() -> None:
    options = replace(check_options(1.0), budget_note="no budget was given: 1 GB")
    assert options.notes("cpu")[-1] == "no budget was given: 1 GB"
    assert check_options(1.0).notes("cpu") == ()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_elsewhere_a_budget_is_asked_for(device: str) -> None:
    model = nn.Linear(2, 2, device=device)
    words = r"for a model on '\w+' budget_gb must be a number of gigabytes, as in memopt.optimize\(model, 8\), not None"
    with pytest.raises(TypeError, match=words):
        memopt.optimize(model)
    with pytest.raises(TypeError, match="budget_gb must be a number of gigabytes"):
        memopt.plan(model, None, torch.ones(2, 2))  # type: ignore[arg-type]
