"""Random modules: stacks of blocks drawn from a grammar of what people write, on inputs (batch, length, width).

`random_case(seed)` gives a model that trains in eager mode with its batch. Blocks nest: residual connections, loops,
checkpoints, branches and parts without gradients hold further blocks. All of them are small, so that a case takes a
second or two, most of it for the capture.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from examples.models.random_block import Block, Draw
from examples.models.random_habits import attributes, break_of_graph, buffers, cast, dropout, hooks, own_function
from examples.models.random_layers import (
    activation,
    attention,
    convolution,
    experts,
    gated,
    grouped_attention,
    normalisation,
    parametrised,
    recurrent,
    tied,
)
from examples.models.random_tensor_code import (
    in_place,
    indexed,
    ordered,
    pointwise,
    products,
    rotary,
    selected,
    spectral,
    views,
)


@dataclass(frozen=True)
class Case:
    """A model, a batch for its forward by keyword, the names of the blocks that it is made of, and what is special
    about its inputs: one of `INPUTS`."""

    model: nn.Module
    batch: dict[str, Any]
    blocks: tuple[str, ...]
    inputs: str = "plain"

    def fresh_batch(self) -> dict[str, Any]:
        """A copy of the batch, for the steps of one twin."""
        return {
            name: tensor.detach().clone().requires_grad_(tensor.requires_grad) for name, tensor in self.batch.items()
        }

    def call(self, model: nn.Module) -> Callable[..., Any]:
        """The function that a training step calls with the batch: the model itself, or behind another operator."""
        if self.inputs != "a result":
            return model
        return lambda x, **others: model(x=torch.sin(x), **others)

    def begin_again(self, model: nn.Module) -> None:
        """Give a copy of the model the state of this one."""
        model.load_state_dict(self.model.state_dict())
        if self.inputs == "remembered":
            model.seen = torch.zeros_like(self.batch["x"][0, 0])


INPUTS = {"plain": 6.0, "a leaf": 1.0, "a result": 1.0, "written to": 1.0, "remembered": 1.0}
"""Kinds of inputs, with the weights by which they are drawn: plain tensors, a leaf that requires a gradient, the result
of an operator outside of the model, an input that the forward writes to, and plain inputs of a model that writes to a
tensor that is its attribute but no buffer."""


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
        return self.inner(h) if self.direct else checkpoint(self.inner, h, use_reentrant=False)

    return Block(run, inner=inner, direct=False)


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


def derivative(inner: nn.Module, draw: Draw, width: int) -> nn.Module:
    """The derivative of an energy of the inner block's output by its input, or by a leaf in its place."""
    leaf, twice, by_function = draw.random() < 0.5, draw.random() < 0.2, draw.random() < 0.3

    def run(self: Any, h: Tensor) -> Tensor:
        if by_function:
            slope = torch.func.grad(lambda x: self.inner(x).square().mean())(h)
            return h + (slope * h.numel()).tanh()
        x = h.detach().requires_grad_() if leaf else h
        found = self.inner(x).square().mean()
        (slope,) = torch.autograd.grad(found, x, create_graph=True)
        if twice:
            (slope,) = torch.autograd.grad((slope * x.sin()).sum(), x, create_graph=True)
        return h + (slope * h.numel()).tanh()

    return Block(run, inner=inner)


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
        self.seen: Tensor | None = None
        """A running mean of hidden states, as a plain attribute; None for models that keep none."""
        self.head = nn.Linear(width, 11)
        self.loss = draw.choice(("cross", "mse", "bce", "huber", "kl", "nll", "zeros", "sum", "smooth", "weighted"))
        self.returns = draw.choice(("loss", "tuple", "dict", "hidden"))
        drawn.names.append(f"loss {self.loss}, returns {self.returns}")

    def forward(self, x: Tensor, labels: Tensor, seen: Tensor | None = None) -> Any:
        h = self.first(x)
        seen = self.seen if seen is None else seen
        if seen is not None:
            seen.lerp_(h.detach().mean((0, 1)), 0.5)
            h = h * seen.cos()
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


def random_case(seed: int, *, derivatives: bool = False) -> Case:
    """The model and batch of a seed; with `derivatives`, one or more of its blocks are differentiated inside. The
    weights come from torch's generator, which is seeded with it, too."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    width, length, rows = draw.choice((16, 32)), draw.choice((5, 8, 12)), draw.choice((2, 3, 8))
    drawn = _Drawn(draw, width)
    model = RandomModel(drawn, draw.choice((1, 2, 3, 3, 4))).train()
    if derivatives:
        inside = random.Random(f"derivatives {seed}")
        chosen = inside.sample(range(len(model.blocks)), inside.choice((1, 1, len(model.blocks))))
        for number in chosen:
            model.blocks[number] = derivative(model.blocks[number], inside, width)
        drawn.names.append(f"derivatives of {sorted(chosen)}")
    x = torch.randn(rows, length, width)
    batch = {"x": x, "labels": torch.randint(0, 11, (rows, length))}
    (inputs,) = random.Random(f"inputs {seed}").choices(list(INPUTS), list(INPUTS.values()))
    if inputs == "written to":
        batch["seen"] = torch.zeros(width)
    elif inputs == "remembered":
        model.seen = torch.zeros(width)
    x.requires_grad_(inputs in ("a leaf", "a result"))
    return Case(model, batch, (*drawn.names, f"inputs {inputs}"), inputs)
