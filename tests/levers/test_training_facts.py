"""Facts of a training: what is trained, which gradients come together, and which wait for the last use."""

from __future__ import annotations

import torch
from torch import nn

from memopt.device import hardware
from memopt.levers.optimizer_levers import TrainingFacts
from memopt.optimizers.optimizer_step_price import Stepping


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head, self.norm = nn.Embedding(8, 4), nn.Linear(4, 8), nn.BatchNorm1d(4)
        self.head.weight = self.embedding.weight
        self.norm.requires_grad_(False)


def test_shared_frozen_and_wide_parameters() -> None:
    model = Tied()
    facts = TrainingFacts.of(model, "adamw", hardware("h100"))
    assert [id(parameter) for parameter in facts.shared] == [id(model.embedding.weight)]
    assert [id(parameter) for parameter in facts.wide] == [id(model.norm.weight), id(model.norm.bias)]
    assert len(facts.parameters) == 4
    assert [id(parameter) for parameter in facts.trained] == [id(model.embedding.weight), id(model.head.bias)]
    assert facts.together is not None
    assert [len(group) for group in facts.together] == [1, 2, 2]


def test_stepping_keeps_the_most_bytes_of_each_kind() -> None:
    small, large, other = torch.zeros(4), torch.zeros(4), torch.zeros(2, 2)
    stepping = Stepping.of([(small, torch.float32, 8), (large, torch.float32, 16), (other, torch.bfloat16, 4)])
    assert stepping.workspace_bytes(torch.zeros(4)) == 16
    assert stepping.workspace_bytes(other.bfloat16()) == 4
    assert stepping.workspace_bytes(other) is None
    assert stepping.workspace_bytes(3) is None
    assert stepping.leaving([1]).leaving([2]).left == {1, 2}
