"""Training loops whose loss compares the samples of a batch with each other."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.loops.loop import Log, Optimize


class ResidualAttentionBlock(nn.Module):
    """A block of open_clip's transformers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), nn.MultiheadAttention(width, heads, batch_first=True)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, need_weights=False, attn_mask=mask)[0]
        return x + self.mlp(self.ln_2(x))


def clip(optimize: Optimize, log: Log) -> None:
    """CLIP, as open_clip trains it: the model returns features and a temperature in a dict, the loss is outside; the
    temperature is clamped after each step, the rate is a cosine."""

    class CLIP(nn.Module):
        def __init__(self, width: int = 64, layers: int = 2) -> None:
            super().__init__()
            self.patch = nn.Conv2d(3, width, 4, 4, bias=False)
            self.positions = nn.Parameter(0.02 * torch.randn(64, width))
            self.image = nn.ModuleList(ResidualAttentionBlock(width, 4) for _ in range(layers))
            self.words, self.places = nn.Embedding(500, width), nn.Parameter(0.02 * torch.randn(16, width))
            self.text = nn.ModuleList(ResidualAttentionBlock(width, 4) for _ in range(layers))
            self.image_projection = nn.Parameter(width**-0.5 * torch.randn(width, 32))
            self.text_projection = nn.Parameter(width**-0.5 * torch.randn(width, 32))
            self.logit_scale = nn.Parameter(torch.ones([]) * math.log(1 / 0.07))
            self.register_buffer("attn_mask", torch.full((16, 16), float("-inf")).triu_(1), persistent=False)

        def encode_image(self, image: Tensor) -> Tensor:
            x = self.patch(image).flatten(2).transpose(1, 2) + self.positions
            for block in self.image:
                x = block(x)
            return F.normalize(x.mean(1) @ self.image_projection, dim=-1)

        def encode_text(self, text: Tensor) -> Tensor:
            x = self.words(text) + self.places
            for block in self.text:
                x = block(x, self.attn_mask)
            return F.normalize(x[torch.arange(x.shape[0]), text.argmax(dim=-1)] @ self.text_projection, dim=-1)

        def forward(self, image: Tensor, text: Tensor) -> dict[str, Tensor]:
            return {
                "image_features": self.encode_image(image),
                "text_features": self.encode_text(text),
                "logit_scale": self.logit_scale.exp(),
            }

    def clip_loss(image_features: Tensor, text_features: Tensor, logit_scale: Tensor) -> Tensor:
        logits = logit_scale * image_features @ text_features.T
        labels = torch.arange(len(logits))
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2

    model = CLIP()
    exclude = [p for n, p in model.named_parameters() if p.ndim < 2 or "bias" in n or "logit_scale" in n]
    include = [p for p in model.parameters() if not any(p is q for q in exclude)]
    optimizer = torch.optim.AdamW(
        [{"params": exclude, "weight_decay": 0.0}, {"params": include, "weight_decay": 0.2}], lr=5e-4, betas=(0.9, 0.98)
    )
    optimize(model, optimizer=optimizer)
    data = TensorDataset(torch.randn(160, 3, 32, 32), torch.randint(0, 500, (160, 16)))
    loader = DataLoader(data, batch_size=32, shuffle=True, drop_last=True)
    for epoch in range(2):
        model.train()
        for i, (images, texts) in enumerate(loader):
            for group in optimizer.param_groups:
                group["lr"] = 0.5 * (1 + math.cos(math.pi * (epoch * len(loader) + i) / 10)) * 5e-4
            optimizer.zero_grad()
            losses = clip_loss(**model(images, texts))
            losses.backward()
            optimizer.step()
            with torch.no_grad():
                model.logit_scale.clamp_(0, math.log(100))
            log(loss=losses, scale=model.logit_scale)


