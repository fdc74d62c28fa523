"""Random modules: stacks of blocks drawn from a grammar of what people write, on inputs (batch, length, width).

`random_case(seed)` gives a model that trains in eager mode with its batch. Blocks nest: residual connections, loops,
checkpoints, branches and parts without gradients hold further blocks. All of them are small, so that a case takes a
second or two, most of it for the capture.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Draw: TypeAlias = random.Random
Function: TypeAlias = Callable[[Any, Tensor], Tensor]

ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    F.relu, F.gelu, F.silu, torch.tanh, torch.sigmoid, F.softplus, F.elu, F.hardswish, F.leaky_relu, F.mish, F.selu,
    F.softsign, F.logsigmoid, F.hardtanh, F.celu, torch.sin, torch.atan, torch.erf, F.tanhshrink, torch.abs,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model, a batch for its forward by keyword, and the names of the blocks that it is made of."""

    model: nn.Module
    batch: dict[str, Any]
    blocks: tuple[str, ...]


class Block(nn.Module):
    """A block whose forward is a function of the block, which has parts as attributes, and its input."""

    def __init__(self, function: Function, **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, h: Tensor) -> Tensor:
        return self.function(self, h)


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


def dropout(draw: Draw, width: int) -> nn.Module:
    p = draw.choice((0.1, 0.5))
    kind = draw.choice(
        ("module", "feature", "alpha", "unused", "noise", "bernoulli", "in_place", "normal", "rand", "perm")
    )

    def run(self: Any, h: Tensor) -> Tensor:
        h = self.lin(h)
        if kind == "module":
            return F.dropout(h, p)
        if kind == "feature":
            return F.dropout1d(h, p)
        if kind == "alpha":
            return F.alpha_dropout(h, p, training=True)
        if kind == "unused":
            F.dropout(h, p)
            return F.dropout(h, p)
        if kind == "noise":
            return h + 0.1 * torch.randn_like(h)
        if kind == "bernoulli":
            return h * torch.bernoulli(torch.full_like(h, 1 - p))
        if kind == "in_place":
            return F.dropout(h, p, inplace=True)
        if kind == "normal":
            return h * torch.empty_like(h).normal_(1.0, 0.1)
        if kind == "rand":
            return torch.where(torch.rand(h.shape[:2], device=h.device)[..., None] < p, h.detach(), h)
        return h[torch.randperm(h.shape[0], device=h.device)] + h

    return Block(run, lin=linear(draw, width))


def buffers(draw: Draw, width: int) -> nn.Module:
    kind = draw.choice(("count", "mean", "replace", "queue", "clone"))

    def run(self: Any, h: Tensor) -> Tensor:
        h = self.lin(h)
        if kind == "count":
            self.count += 1
            return h / (1 + 0.01 * self.count)
        if kind == "mean":
            self.mean.mul_(0.9).add_(h.detach().mean((0, 1)), alpha=0.1)
            return h - self.mean
        if kind == "replace":
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean((0, 1))
            return h * self.mean
        if kind == "queue":
            with torch.no_grad():
                self.mean[1:] = self.mean[:-1].clone()
                self.mean[0] = h.abs().mean()
            return h + self.mean
        before = self.mean.clone()
        self.mean.lerp_(h.detach().amax((0, 1)), 0.1)
        return h + before + self.mean.detach().clone()

    return Block(run, lin=linear(draw, width), count=torch.zeros(()), mean=torch.zeros(width))


def attributes(draw: Draw, width: int) -> nn.Module:
    kind = draw.choice(("last", "row", "list", "python"))

    def run(self: Any, h: Tensor) -> Tensor:
        h = self.lin(h)
        if kind == "last":
            self.last = h.detach()
        elif kind == "row":
            self.last = h.detach()[0]
        elif kind == "list":
            self.last = [h.mean().detach()]
        else:
            self.calls = getattr(self, "calls", 0) + 1
        return h.tanh()

    return Block(run, lin=linear(draw, width), last=None)


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


class ClippedSquare(torch.autograd.Function):
    """h · clamp(h), with a backward that is not its derivative."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, limit: float) -> Tensor:
        ctx.save_for_backward(h)
        ctx.limit = limit
        return h * h.clamp(-limit, limit)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (h,) = ctx.saved_tensors
        return grads[0] * h.clamp(-ctx.limit, ctx.limit) * 1.5, None


class Reversed(torch.autograd.Function):
    """The identity, with a gradient of the other sign."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.view_as(h)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return -0.5 * grads[0]


