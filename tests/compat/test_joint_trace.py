"""A joint graph is traced once and may be cut and compiled several times, with the plain model's numbers each time."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition

from memopt.capture.dynamo import compile_call, training_call
from memopt.capture.region import RecordedRegion
from memopt.compat.joint_trace import AotTrace, trace_region
from memopt.compat.tracing import boxed
from memopt.run.recorded_calls import recording
from tests.capture.recorded import recorded


class Normed(nn.Module):
    """Dropout draws, and batch normalisation writes to its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.norm(self.layer(x)), 0.5).pow(2).mean()


def as_it_stands(module: fx.GraphModule, _: Sequence[Any]) -> Any:
    return boxed(module)


def by(partition: Any) -> Any:
    """One of torch's partitioners without the keywords that it does not take."""
    return lambda joint, inputs, *, num_fwd_outputs, **_: partition(joint, inputs, num_fwd_outputs=num_fwd_outputs)


def traced(region: RecordedRegion) -> AotTrace:
    with region.tracing():
        return trace_region(region.graph_module, region.inputs)


class ByPartition:
    """Runs each region by the halves that a partitioner of torch's makes, compiled once more at every run."""

    def __init__(self, partition: Any) -> None:
        self.partition = partition
        self.traces: dict[RecordedRegion, AotTrace] = {}

    def run_region(self, region: RecordedRegion, *inputs: Any) -> Any:
        if region not in self.traces:
            self.traces[region] = traced(region)
        with region.tracing():
            return self.traces[region].compile(by(self.partition), as_it_stands, as_it_stands)(*inputs)


@pytest.mark.parametrize("partition", [default_partition, min_cut_rematerialization_partition])
def test_each_compilation_gives_the_plain_numbers(partition: Any) -> None:
    torch.manual_seed(0)
    plain, x = Normed().train(), torch.randn(16, 8)
    model = copy.deepcopy(plain)
    owner = ByPartition(partition)
    call = compile_call(training_call(model, None), recording(owner.run_region, differentiate_all=True), whole=True)
    for seed in (1, 2):
        for run in (plain, call):
            torch.manual_seed(seed)
            run(x).backward()
        for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(found.grad, expected.grad)  # type: ignore[arg-type]
        for found, expected in zip(model.buffers(), plain.buffers(), strict=True):
            assert torch.equal(found, expected)
    assert len(owner.traces) == 1


def test_a_region_without_gradients_has_no_joint_graph() -> None:
    model, x = nn.Linear(4, 4).requires_grad_(False).train(), torch.randn(2, 4)
    owner = ByPartition(None)
    call = compile_call(training_call(model, None), recording(owner.run_region, differentiate_all=True), whole=True)
    assert torch.equal(call(x), model(x))
    assert next(iter(owner.traces.values())).module is None


def test_what_the_partition_raises_comes_through() -> None:
    class Stop(Exception):
        pass

    def stop(*_: Any, **__: Any) -> Any:
        raise Stop

    region = recorded(nn.Sequential(nn.Linear(4, 4)).train(), torch.randn(2, 4))
    trace = traced(region)
    with region.tracing(), pytest.raises(Stop):
        trace.compile(stop, as_it_stands, as_it_stands)


@pytest.mark.parametrize("logged", [False, True])
def test_graphs_become_text_only_for_a_log(logged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[fx.GraphModule] = []
    monkeypatch.setattr(fx.GraphModule, "print_readable", lambda module, *_, **__: printed.append(module) or "")
    monkeypatch.setattr("memopt.compat.joint_trace._graphs_are_logged", lambda: logged)
    region = recorded(nn.Sequential(nn.Linear(4, 4)).train(), torch.randn(2, 4))
    trace = traced(region)
    with region.tracing():
        trace.compile(by(default_partition), as_it_stands, as_it_stands)
    assert bool(printed) is logged
