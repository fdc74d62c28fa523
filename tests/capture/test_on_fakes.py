"""Capture on fake tensors: the model does not change, and no memory is allocated."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memopt.capture.on_fakes import capture_on_fakes
from memopt.errors import CaptureError
from memopt.meter import measure_peak

CPU = torch.device("cpu")


class Wide(nn.Module):
    def __init__(self, *, breaks: bool = False, looks: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(256, 256), nn.Linear(256, 256)
        self.breaks, self.looks, self.calls = breaks, looks, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        h = self.first(x)
        if self.breaks:
            torch._dynamo.graph_break()
        if self.looks and h.sum() > 0:
            h = h + 1
        return self.last(h).pow(2).mean()


def test_a_call_that_is_one_region() -> None:
    model, x = Wide().train(), torch.randn(4096, 256)
    with measure_peak() as before:
        pass
    with measure_peak() as peak:
        call = capture_on_fakes(model, ((x,), {}), None, CPU, differentiate_all=False)
    assert call.whole
    assert set(call.runs[0].parameter_ids.values()) == {id(parameter) for parameter in model.parameters()}
    assert peak.bytes < before.bytes + 4096 * 256, "an activation was allocated"
    assert model.calls == 0


def test_a_call_in_two_regions_runs_its_python_once_and_restores_the_model() -> None:
    model, x = Wide(breaks=True).train(), torch.randn(64, 256)
    weights = [parameter.clone() for parameter in model.parameters()]
    call = capture_on_fakes(model, ((x,), {}), None, CPU, differentiate_all=False)
    assert len(call.runs) == 2
    assert "captured in 2 regions" in call.notes[0]
    assert model.calls == 0
    assert all(torch.equal(*pair) for pair in zip(weights, model.parameters(), strict=True))


def test_a_forward_that_branches_on_values_cannot_be_captured_on_fakes() -> None:
    with pytest.raises(CaptureError, match="running the rest of the forward on fake tensors failed"):
        capture_on_fakes(Wide(looks=True).train(), ((torch.randn(8, 256),), {}), None, CPU, differentiate_all=False)