def own_function(draw: Draw, width: int) -> nn.Module:
    if draw.random() < 0.5:
        return Block(lambda self, h: ClippedSquare.apply(self.lin(h), 2.0), lin=linear(draw, width))
    return Block(lambda self, h: self.lin(h) + Reversed.apply(h), lin=linear(draw, width))


def hooks(draw: Draw, width: int) -> nn.Module:
    kind = draw.choice(("forward", "pre", "tensor", "backward", "parameter"))
    lin = nn.Linear(width, width)
    block = Block(lambda self, h: self.lin(h).tanh(), lin=lin)
    if kind == "forward":
        lin.register_forward_hook(lambda module, args, out: out * 0.5)
    elif kind == "pre":
        lin.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    elif kind == "backward":
        lin.register_full_backward_hook(lambda module, grads, outs: (grads[0] * 0.5,))
    elif kind == "tensor":

        def run(self: Any, h: Tensor) -> Tensor:
            h = self.lin(h)
            if h.requires_grad:
                h.register_hook(lambda grad: grad * 0.3)
            return h.tanh()

        return Block(run, lin=lin)
    else:
        block.hooked = True
    return block


def hook_parameters(model: nn.Module) -> None:
    """Hook the parameters of blocks that ask for it; to be called on each copy, since copies have no hooks."""
    for module in model.modules():
        if isinstance(module, Block) and getattr(module, "hooked", False):
            module.lin.weight.register_hook(lambda grad: grad.clamp(-0.1, 0.1))


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


def cast(draw: Draw, width: int) -> nn.Module:
    kind = draw.choice(("double", "bf16", "half", "autocast"))

    def run(self: Any, h: Tensor) -> Tensor:
        if kind == "double":
            return F.linear(h.double(), self.lin.weight.double()).float()
        if kind == "bf16":
            return F.linear(h.bfloat16(), self.lin.weight.bfloat16()).float()
        if kind == "half":
            return self.lin(h).half().tanh().float()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.lin(h)
        return h.float()

    return Block(run, lin=linear(draw, width))


disabled: Any = torch.compiler.disable


@disabled
def outside() -> None:
    """Does nothing, outside of any graph."""


def break_of_graph(draw: Draw, width: int) -> nn.Module:
    kind = draw.choice(("call", "item", "branch", "shape", "disabled"))

    def run(self: Any, h: Tensor) -> Tensor:
        h = self.lin(h)
        if kind == "call":
            outside()
        elif kind == "item":
            h = h * (1.0 + 0.01 * h.detach().mean().item())
        elif kind == "branch":
            if h.detach().sum() > 0:
                h = h * 2
        elif kind == "shape":
            h = h + int((h.detach() > 0).sum()) / h.numel()
        else:
            h = h + disabled(torch.sin)(h)
        return h.tanh()

    return Block(run, lin=linear(draw, width))


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


LEAVES: dict[str, Callable[[Draw, int], nn.Module]] = {
    function.__name__: function
    for function in (
        activation, gated, normalisation, attention, grouped_attention, rotary, views, in_place, dropout, buffers,
        attributes, tied, own_function, hooks, selected, indexed, ordered, spectral, products, pointwise, convolution,
        recurrent, parametrised, cast, break_of_graph, experts,
    )
}  # fmt: skip
RARE = {
    "selected": 0.3,
    "recurrent": 0.3,
    "break_of_graph": 0.3,
    "experts": 0.4,
    "parametrised": 0.5,
    "attributes": 0.5,
}
"""Weights of blocks that break the graph or take long to capture; 1 for others."""


def residual(inner: nn.Module, draw: Draw, width: int) -> nn.Module:
    scale = draw.choice((1.0, 0.5))
    return Block(lambda self, h: h + scale * self.inner(h), inner=inner)


def looped(inner: nn.Module, draw: Draw, width: int) -> nn.Module:
    times = draw.choice((2, 3))

    def run(self: Any, h: Tensor) -> Tensor:
        for _ in range(times):
            h = self.inner(h).tanh()
        return h

    return Block(run, inner=inner)


def checkpointed(inner: nn.Module, draw: Draw, width: int) -> nn.Module:
    def run(self: Any, h: Tensor) -> Tensor:
        return checkpoint(self.inner, h, use_reentrant=False)

    return Block(run, inner=inner)


