"""The models of the families that are not in Hugging Face's library; they return their loss from keyword inputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Bottleneck(nn.Module):
    """ResNet's 1x1, 3x3, 1x1 block with BatchNorm and in-place ReLU (He et al. 2016, figure 5 right)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        y += self.shortcut(x)
        return self.relu(y)


class ResNet(nn.Module):
    """ResNet-50's plan (3, 4, 6, 3 bottlenecks) at a quarter of its width."""

    def __init__(self, width: int = 16, classes: int = 100) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        blocks: list[nn.Module] = []
        inputs = width
        for stage, depth in enumerate((3, 4, 6, 3)):
            for i in range(depth):
                blocks.append(Bottleneck(inputs, width << stage, stride=2 if i == 0 and stage > 0 else 1))
                inputs = 4 * (width << stage)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(inputs, classes)
        self.checkpointed = False

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


def convolve_twice(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.GroupNorm(8, outputs),
        nn.SiLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.GroupNorm(8, outputs),
        nn.SiLU(),
    )


class UNet(nn.Module):
    """Three levels down by max pooling, up by transposed convolution and (the last) by interpolation, skips by cat."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.enter = convolve_twice(3, width)
        self.down = nn.ModuleList(convolve_twice(width << i, width << (i + 1)) for i in range(3))
        self.rise = nn.ModuleList(
            nn.ConvTranspose2d(width << (i + 1), width << i, 2, stride=2)
            if i
            else nn.Sequential(nn.Upsample(scale_factor=2, mode="nearest"), nn.Conv2d(2 * width, width, 1))
            for i in range(3)
        )
        self.up = nn.ModuleList(convolve_twice(width << (i + 1), width << i) for i in range(3))
        self.leave = nn.Conv2d(width, 3, 1)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        x = self.enter(images)
        skips = []
        for down in self.down:
            skips.append(x)
            x = down(F.max_pool2d(x, 2))
        for i in reversed(range(3)):
            x = self.up[i](torch.cat([skips[i], self.rise[i](x)], dim=1))
        return F.mse_loss(self.leave(x), targets)


class CellLoop(nn.Module):
    """Two stacked LSTM cells in a Python loop over time, language modelling."""

    def __init__(self, vocabulary: int = 512, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.cells = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(2))
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        steps = self.drop(self.embedding(tokens)).unbind(1)
        zero = steps[0].new_zeros(steps[0].shape)
        states = [(zero, zero) for _ in self.cells]
        outputs = []
        for x in steps[:-1]:
            for i, cell in enumerate(self.cells):
                states[i] = cell(x, states[i])
                x = states[i][0]
            outputs.append(x)
        logits = self.head(torch.stack(outputs, dim=1))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class TiedEncoder(nn.Module):
    """One TransformerEncoderLayer applied `depth` times, as in ALBERT, with the head tied to the embedding."""

    def __init__(self, vocabulary: int = 512, width: int = 128, depth: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, activation="gelu", batch_first=True)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.head.weight = self.embedding.weight
        self.depth = depth
        self.checkpointed = False

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for _ in range(self.depth):
            x = checkpoint(self.layer, x, use_reentrant=False) if self.checkpointed else self.layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class RoutedExperts(nn.Module):
    """Top-1 routing by `nonzero` and `index_add`: how many tokens an expert gets is known only when it runs."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        probability, choice = self.router(x).softmax(-1).max(-1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (choice == number).nonzero().squeeze(1)
            result = result.index_add(0, rows, expert(x[rows]) * probability[rows].unsqueeze(1))
        return result


class RoutedModel(nn.Module):
    """Blocks of a normalised mixture of experts between an embedding and a head."""

    def __init__(self, vocabulary: int = 512, width: int = 128, depth: int = 4, experts: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.mixtures = nn.ModuleList(RoutedExperts(width, experts) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary)
        self.checkpointed = False

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens.flatten())
        for norm, mixture in zip(self.norms, self.mixtures, strict=True):
            y = norm(x)
            x = x + (checkpoint(mixture, y, use_reentrant=False) if self.checkpointed else mixture(y))
        return F.cross_entropy(self.head(x), labels.flatten())