def simclr(optimize: Optimize, log: Log) -> None:
    """SimCLR: both views in one batch through a small ResNet; the loss masks out each sample's own similarity; the last
    batch is smaller, and a linear probe is scored between epochs."""

    class BasicBlock(nn.Module):
        def __init__(self, first: int, last: int, stride: int) -> None:
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(first, last, 3, stride, 1, bias=False), nn.BatchNorm2d(last)
            self.conv2, self.bn2 = nn.Conv2d(last, last, 3, 1, 1, bias=False), nn.BatchNorm2d(last)
            self.downsample = nn.Sequential(nn.Conv2d(first, last, 1, stride, bias=False), nn.BatchNorm2d(last))

        def forward(self, x: Tensor) -> Tensor:
            out = F.relu(self.bn1(self.conv1(x)), inplace=True)
            out = self.bn2(self.conv2(out))
            out += self.downsample(x)
            return F.relu(out, inplace=True)

    class ResNetSimCLR(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Sequential(
                nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True),
                BasicBlock(16, 16, 1), BasicBlock(16, 32, 2), BasicBlock(32, 64, 2),
                nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            )  # fmt: skip
            self.projector = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))

        def forward(self, x: Tensor) -> Tensor:
            return self.projector(self.backbone(x))

    def info_nce_loss(features: Tensor, n_views: int = 2) -> tuple[Tensor, Tensor]:
        labels = torch.cat([torch.arange(len(features) // n_views) for _ in range(n_views)], dim=0)
        labels = (labels.unsqueeze(0) == labels.unsqueeze(1)).float()
        features = F.normalize(features, dim=1)
        similarity = features @ features.T
        mask = torch.eye(labels.shape[0], dtype=torch.bool)
        labels = labels[~mask].view(labels.shape[0], -1)
        similarity = similarity[~mask].view(labels.shape[0], -1)
        positives = similarity[labels.bool()].view(labels.shape[0], -1)
        negatives = similarity[~labels.bool()].view(labels.shape[0], -1)
        logits = torch.cat([positives, negatives], dim=1)
        return logits / 0.07, torch.zeros(logits.shape[0], dtype=torch.long)

    model = ResNetSimCLR()
    optimizer = torch.optim.Adam(model.parameters(), 3e-4, weight_decay=1e-4)
    optimize(model, optimizer=optimizer)
    criterion = nn.CrossEntropyLoss()
    loader = DataLoader(TensorDataset(torch.rand(112, 3, 32, 32)), batch_size=24, shuffle=True)
    for _ in range(2):
        model.train()
        for (images,) in loader:
            views = [
                images + 0.1 * torch.randn_like(images),
                images.flip(3) * (0.8 + 0.4 * torch.rand(len(images), 1, 1, 1)),
            ]
            features = model(torch.cat(views, dim=0))
            logits, labels = info_nce_loss(features)
            loss = criterion(logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log(loss=loss)
        model.eval()
        with torch.no_grad():
            log_of_probe = model.backbone(torch.rand(16, 3, 32, 32)).std()
            assert torch.isfinite(log_of_probe)


def contrastive_pairs(optimize: Optimize, log: Log) -> None:
    """A siamese network with a margin loss on pairs: the model is called once for each side, and both wait for one
    backward."""

    class SiameseNetwork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cnn = nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(inplace=True), nn.BatchNorm2d(16), nn.Dropout2d(p=0.2),
                nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(inplace=True), nn.BatchNorm2d(16), nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(inplace=True), nn.BatchNorm2d(32), nn.AdaptiveAvgPool2d(4),
            )  # fmt: skip
            self.fc = nn.Sequential(nn.Linear(32 * 16, 128), nn.ReLU(inplace=True), nn.Linear(128, 8))

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.cnn(x).flatten(1))

    net = SiameseNetwork()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    optimize(net, optimizer=optimizer)
    data = TensorDataset(torch.rand(200, 1, 28, 28), torch.rand(200, 1, 28, 28), torch.randint(0, 2, (200,)).float())
    for _ in range(2):
        for x0, x1, label in DataLoader(data, batch_size=40, shuffle=True):
            out0, out1 = net(x0), net(x1)
            optimizer.zero_grad()
            distance = F.pairwise_distance(out0, out1)
            loss = ((1 - label) * distance.pow(2) + label * (2.0 - distance).clamp(min=0.0).pow(2)).mean()
            loss.backward()
            optimizer.step()
            log(loss=loss)