def without_gradient(inner: nn.Module, draw: Draw, width: int) -> nn.Module:
    def run(self: Any, h: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.inner(h).sigmoid()
        return h * scale

    return Block(run, inner=inner)


def frozen(inner: nn.Module, draw: Draw, width: int) -> nn.Module:
    return Block(lambda self, h: h + self.inner(h), inner=inner.requires_grad_(False))


def branched(inner: nn.Module, draw: Draw, width: int) -> nn.Module:
    return Block(lambda self, h: self.inner(h[:, : h.shape[1] // 2]).mean(1, keepdim=True) + h, inner=inner)


def straight_through(inner: nn.Module, draw: Draw, width: int) -> nn.Module:
    return Block(lambda self, h: h + (self.inner(h) - h).detach(), inner=inner)


NESTS: dict[str, Callable[[nn.Module, Draw, int], nn.Module]] = {
    function.__name__: function
    for function in (residual, looped, checkpointed, without_gradient, frozen, branched, straight_through)
}


@dataclass
class _Drawn:
    """The blocks of one model while it is drawn."""

    draw: Draw
    width: int
    names: list[str] = field(default_factory=list)

    def block(self, depth: int = 0) -> nn.Module:
        if depth < 2 and self.draw.random() < 0.3:
            name = self.draw.choices(list(NESTS), [6.0, 1.5, 1.5, 1.0, 0.7, 0.7, 0.7])[0]
            self.names.append(f"{name}(")
            inner = nn.Sequential(*(self.block(depth + 1) for _ in range(self.draw.choice((1, 1, 2)))))
            self.names.append(")")
            return NESTS[name](inner, self.draw, self.width)
        name = self.draw.choices(list(LEAVES), [RARE.get(name, 1.0) for name in LEAVES])[0]
        self.names.append(name)
        return LEAVES[name](self.draw, self.width)


class RandomModel(nn.Module):
    """Embeds its input, runs its blocks, and returns its loss, with other outputs beside it or not."""

    def __init__(self, drawn: _Drawn, blocks: int) -> None:
        super().__init__()
        draw, width = drawn.draw, drawn.width
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(drawn.block() for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 11)
        self.loss = draw.choice(("cross", "mse", "bce", "huber", "kl", "nll", "zeros", "sum", "smooth", "weighted"))
        self.returns = draw.choice(("loss", "tuple", "dict", "hidden"))
        drawn.names.append(f"loss {self.loss}, returns {self.returns}")

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        h = self.first(x)
        hidden = []
        for block in self.blocks:
            h = block(h)
            hidden.append(h)
        scores = self.head(self.norm(h))
        loss = self._loss(scores, labels)
        if self.returns == "loss":
            return {"loss": loss}
        if self.returns == "tuple":
            return loss, scores
        return {"loss": loss, "logits": scores} | ({"hidden": tuple(hidden)} if self.returns == "hidden" else {})

    def _loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        flat, of = scores.flatten(0, 1), labels.flatten()
        match self.loss:
            case "cross":
                return F.cross_entropy(flat, of)
            case "smooth":
                return F.cross_entropy(flat, of, label_smoothing=0.1, ignore_index=3)
            case "weighted":
                return F.cross_entropy(flat, of, weight=torch.linspace(0.5, 1.5, 11), reduction="none").mean()
            case "mse":
                return F.mse_loss(scores, F.one_hot(labels, 11).to(scores.dtype))
            case "zeros":
                return F.mse_loss(scores, torch.zeros_like(scores))
            case "bce":
                return F.binary_cross_entropy_with_logits(scores, F.one_hot(labels, 11).to(scores.dtype))
            case "huber":
                return F.smooth_l1_loss(scores, F.one_hot(labels, 11).to(scores.dtype), beta=0.5)
            case "kl":
                return F.kl_div(flat.log_softmax(-1), F.one_hot(of, 11).float().softmax(-1), reduction="batchmean")
            case "nll":
                return F.nll_loss(flat.log_softmax(-1), of)
            case _:
                return (scores * scores.detach().sigmoid()).sum() / scores.numel()


def random_case(seed: int) -> Case:
    """The model and batch of a seed. The weights come from torch's generator, which is seeded with it, too."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    width, length, rows = draw.choice((16, 32)), draw.choice((5, 8, 12)), draw.choice((2, 3, 8))
    drawn = _Drawn(draw, width)
    model = RandomModel(drawn, draw.choice((1, 2, 3, 3, 4))).train()
    x = torch.randn(rows, length, width)
    labels = torch.randint(0, 11, (rows, length))
    return Case(model, {"x": x, "labels": labels}, tuple(drawn.names))
