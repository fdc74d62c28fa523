"""Layers with parameters, drawn at random: linear, normalisation, attention, convolution, recurrent, experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.models.random_block import Block, Draw

ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    F.relu, F.gelu, F.silu, torch.tanh, torch.sigmoid, F.softplus, F.elu, F.hardswish, F.leaky_relu, F.mish, F.selu,
    F.softsign, F.logsigmoid, F.hardtanh, F.celu, torch.sin, torch.atan, torch.erf, F.tanhshrink, torch.abs,
)  # fmt: skip


def linear(draw: Draw, width: int) -> nn.Module:
    return nn.Linear(width, width, bias=draw.random() < 0.7)


def activation(draw: Draw, width: int) -> nn.Module:
    act = draw.choice(ACTIVATIONS)
    return Block(lambda self, h: act(self.lin(h)), lin=linear(draw, width))


def gated(draw: Draw, width: int) -> nn.Module:
    act, fused = draw.choice(ACTIVATIONS), draw.random() < 0.5

    def run(self: Any, h: Tensor) -> Tensor:
        up, gate = self.up(h).chunk(2, dim=-1) if fused else (self.up(h), self.gate(h))
        return self.down(up * act(gate))

    wide = 2 * width
    return Block(
        run, up=nn.Linear(width, 2 * wide if fused else wide), down=nn.Linear(wide, width),
        **({} if fused else {"gate": nn.Linear(width, wide)}),
    )  # fmt: skip


def normalisation(draw: Draw, width: int) -> nn.Module:
    kind = draw.choice(("layer", "batch", "group", "rms", "instance", "function"))
    if kind == "layer":
        return nn.LayerNorm(width, elementwise_affine=draw.random() < 0.8)
    if kind == "rms":
        return nn.RMSNorm(width)
    if kind == "function":
        return Block(lambda self, h: (h - h.mean(-1, keepdim=True)) / (h.std(-1, keepdim=True) + 1e-3) * self.scale,
                     scale=nn.Parameter(torch.ones(width)))  # fmt: skip
    norm = {
        "batch": lambda: nn.BatchNorm1d(width, momentum=draw.choice((0.1, None)), affine=draw.random() < 0.8),
        "group": lambda: nn.GroupNorm(4, width),
        "instance": lambda: nn.InstanceNorm1d(width, affine=True),
    }[kind]()
    return Block(lambda self, h: self.norm(h.transpose(1, 2)).transpose(1, 2), norm=norm)


def attention(draw: Draw, width: int) -> nn.Module:
    heads = draw.choice((1, 2, 4))
    kind = draw.choice(("sdpa", "causal", "manual", "dropout", "masked"))

    def run(self: Any, h: Tensor) -> Tensor:
        batch, length, _ = h.shape
        q, k, v = (part.reshape(batch, length, heads, -1).transpose(1, 2) for part in self.qkv(h).chunk(3, dim=-1))
        if kind == "manual":
            scores = (q @ k.transpose(-1, -2)) / (q.shape[-1] ** 0.5)
            keep = torch.ones(length, length, dtype=torch.bool, device=h.device).tril()
            out = scores.masked_fill(~keep, float("-inf")).softmax(-1) @ v
        elif kind == "masked":
            bias = torch.linspace(0, 1, length, device=h.device).expand(length, length)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))
        else:
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=kind == "causal", dropout_p=0.2 if kind == "dropout" else 0.0
            )
        return self.out(out.transpose(1, 2).reshape(batch, length, -1))

    return Block(run, qkv=nn.Linear(width, 3 * width), out=nn.Linear(width, width))


def grouped_attention(draw: Draw, width: int) -> nn.Module:
    repeat = draw.choice(("expand", "repeat_interleave", "enable_gqa"))

    def run(self: Any, h: Tensor) -> Tensor:
        batch, length, _ = h.shape
        q = self.q(h).view(batch, length, 4, -1).transpose(1, 2)
        k, v = (lin(h).view(batch, length, 2, -1).transpose(1, 2) for lin in (self.k, self.v))
        if repeat == "expand":
            k, v = (x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(batch, 4, length, -1) for x in (k, v))
        elif repeat == "repeat_interleave":
            k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=repeat == "enable_gqa")
        return out.transpose(1, 2).reshape(batch, length, -1)

    half = nn.Linear(width, width // 2)
    return Block(run, q=nn.Linear(width, width), k=half, v=nn.Linear(width, width // 2))


def tied(draw: Draw, width: int) -> nn.Module:
    kind = draw.choice(("twice", "transposed", "shared"))

    def run(self: Any, h: Tensor) -> Tensor:
        if kind == "twice":
            return self.lin(F.gelu(self.lin(h)))
        if kind == "transposed":
            return F.linear(F.linear(h, self.lin.weight).relu(), self.lin.weight.t())
        return self.lin(h) + self.other(h.sin())

    lin, other = nn.Linear(width, width), nn.Linear(width, width)
    if kind == "shared":
        other.weight = lin.weight
    return Block(run, lin=lin, other=other)


def convolution(draw: Draw, width: int) -> nn.Module:
    kind = draw.choice(("conv", "depthwise", "transposed", "image", "pool", "interpolate", "avg", "adaptive"))
    convs: dict[str, Callable[[], nn.Module]] = {
        "conv": lambda: nn.Conv1d(width, width, 3, padding=1),
        "depthwise": lambda: nn.Conv1d(width, width, 3, padding=1, groups=width),
        "transposed": lambda: nn.ConvTranspose1d(width, width, 3, padding=1),
        "image": lambda: nn.Conv2d(1, 1, 3, padding=1),
    }
    conv = convs.get(kind, convs["conv"])()

    def run(self: Any, h: Tensor) -> Tensor:
        if kind == "image":
            return self.conv(h.unsqueeze(1)).squeeze(1)
        y = self.conv(h.transpose(1, 2))
        length = h.shape[1]
        if kind == "pool":
            y = F.max_pool1d(y, 3, stride=1, padding=1)
        elif kind == "interpolate":
            y = F.interpolate(F.avg_pool1d(y, 2, ceil_mode=True), size=length, mode="linear")
        elif kind == "avg":
            y = F.avg_pool1d(y, 3, stride=1, padding=1)
        elif kind == "adaptive":
            y = y + F.adaptive_max_pool1d(y, 1)
        return y.transpose(1, 2)

    return Block(run, conv=conv)


def recurrent(draw: Draw, width: int) -> nn.Module:
    cell = draw.choice((nn.LSTM, nn.GRU, nn.RNN))(width, width, batch_first=True)
    return Block(lambda self, h: self.cell(h)[0], cell=cell)


def parametrised(draw: Draw, width: int) -> nn.Module:
    wrap = draw.choice(
        (nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm,
         nn.utils.parametrizations.orthogonal)
    )  # fmt: skip
    return wrap(nn.Linear(width, width))


def experts(draw: Draw, width: int) -> nn.Module:
    kind = draw.choice(("dense", "hit", "sorted"))

    def run(self: Any, h: Tensor) -> Tensor:
        flat = h.reshape(-1, width)
        weights, chosen = self.router(flat).softmax(-1).topk(1, dim=-1)
        if kind == "dense":
            every = torch.stack([expert(flat) for expert in self.experts], dim=1)
            return (every.gather(1, chosen[..., None].expand(-1, -1, width)).squeeze(1) * weights).view_as(h)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            if kind == "hit":
                (rows,) = torch.where(chosen[:, 0] == number)
                out.index_add_(0, rows, expert(flat[rows]) * weights[rows])
            else:
                keep = (chosen == number).to(flat.dtype)
                out = out + expert(flat * keep) * keep * weights
        return out.view_as(h)

    count = draw.choice((2, 3))
    layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
    return Block(run, router=nn.Linear(width, count), experts=layers)
