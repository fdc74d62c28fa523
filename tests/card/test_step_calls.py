"""The allocator's calls of whole planned steps, one by one: those of the replay, and those that torch makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memopt
from memopt.account.allocator_replay import step_calls
from memopt.account.card_state import rounded_bytes
from tests.card.card import MB


class Images(nn.Module):
    """Layers on images of 64 channels and 56 by 56 pixels, with a loss."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 64, 4, stride=4)
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(64, 10)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        hidden = self.layers(self.first(pixel_values))
        return F.cross_entropy(self.head(hidden.mean((2, 3))).float(), labels)


class LastChannels(nn.Module):
    """A block of ConvNeXt: a depthwise convolution, and a wide MLP of each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(64, 64, 7, padding=3, groups=64)
        self.norm = nn.LayerNorm(64)
        self.wide, self.narrow = nn.Linear(64, 256), nn.Linear(256, 64)
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, images: Tensor) -> Tensor:
        pixels = self.norm(self.depthwise(images).permute(0, 2, 3, 1))
        return images + (self.scale * self.narrow(F.gelu(self.wide(pixels)))).permute(0, 3, 1, 2)


class Excited(nn.Module):
    """A block of EfficientNet: batch normalisation, and channels weighted by their means."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Conv2d(64, 256, 1), nn.Conv2d(256, 64, 1, bias=False)
        self.first, self.second = nn.BatchNorm2d(256), nn.BatchNorm2d(64)
        self.weigh = nn.Sequential(nn.Conv2d(256, 16, 1), nn.SiLU(), nn.Conv2d(16, 256, 1), nn.Sigmoid())

    def forward(self, images: Tensor) -> Tensor:
        wide = F.silu(self.first(self.wide(images)))
        return images + self.second(self.narrow(wide * self.weigh(wide.mean((2, 3), keepdim=True))))


class Attending(nn.Module):
    """Group normalisation, and attention among pixels, as in U-Nets of diffusion."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.GroupNorm(8, 64), nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, images: Tensor) -> Tensor:
        pixels = F.avg_pool2d(self.norm(images), 2).flatten(2).transpose(1, 2)
        query, key, value = (part.unflatten(2, (2, 32)).transpose(1, 2) for part in self.qkv(pixels).chunk(3, 2))
        found = self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        return images + F.interpolate(found.transpose(1, 2).unflatten(2, (28, 28)), scale_factor=2.0)


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "last channels": LastChannels,
    "excited": Excited,
    "attending": Attending,
    "plain": lambda: nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_torch_makes_the_calls_of_the_replay(name: str) -> None:
    """At the smallest budget."""
    with torch.device("cuda"):
        model = Images(*(BLOCKS[name]() for _ in range(3))).train()
        batch = {"pixel_values": torch.randn(32, 3, 224, 224), "labels": torch.zeros(32, dtype=torch.int64)}
    options: dict[str, Any] = {"precision": "bf16", "backend": "aten", "example_inputs": batch}
    with pytest.raises(memopt.BudgetError) as refusal:
        memopt.optimize(model, 0.001, **options)
    memopt.optimize(model, refusal.value.smallest_gb, **options)
    model(**batch).backward()  # libraries allocate their workspaces
    model.zero_grad()
    assert _planned(model) == _made(model, batch)


def _planned(model: nn.Module) -> list[int]:
    """The bytes of the large blocks that the plan's forward and backward allocate, and free (negative)."""
    plan = memopt.plan_of(model)
    assert plan.joined is not None
    assert plan.schedule is not None
    sizes: dict[int, int] = {}
    found = []
    for allocates, block, nbytes in step_calls(plan.joined.problem, plan.schedule):
        sizes[block] = rounded_bytes(nbytes) if allocates else sizes[block]
        found.append(sizes[block] if allocates else -sizes[block])
    return _in_order(found)


def _made(model: nn.Module, batch: Any) -> list[int]:
    """Those that torch's allocator is asked for in a step."""
    torch.cuda.memory._record_memory_history("all", context=None)
    model(**batch).backward()
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    signs = {"alloc": 1, "free_completed": -1}
    return _in_order([signs[one["action"]] * rounded_bytes(one["size"]) for one in trace if one["action"] in signs])


def _in_order(calls: list[int]) -> list[int]:
    """The large calls, in a fixed order among frees that follow each other: the gaps that they leave are the same."""
    found: list[int] = []
    freed: list[int] = []
    for nbytes in (nbytes for nbytes in calls if abs(nbytes) > MB):
        if nbytes > 0:
            found += [*sorted(freed), nbytes]
            freed = []
        else:
            freed.append(nbytes)
    return [*found, *sorted(freed)]
