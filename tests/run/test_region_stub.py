"""Dynamo's callback records and does nothing else; the region runs through its owner."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from memopt.capture.dynamo import compile_call, training_call
from memopt.capture.region import RecordedRegion
from memopt.run.recorded_calls import recording


class Eager:
    """Runs each region as Dynamo recorded it."""

    def __init__(self) -> None:
        self.runs: list[RecordedRegion] = []

    def run_region(self, region: RecordedRegion, *inputs: Any) -> Any:
        self.runs.append(region)
        return region.graph_module(*inputs)


def test_each_call_goes_through_the_stub_of_the_region_that_was_recorded_once() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).train(), torch.randn(2, 4)
    owner = Eager()
    call = compile_call(training_call(model, None), recording(owner.run_region, differentiate_all=True), whole=True)
    outputs = [call(x), call(x)]
    assert all(torch.equal(output, model(x)) for output in outputs)
    first, second = owner.runs
    assert first is second
    assert set(first.parameter_ids.values()) == {id(parameter) for parameter in model.parameters()}
