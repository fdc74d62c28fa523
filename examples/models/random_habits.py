"""What forwards do beside computing, drawn at random: random numbers, buffers, hooks, casts, breaks of the graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.models.random_block import Block, Draw
from examples.models.random_layers import linear


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
