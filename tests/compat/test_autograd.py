from __future__ import annotations

from typing import Any

import torch

from memopt.compat.autograd import (
    Fate,
    current_backward,
    fate_of_gradient,
    is_differentiable,
    keeps_graph,
    receivers,
)
from memopt.compat.hooks import WatchingHook, backward_hooks, post_accumulate_hooks, watching_hooks


class Probe(torch.autograd.Function):
    """The identity on its first input; its backward records the results of the functions of memopt.compat.autograd."""

    seen: dict[str, Any]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
        ctx.leaf = leaf
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        Probe.seen = {
            "fate": fate_of_gradient(ctx.leaf),
            "receivers": receivers(),
            "backward": current_backward(),
            "keeps": keeps_graph(),
        }
        return gradient, gradient


def probe() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, leaf = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    return x, leaf, Probe.apply(x * 2, leaf).sum()


def test_backward_accumulates() -> None:
    _, leaf, loss = probe()
    loss.backward()
    assert Probe.seen["fate"] is Fate.ACCUMULATED
    assert Probe.seen["receivers"][0] == (None, Fate.RETURNED)
    assert Probe.seen["receivers"][1][0] is leaf
    assert Probe.seen["receivers"][1][1] is Fate.ACCUMULATED
    assert not Probe.seen["keeps"]


def test_backward_to_other_inputs_drops() -> None:
    x, _, loss = probe()
    loss.backward(inputs=[x])
    assert Probe.seen["fate"] is Fate.DROPPED


def test_autograd_grad_returns() -> None:
    _, leaf, loss = probe()
    torch.autograd.grad(loss, [leaf])
    assert Probe.seen["fate"] is Fate.RETURNED


def test_backward_passes_have_numbers() -> None:
    *_, loss = probe()
    loss.backward(retain_graph=True)
    assert Probe.seen["keeps"]
    first = Probe.seen["backward"]
    loss.backward()
    assert Probe.seen["backward"] not in (first, -1)
    assert not Probe.seen["keeps"]
    assert current_backward() == -1


def test_hooks_of_a_leaf() -> None:
    leaf = torch.ones(2, requires_grad=True)
    assert backward_hooks(leaf) == []
    assert post_accumulate_hooks(leaf) == []

    def on_gradient(gradient: torch.Tensor) -> None: ...
    def after(parameter: torch.Tensor) -> None: ...

    first, second = leaf.register_hook(on_gradient), leaf.register_post_accumulate_grad_hook(after)
    assert backward_hooks(leaf) == [on_gradient]
    assert post_accumulate_hooks(leaf) == [after]
    first.remove()
    second.remove()
    assert backward_hooks(leaf) == []
    assert post_accumulate_hooks(leaf) == []


def test_a_hook_that_only_watches_is_told_apart() -> None:
    class Watch(WatchingHook):
        def __call__(self, leaf: torch.Tensor) -> None: ...

    leaf, watch = torch.ones(2, requires_grad=True), Watch()
    leaf.register_post_accumulate_grad_hook(watch)
    assert post_accumulate_hooks(leaf) == []
    assert watching_hooks(leaf) == [watch]


def test_a_view_made_without_gradients_has_no_edge() -> None:
    """It says that it requires a gradient: the forward of a reversible network, whose graph is recorded there, returns
    such views, and torch's own error ended the training."""
    x = torch.randn(4, 4, requires_grad=True)
    with torch.no_grad():
        views = torch.chunk(x, 2)
    assert all(one.requires_grad for one in views)
    assert not any(map(is_differentiable, views))
    assert is_differentiable(x)
    assert is_differentiable(x * 2)
    assert not is_differentiable(x.detach())
