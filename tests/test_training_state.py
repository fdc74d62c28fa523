from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn

from memopt.compat.tensors import same_bits
from memopt.meter import measure_peak
from memopt.saved_values import generator_states, parameters_restored, set_generators, written_parameters
from memopt.training_state import CallState, ForwardState, TrainingState, containers_restored, undone
from passes.ops.fp8_formats import histories_of

CPU = torch.device("cpu")


class Drawing(nn.Module):
    """A model whose forward changes buffers, replaces one, and draws from all three generators."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("latest", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.latest = x.detach()
        return self.norm(x).sum() + torch.rand(()) + random.random() + np.random.rand()


@pytest.fixture
def model() -> Drawing:
    return Drawing().train()


X = torch.arange(6.0).view(3, 2)


def test_a_forward_is_undone(model: Drawing) -> None:
    state = TrainingState.whole(model)
    mean = model.norm.running_mean
    first = model(X)
    assert mean is not None
    assert mean.any()
    state.undo()
    assert model.norm.running_mean is mean
    assert not mean.any()
    assert model.latest is None
    assert torch.equal(model(X), first)


class Observing(nn.Module):
    """A model whose forward gives a buffer its size, as the observers of quantisation-aware training do."""

    largest: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("largest", torch.tensor([]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.layer(x).detach().amax(0)
        if self.largest.shape != found.shape:
            self.largest.resize_(found.shape).copy_(found)
        self.largest.copy_(torch.maximum(self.largest, found))
        return self.layer(x) / self.largest


def test_a_buffer_that_the_forward_resizes_is_undone() -> None:
    model = Observing()
    for _ in range(2):  # a buffer that was copied can be resized again
        with undone(model):
            first = model(X)
        assert model.largest.shape == (0,)
    assert torch.equal(model(X), first)
    with undone(model):
        model(X + 1)
    assert torch.equal(model(X), first)


def test_one_element_of_any_stride_has_the_same_bits() -> None:
    one = torch.zeros(1).as_strided((1,), (0,))
    assert one.stride() == (0,)
    assert same_bits(one, torch.zeros(1))
    assert not same_bits(one, torch.tensor([-0.0]))


def test_restoring_clears_gradients_and_they_can_be_given_back(model: Drawing) -> None:
    model(X).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    state = TrainingState.whole(model)
    model(X).backward()
    state.restore()
    assert all(parameter.grad is None for parameter in model.parameters())
    state.restore_gradients()
    assert all(a.grad is b for a, b in zip(model.parameters(), gradients, strict=True))


def test_what_a_state_holds(model: Drawing) -> None:
    model(X).backward()
    state = TrainingState.whole(model)
    held = state.kept()
    assert len(held) == 2 + 4  # two gradients; three buffers of the norm, and the latest input
    assert any(tensor is model.norm.weight.grad for tensor in held)
    assert not any(tensor is model.latest for tensor in held)


def test_the_model_as_it_is_now(model: Drawing) -> None:
    state = TrainingState.whole(model)
    model(X).backward()
    assert set(state.gradients_now()) == {"norm.weight", "norm.bias"}
    now = state.buffers_now()
    assert torch.equal(now["latest"], X)
    model.norm.reset_running_stats()
    assert now["norm.num_batches_tracked"] == 1


def test_generators_are_set_back() -> None:
    states = generator_states(CPU)
    first = random.random(), np.random.rand(), torch.rand(()).item()
    set_generators(states, CPU)
    assert (random.random(), np.random.rand(), torch.rand(()).item()) == first


def test_states_of_generators_are_no_memory_of_the_step() -> None:
    with measure_peak("cpu") as peak:
        states = generator_states(CPU)
    assert peak.allocated_bytes == 0
    assert torch.equal(states[2].get_state(), torch.get_rng_state())


def test_histories_of_8_bit_layers_are_set_back() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    histories = histories_of(model)
    histories.scale("x", torch.ones(4), torch.float8_e4m3fn)
    state, before = TrainingState.whole(model), dict(histories.magnitudes)
    histories.scale("x", 3 * torch.ones(4), torch.float8_e4m3fn)
    histories.scale("y", torch.ones(4), torch.float8_e4m3fn)
    state.undo()
    assert histories.magnitudes.keys() == before.keys()
    assert torch.equal(histories.magnitudes["x"], before["x"])


class Remembering(nn.Module):
    """A model that draws from generators of its own, and remembers in a queue."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.draws = random.Random(0), np.random.default_rng(0), np.random.RandomState(0), torch.Generator()
        self.python, self.numpy, self.older, self.torch = self.draws
        self.latest = deque[float](maxlen=2)

    def forward(self) -> list[float]:
        drawn = [
            self.python.random(),
            float(self.numpy.random()),
            float(self.older.rand()),
            torch.rand((), generator=self.torch).item(),
        ]
        self.latest.extend(drawn)
        return drawn


def test_generators_and_queues_of_a_models_own_are_undone() -> None:
    model = Remembering()
    model()
    before = list(model.latest)
    with undone(model):
        first = model()
    assert list(model.latest) == before
    assert model() == first


def test_generators_outside_of_the_model_are_undone() -> None:
    outside, given = np.random.default_rng(1), torch.Generator().manual_seed(1)

    class Shaken(nn.Linear):
        def forward(self, x: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
            return super().forward(x) + outside.standard_normal() + torch.rand((), generator=generator)

    model = Shaken(2, 2)
    found = []
    for _ in range(2):
        with undone(model), containers_restored(((X,), {"generator": given})):
            found.append(model(X, generator=given))
    assert torch.equal(*found)


def test_values_that_are_no_numbers_count_as_written_to_only_if_they_are(model: Drawing) -> None:
    model.norm.weight.data[0] = model.norm.running_var[0] = float("nan")  # type: ignore[index]
    tensors = model.norm.weight, model.norm.running_var
    versions = [one._version for one in tensors]  # type: ignore[union-attr]
    call, whole = CallState.of(model, ()), TrainingState.whole(model)
    with parameters_restored(model):
        pass
    whole.undo()
    assert call.undo()
    assert [one._version for one in tensors] == versions  # type: ignore[union-attr]
    assert written_parameters(model) == []
    with torch.no_grad(), parameters_restored(model):
        model.norm.weight[1] = 5
    assert model.norm.weight[1] == 1
    assert written_parameters(model) == [model.norm.weight]


def test_buffers_made_in_inference_mode_are_left_out() -> None:
    """They have no version, and nothing can write to them outside of that mode."""
    model = nn.Linear(4, 4)
    with torch.inference_mode():
        model.register_buffer("mask", torch.ones(4))
    assert CallState.of(model, ()).undo()
    before = ForwardState.of(model, (), ())
    assert before.can_be_undone()
    before.undo()
