"""Models that do what makes capture and recomputation hard, one habit each, all small enough to run in milliseconds.

Every one trains in eager mode. `ODD_MODELS` pairs each with its inputs, positional or keyword, and with what the tests
may expect of its capture.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from examples.models.families import integers, normals

WIDTH, ROWS, CLASSES = 64, 256, 16


class Layered(nn.Module):
    """The common ground: a stack of blocks, then cross entropy. The odd ones change one thing."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(depth)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), labels)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return self.loss(self.body(x), labels)


class OwnCheckpoint(Layered):
    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


class ScaledGradient(torch.autograd.Function):
    """Squares, with a backward that is half the true one: a capture that differentiates the forward gets it wrong."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * x


class OwnFunction(Layered):
    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + ScaledGradient.apply(block(x))  # type: ignore[no-untyped-call]
        return x


class GraphBreak(Layered):
    """Breaks between its halves: two regions, the second made of what Dynamo resumes."""

    def part(self, x: Tensor, start: int, end: int) -> Tensor:
        for block in self.blocks[start:end]:
            x = x + block(x)
        return x

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        middle = len(self.blocks) // 2
        x = self.part(x, 0, middle)
        torch._dynamo.graph_break()
        return self.loss(self.part(x, middle, len(self.blocks)), labels)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


class BreakInLoop(Layered):
    """Breaks inside the loop: Dynamo gives up the frame and captures each block alone, as one graph called often."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in self.blocks)

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
            torch._dynamo.graph_break()
        return x


class LowRank(Layered):
    """LoRA: the blocks are frozen, small factors beside the second linear layer learn (Hu et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.requires_grad_(False)
        self.left = nn.ParameterList(nn.Parameter(0.02 * torch.randn(WIDTH, 4)) for _ in self.blocks)
        self.right = nn.ParameterList(nn.Parameter(0.02 * torch.randn(4, WIDTH)) for _ in self.blocks)

    def body(self, x: Tensor) -> Tensor:
        for block, left, right in zip(self.blocks, self.left, self.right, strict=True):
            x = x + block(x) + x @ left @ right
        return x


class Uncapturable(Layered):
    """Its author forbids compiling the forward and all that it calls."""

    forward = torch.compiler.disable(Layered.forward)  # type: ignore[no-untyped-call]


class NumpyInLoop(Layered):
    """Values leave for numpy in every block and steer what Python does with the next one."""

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y = block(x)
            spread = float(np.std(y.detach().numpy()))
            x = x + (y if spread < 1.0 else y / spread)
        return x


class Logits(Layered):
    """The loss is made outside."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.head(self.body(x))


class LossAndLogits(Layered):
    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.body(x))
        return F.cross_entropy(logits, labels), logits


class RunningStatistics(Layered):
    """Buffers written in the forward: a counter, and a running mean that the same forward reads before and after."""

    steps: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def body(self, x: Tensor) -> Tensor:
        self.steps += 1
        for block in self.blocks:
            before = torch.tanh(x - self.mean)
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            x = x + block(before * torch.sigmoid(x - self.mean)) / self.steps
        return x


class RandomOps(Layered):
    """Noise, stochastic depth by bernoulli, and rows sampled by multinomial, beside dropout."""

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            noisy = block(x + 0.1 * torch.rand_like(x))
            kept = torch.bernoulli(torch.full((len(x), 1), 0.8))
            rows = torch.multinomial(torch.ones(len(x)), len(x), replacement=True)
            x = x + F.dropout(noisy, 0.1) * kept + 0.1 * torch.sin(x[rows]) + 0.01 * torch.randn(WIDTH)
        return x


class InPlace(Layered):
    """Activations written over, through the tensor and through a view of it."""

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y = block(x)
            y.mul_(0.5)
            y[:, : WIDTH // 2] += x[:, WIDTH // 2 :]
            y.t()[0].zero_()
            x = x + y.relu_()
        return x


class OtherOutputs(Layered):
    """Returns the loss with a complex, an integer and a plain Python value."""

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
        x = self.body(x)
        spectrum = torch.fft.rfft(x)
        logits = self.head(x)
        return F.cross_entropy(logits, labels) + spectrum.abs().mean(), spectrum, logits.argmax(-1), len(self.blocks)


class CalledTwice(Layered):
    """The same blocks serve both halves of a pair."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        first, second = self.body(x), self.body(x.flip(0))
        return self.loss(first, labels) + self.loss(second, labels.flip(0)) + F.mse_loss(first, second)


Capture = Literal["whole", "parts", "none"]


@dataclass(frozen=True)
class OddModel:
    """A model class, its inputs, and how torch.compile takes it: one graph, several (not all of the model), or none."""

    model: type[nn.Module]
    inputs: Callable[[], tuple[Any, ...] | dict[str, Any]]
    capture: Capture = "whole"
    returns_loss: bool = True

    def make(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.model().train()

    def __str__(self) -> str:
        return self.model.__name__


def keywords() -> dict[str, Any]:
    return {"x": normals(ROWS, WIDTH), "labels": integers(CLASSES, ROWS)}


def positions() -> tuple[Any, ...]:
    return normals(ROWS, WIDTH), integers(CLASSES, ROWS)


ODD_MODELS = (
    OddModel(Layered, positions),
    OddModel(OwnCheckpoint, keywords),
    OddModel(OwnFunction, keywords),
    OddModel(GraphBreak, keywords, "parts"),
    OddModel(BreakInLoop, keywords, "parts"),
    OddModel(LowRank, keywords),
    OddModel(Uncapturable, keywords, "none"),
    OddModel(NumpyInLoop, keywords, "parts"),
    OddModel(Logits, lambda: {"x": normals(ROWS, WIDTH)}, returns_loss=False),
    OddModel(LossAndLogits, keywords),
    OddModel(RunningStatistics, keywords),
    OddModel(RandomOps, keywords),
    OddModel(InPlace, keywords),
    OddModel(OtherOutputs, keywords),
    OddModel(CalledTwice, keywords),
)
BY_NAME = {str(odd): odd for odd in ODD_MODELS}
