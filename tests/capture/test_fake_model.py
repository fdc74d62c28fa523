from __future__ import annotations

import pytest
import torch
from torch import nn

from memopt.compat.fakes import FakeTensor, new_fake_mode, to_fake
from memopt.training_state import replaced_parameters


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.norm = nn.BatchNorm1d(4, affine=False)
        self.head = nn.Linear(4, 10)
        self.head.weight = self.embedding.weight
        self.head.bias.requires_grad_(False)
        self.calls = 0
        self.last: torch.Tensor | None = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.last = self.head(self.norm(self.embedding(tokens)))
        return self.last.sum()


def test_parameters_and_buffers_are_fakes_for_the_length_of_a_block() -> None:
    model, mode = Tied(), new_fake_mode()
    before = dict(model.state_dict(keep_vars=True))
    with replaced_parameters(model, lambda one: to_fake(mode, one, torch.device("cuda"))) as fakes:
        during = dict(model.state_dict(keep_vars=True))
        assert during.keys() == before.keys()
        for name, fake in during.items():
            assert fake is fakes[before[name]]
            assert isinstance(fake, FakeTensor)
            assert fake.device.type == "cuda"
            assert type(before[name]) is torch.Tensor or isinstance(fake, nn.Parameter)
            assert (fake.shape, fake.dtype) == (before[name].shape, before[name].dtype)
            assert fake.requires_grad == before[name].requires_grad
        assert model.head.weight is model.embedding.weight, "tied weights have one fake"
    assert all(tensor is before[name] for name, tensor in model.state_dict(keep_vars=True).items())


def test_parameters_on_meta_get_fakes_on_the_device() -> None:
    model, mode = nn.Linear(3, 3, device="meta"), new_fake_mode()
    with replaced_parameters(model, lambda one: to_fake(mode, one, torch.device("cpu"))):
        assert model.weight.device.type == "cpu"
    assert model.weight.device.type == "meta"


def test_attributes_that_the_forward_sets_are_restored() -> None:
    model, mode = Tied(), new_fake_mode()
    with replaced_parameters(model, lambda one: to_fake(mode, one, torch.device("cpu"))), mode:
        model(torch.zeros(3, dtype=torch.int64))
        model.extra = 1
        assert model.calls == 1
        assert isinstance(model.last, FakeTensor)
    assert (model.calls, model.last) == (0, None)
    assert not hasattr(model, "extra")
    assert model.norm.num_batches_tracked.item() == 0


def test_parameters_are_restored_after_an_error() -> None:
    model = Tied()
    weight = model.head.weight
    with pytest.raises(KeyError), replaced_parameters(model, torch.clone):
        raise KeyError
    assert model.head.weight is model.embedding.weight is weight
