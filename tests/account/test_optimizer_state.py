from __future__ import annotations

import torch
from torch import nn, optim

from memopt.account.optimizer_trial import optimizer_restored, state_tensors


def stepped(optimizer: optim.Optimizer, parameter: nn.Parameter) -> torch.Tensor:
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return parameter.detach().clone()


def test_a_step_from_a_restored_state_repeats_itself() -> None:
    parameter = nn.Parameter(torch.randn(4))
    optimizer = optim.AdamW([parameter])
    stepped(optimizer, parameter)
    moment = optimizer.state[parameter]["exp_avg"]
    with optimizer_restored(optimizer):
        first = stepped(optimizer, parameter)
        optimizer.param_groups[0]["lr"] = 7.0
    assert optimizer.state[parameter]["exp_avg"] is moment
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert torch.equal(stepped(optimizer, parameter), first)


def test_state_that_was_not_there_goes_away() -> None:
    parameter = nn.Parameter(torch.randn(4))
    optimizer = optim.SGD([parameter], momentum=0.9)
    value = parameter.detach().clone()
    with optimizer_restored(optimizer):
        stepped(optimizer, parameter)
        assert [tensor.numel() for tensor in state_tensors(optimizer)] == [4]
    assert not optimizer.state
    assert torch.equal(parameter, value)
