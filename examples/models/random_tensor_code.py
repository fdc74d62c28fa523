"""Code on tensors, drawn at random: views, writes in place, indexing, sorting, products, complex numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.models.random_block import Block, Draw
from examples.models.random_layers import linear


def rotary(draw: Draw, width: int) -> nn.Module:
    def run(self: Any, h: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(h.shape[1], device=h.device).float(), self.frequencies)
        if self.as_complex:
            turned = torch.view_as_complex(self.lin(h).reshape(*h.shape[:-1], -1, 2)) * torch.polar(
                torch.ones_like(angles), angles
            )
            return torch.view_as_real(turned).flatten(-2)
        first, second = self.lin(h).chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    frequencies = 1.0 / (100.0 ** (torch.arange(width // 2).float() / (width // 2)))
    return Block(run, lin=linear(draw, width), frequencies=frequencies, as_complex=draw.random() < 0.4)


def views(draw: Draw, width: int) -> nn.Module:
    kind = draw.choice(
        ("flip", "roll", "split", "unbind", "unfold", "stride", "permute", "cat", "swap", "pad", "diagonal")
    )

    def run(self: Any, h: Tensor) -> Tensor:
        h = self.lin(h)
        if kind == "flip":
            return h.flip(1) + h
        if kind == "roll":
            return torch.roll(h, shifts=1, dims=1) * h
        if kind == "split":
            first, second = torch.split(h, [width // 4, width - width // 4], dim=-1)
            return torch.cat((second.sin(), first), dim=-1)
        if kind == "unbind":
            return torch.stack([row * (number + 1) for number, row in enumerate(h.unbind(1))], dim=1)
        if kind == "unfold":
            return F.pad(h, (0, 0, 2, 0)).unfold(1, 3, 1).mean(-1)
        if kind == "stride":
            return torch.stack((h[..., ::2], h[..., 1::2].exp().clamp(max=10)), dim=-1).flatten(-2)
        if kind == "permute":
            return h.permute(2, 0, 1).contiguous().mul(1.5).permute(1, 2, 0)
        if kind == "cat":
            return torch.cat([h[:, :1], h[:, :-1]], dim=1) + h
        if kind == "swap":
            return h.transpose(1, 2).reshape(h.shape) + h.mT.mT
        if kind == "pad":
            return F.pad(h, (1, 1), mode="constant", value=0.5)[..., 1:-1] * h
        return h + torch.diagonal(h, dim1=1, dim2=2).sum(-1)[:, None, None]

    return Block(run, lin=linear(draw, width))


def in_place(draw: Draw, width: int) -> nn.Module:
    kind = draw.choice(
        ("add", "relu", "slice", "mask", "index", "view", "base", "copy", "zero", "twice", "scale_shift")
    )

    def run(self: Any, h: Tensor) -> Tensor:
        h = self.lin(h)
        if kind == "add":
            h.add_(1.0).mul_(0.5)
        elif kind == "relu":
            h = F.relu(h, inplace=True)
        elif kind == "slice":
            h[:, 0] = h[:, -1] * 2
        elif kind == "mask":
            h = h.masked_fill_(h > 1, 0.3)
        elif kind == "index":
            h[:, torch.tensor([0, -1])] = 0.5
        elif kind == "view":
            h.view(-1).mul_(0.7)
        elif kind == "base":
            part = h[..., : width // 2]
            h.mul_(2.0)
            h = h + torch.cat((part, part), dim=-1)
        elif kind == "copy":
            new = torch.empty_like(h)
            new.copy_(h)
            h = new.tanh_()
        elif kind == "zero":
            new = torch.zeros_like(h)
            new[:, 1:] += h[:, :-1]
            h = new + h
        elif kind == "twice":
            y = h.sigmoid()
            h = h * y
            h += y
        else:
            h.mul_(self.scale).add_(self.lin.weight.mean())
        return h

    return Block(run, lin=linear(draw, width), scale=nn.Parameter(torch.ones(width)))


def selected(draw: Draw, width: int) -> nn.Module:
    kind = draw.choice(("mask", "where", "nonzero", "masked_select", "masked_scatter"))

    def run(self: Any, h: Tensor) -> Tensor:
        mask = h.detach().mean(-1) > 0
        if kind == "mask":
            out = torch.zeros_like(h)
            out[mask] = self.lin(h[mask])
            return out + h
        if kind == "where":
            return torch.where(mask[..., None], self.lin(h), h)
        if kind == "nonzero":
            rows, columns = mask.nonzero(as_tuple=True)
            return h.index_put((rows, columns), self.lin(h[rows, columns]))
        if kind == "masked_select":
            return h + self.lin(h).masked_select(mask[..., None]).sum() / h.numel()
        return h.masked_scatter(mask[..., None], self.lin(h))

    return Block(run, lin=linear(draw, width))


def indexed(draw: Draw, width: int) -> nn.Module:
    kind = draw.choice(
        ("gather", "index_select", "index_add", "scatter", "scatter_add", "take", "cumsum", "embed", "scatter_reduce")
    )

    def run(self: Any, h: Tensor) -> Tensor:
        h = self.lin(h)
        order = torch.arange(h.shape[1], device=h.device).flip(0)
        full = order[None, :, None].expand_as(h)
        if kind == "gather":
            return h.gather(1, full)
        if kind == "index_select":
            return h.index_select(1, order) + h
        if kind == "index_add":
            return h.index_add(1, order // 2, h.sin())
        if kind == "scatter":
            return torch.zeros_like(h).scatter(1, full, h)
        if kind == "scatter_add":
            return torch.zeros_like(h).scatter_add_(1, full // 2, h)
        if kind == "take":
            return torch.take_along_dim(h, h.argsort(dim=1), dim=1)
        if kind == "cumsum":
            return h.cumsum(1) / h.shape[1]
        if kind == "scatter_reduce":
            return h.scatter_reduce(1, full // 2, h, "amax")
        return h + self.table((h.detach() * 4).long().clamp(0, 7)[..., 0])

    return Block(run, lin=linear(draw, width), table=nn.Embedding(8, width, padding_idx=0))


def ordered(draw: Draw, width: int) -> nn.Module:
    kind = draw.choice(("sort", "topk", "amax", "max", "median", "kthvalue", "cummax", "logcumsumexp", "prod"))

    def run(self: Any, h: Tensor) -> Tensor:
        h = self.lin(h)
        if kind == "sort":
            return h.sort(dim=-1).values + h
        if kind == "topk":
            values, places = h.topk(4, dim=-1)
            return torch.zeros_like(h).scatter(-1, places, values.softmax(-1))
        if kind == "amax":
            return h - h.amax(dim=1, keepdim=True)
        if kind == "max":
            return h * h.max(dim=1, keepdim=True).values
        if kind == "median":
            return h - h.median(dim=1, keepdim=True).values
        if kind == "kthvalue":
            return h + h.kthvalue(2, dim=-1, keepdim=True).values
        if kind == "cummax":
            return h.cummax(dim=1).values
        if kind == "logcumsumexp":
            return h.logcumsumexp(dim=1)
        return h * h.tanh().prod(dim=-1, keepdim=True)

    return Block(run, lin=linear(draw, width))


def spectral(draw: Draw, width: int) -> nn.Module:
    kind = draw.choice(("rfft", "fft", "complex", "stft"))

    def run(self: Any, h: Tensor) -> Tensor:
        h = self.lin(h)
        if kind == "rfft":
            return torch.fft.irfft(torch.fft.rfft(h, dim=-1) * torch.complex(self.scale, self.shift), n=width, dim=-1)
        if kind == "fft":
            return torch.fft.fft2(h).real / width
        if kind == "complex":
            z = torch.complex(h, h.sin())
            return (z * z.conj()).real + z.angle()
        return torch.fft.fftshift(h, dim=-1).tanh()

    half = width // 2 + 1
    return Block(
        run, lin=linear(draw, width), scale=nn.Parameter(torch.ones(half)), shift=nn.Parameter(torch.zeros(half))
    )


def products(draw: Draw, width: int) -> nn.Module:
    kind = draw.choice(
        (
            "einsum",
            "bmm",
            "baddbmm",
            "outer",
            "bilinear",
            "addmm",
            "cdist",
            "tensordot",
            "cosine",
            "norm",
            "matrix_norm",
        )
    )

    def run(self: Any, h: Tensor) -> Tensor:
        y = self.lin(h)
        if kind == "einsum":
            return torch.einsum("bid,bjd,bje->bie", y, h, y) / h.shape[1]
        if kind == "bmm":
            return torch.bmm(torch.bmm(y, h.transpose(1, 2)).softmax(-1), y)
        if kind == "baddbmm":
            return torch.baddbmm(y, torch.bmm(y, h.mT), h, beta=0.5, alpha=0.1)
        if kind == "outer":
            return (y.unsqueeze(-1) * h.unsqueeze(-2)).mean(-1)
        if kind == "bilinear":
            return F.bilinear(y, h, self.cube)
        if kind == "addmm":
            return torch.addmm(y.flatten(0, 1), h.flatten(0, 1), self.lin.weight).view_as(h)
        if kind == "cdist":
            return torch.cdist(y, h).tanh() @ y
        if kind == "tensordot":
            return torch.tensordot(y, self.lin.weight, dims=([-1], [0]))
        if kind == "cosine":
            return y * F.cosine_similarity(y, h, dim=-1)[..., None]
        if kind == "norm":
            return y / (y.norm(dim=-1, keepdim=True) + 0.1) + F.normalize(h, dim=-1)
        return y / (1 + torch.linalg.matrix_norm(y))[:, None, None]

    cube = nn.Parameter(0.1 * torch.randn(width, width, width)) if kind == "bilinear" else None
    return Block(run, lin=linear(draw, width), **({} if cube is None else {"cube": cube}))


def pointwise(draw: Draw, width: int) -> nn.Module:
    kind = draw.choice(("lerp", "addcmul", "addcdiv", "clamp", "logaddexp", "softmax", "log_softmax", "var_mean", "glu",
                        "pow", "atan2", "fmod", "minimum", "nan_to_num", "round", "xlogy", "rsqrt", "logsumexp",
                        "frexp"))  # fmt: skip

    def run(self: Any, h: Tensor) -> Tensor:
        y = self.lin(h)
        match kind:
            case "lerp":
                return torch.lerp(h, y, y.sigmoid())
            case "addcmul":
                return torch.addcmul(h, y, y, value=0.5)
            case "addcdiv":
                return torch.addcdiv(h, y, y.abs() + 1.0, value=0.5)
            case "clamp":
                return y.clamp(-0.5, 0.5) + y.clamp_min(0)
            case "logaddexp":
                return torch.logaddexp(h, y)
            case "softmax":
                return y.softmax(dim=draw_dim) * h
            case "log_softmax":
                return y.log_softmax(dim=draw_dim)
            case "var_mean":
                var, mean = torch.var_mean(y, dim=-1, keepdim=True)
                return (y - mean) * torch.rsqrt(var + 1e-5)
            case "glu":
                return F.glu(torch.cat((y, h), dim=-1), dim=-1)
            case "pow":
                return y.abs().add(0.1).pow(1.5) + y**2 + y**3
            case "atan2":
                return torch.atan2(y, h + 3.0)
            case "fmod":
                return torch.fmod(y, 0.7) + torch.remainder(h, 0.9)
            case "minimum":
                return torch.minimum(y, h) + torch.maximum(y, h) * 2
            case "nan_to_num":
                return torch.nan_to_num(y.log())
            case "round":
                return y + (y.round() - y).detach()
            case "xlogy":
                return torch.xlogy(y, y.abs() + 1)
            case "rsqrt":
                return y * (h.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
            case "logsumexp":
                return y - y.logsumexp(dim=draw_dim, keepdim=True)
            case _:
                return y * y.sign() + y.hypot(h)

    draw_dim = draw.choice((-1, 1))
    return Block(run, lin=linear(draw, width))
