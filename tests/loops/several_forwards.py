"""Training loops that call the model several times before one backward."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.loops.loop import Log, Optimize

_STEPS = 5


class Embedding(nn.Module):
    """A small network of convolutions, whose outputs are on the sphere."""

    def __init__(self) -> None:
        super().__init__()
        layers = [(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(4)]
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), *(layer for some in layers for layer in some))
        self.head = nn.Linear(8 * 16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.head(F.adaptive_avg_pool2d(self.body(x), 4).flatten(1)), dim=-1)


class Policy(nn.Module):
    """A small language model."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(100, width), nn.Linear(width, 100)
        layer = nn.TransformerEncoderLayer
        self.blocks = nn.ModuleList(layer(width, 4, 2 * width, dropout=0.0, batch_first=True) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def triplets(optimize: Optimize, log: Log) -> None:
    """A triplet loss, as FaceNet's: anchor, positive and negative are three calls of one model."""
    model = Embedding()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimize(model, optimizer=optimizer)
    criterion = nn.TripletMarginLoss(margin=0.5)
    for _ in range(_STEPS):
        anchor = torch.rand(24, 1, 24, 24)
        positive, negative = anchor + 0.1 * torch.randn_like(anchor), torch.rand(24, 1, 24, 24)
        loss = criterion(model(anchor), model(positive), model(negative))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss=loss)


def four_views(optimize: Optimize, log: Log) -> None:
    """Four views of each image, as in multi-crop self-supervision: two large ones, and two small ones."""
    model = Embedding()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimize(model, optimizer=optimizer)
    for _ in range(_STEPS):
        images = torch.rand(16, 1, 32, 32)
        crops = [images, images.flip(3), images[:, :, :24, :24], images[:, :, 8:, 8:]]
        views = [model(crop) for crop in crops]
        pairs = [(one, other) for place, one in enumerate(views) for other in views[:place]]
        loss = sum(F.cross_entropy(one @ other.T / 0.2, torch.arange(16)) for one, other in pairs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss=loss)


def preferences(optimize: Optimize, log: Log) -> None:
    """Two answers of different lengths by one policy, with its own earlier opinion, without gradients, in between."""
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    optimize(policy, optimizer=optimizer)

    def probability(tokens: Tensor) -> Tensor:
        logits = policy(tokens)[:, :-1]
        return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).sum((-2, -1))

    for _ in range(_STEPS):
        chosen, rejected = torch.randint(100, (4, 48)), torch.randint(100, (4, 64))
        wanted = probability(chosen)
        with torch.no_grad():
            before = probability(chosen) - probability(rejected)
        loss = -F.logsigmoid(0.1 * (wanted - probability(rejected) - before)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss=loss)
