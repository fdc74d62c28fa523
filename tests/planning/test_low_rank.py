"""A model on "meta" whose linear layers have adapters: the base is frozen, the original is not changed."""

from __future__ import annotations

import torch
from torch import nn

from memopt.planning.advice import _LowRank, with_low_rank


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 8))
        self.head = nn.Linear(8, 3)


def test_adapters_alone_are_trained_and_the_head_has_none() -> None:
    model = Model()
    twin, number = with_low_rank(model, rank=2)
    assert number == 2
    trained = {name: tuple(parameter.shape) for name, parameter in twin.named_parameters() if parameter.requires_grad}
    assert trained == {
        "block.0.down": (2, 8), "block.0.up": (6, 2), "block.2.down": (2, 6), "block.2.up": (8, 2),
    }  # fmt: skip
    assert {parameter.device.type for parameter in twin.parameters()} == {"meta"}
    assert all(parameter.requires_grad and parameter.device.type == "cpu" for parameter in model.parameters())
    assert not any(isinstance(module, _LowRank) for module in model.modules())


def test_an_adapter_adds_a_low_rank_product() -> None:
    layer = _LowRank(nn.Linear(4, 3), 4, 3, rank=2)
    layer.down, layer.up = nn.Parameter(torch.ones(2, 4)), nn.Parameter(torch.ones(3, 2))
    x = torch.ones(1, 4)
    assert torch.allclose(layer(x) - layer.base(x), torch.full((1, 3), 8.0))
