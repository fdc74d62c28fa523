"""Autocast that a model's forward switches on around a graph break: each region is traced under it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from examples.models.families import normals
from memopt.capture.author_modes import AutocastState
from tests.end_to_end.pieces import check, step, tight


class Cast(nn.Module):
    """A perceptron with an unplanned line in its middle, whose forward runs in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Tanh())
        self.after = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))

    @torch.autocast("cpu", dtype=torch.bfloat16)
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.before(x)
        torch._dynamo.graph_break()
        loss: Tensor = self.after(hidden.square()).float().square().mean()
        return loss


def test_regions_are_traced_under_the_autocast_around_them() -> None:
    torch.manual_seed(0)
    model, batch = Cast().train(), (normals(512, 64),)
    check(model, lambda model: step(model, batch), tight(model, batch), batch)


def test_the_state_is_restored() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        inside = AutocastState.now()
    with inside.restored():
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
        assert not torch.is_autocast_cache_enabled()
        with AutocastState((), cached=True).restored():
            assert not torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_autocast_cache_enabled()
