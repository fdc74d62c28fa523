"""How a forward that waits learns of the backward of its outputs, and the gradients of outputs that it does not
differentiate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor, nn

from memopt.errors import UnplannedGradientError
from memopt.run.replay import hand_out


class Forward:
    """Records the calls that a region's outputs make."""

    def __init__(self, refusal: Exception | None = None) -> None:
        self.leaves: list[list[Tensor]] = []
        self.done = 0
        self.refusal = refusal

    def before_backward(self, leaves: Sequence[Tensor], gradients: Sequence[object] = ()) -> None:
        self.leaves.append(list(leaves))
        if self.refusal is not None:
            raise self.refusal

    def after_backward(self) -> None:
        self.done += 1


class Region(torch.autograd.Function):
    """A captured region with one linear layer; returns its loss, and its logits without a gradient."""

    @staticmethod
    def forward(ctx, weight: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = x @ weight
        ctx.save_for_backward(x)
        ctx.mark_non_differentiable(logits)
        return logits.sum(), logits

    @staticmethod
    def backward(ctx, gradient: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor | None]:
        (x,) = ctx.saved_tensors
        return gradient * x.sum(0)[:, None].expand(3, 2), None


class Replay:
    """Gives all leaves a gradient of ones times the sum of those that arrive."""

    def __init__(self, weight: Tensor) -> None:
        self.leaves = [weight]
        self.freed = 0

    def gradients(self, of: Mapping[int, Tensor]) -> list[Tensor]:
        assert list(of) == [1]
        return [torch.ones_like(leaf) * of[1].sum() for leaf in self.leaves]

    def derivatives(self, of: Mapping[int, Tensor]) -> list[Tensor]:
        raise UnplannedGradientError(f"gradients of gradients of {list(of)}")

    def release(self) -> None:
        self.freed += 1


def call(weight: Tensor, forward: Forward) -> tuple[Tensor, Tensor, int]:
    loss, logits = Region.apply(weight, torch.ones(4, 3))
    return hand_out((loss, logits, 7), forward, Replay(weight), frozenset({1}))


def test_outputs_are_as_the_plain_model_gives_them() -> None:
    weight, forward = nn.Parameter(torch.ones(3, 2)), Forward()
    loss, logits, number = call(weight, forward)
    assert loss.requires_grad
    assert logits.requires_grad
    assert (loss.item(), logits.tolist(), number) == (24.0, [[3.0, 3.0]] * 4, 7)
    loss /= 2  # as gradient accumulation does
    loss.backward()
    assert weight.grad.tolist() == [[2.0, 2.0]] * 3
    (leaves,) = forward.leaves
    assert leaves[0] is weight
    assert forward.done == 1


def test_a_gradient_into_another_output_is_that_of_the_replay() -> None:
    weight, forward = nn.Parameter(torch.ones(3, 2)), Forward()
    loss, logits, _ = call(weight, forward)
    (loss + 2 * logits.mean()).backward()
    assert weight.grad.tolist() == [[6.0, 6.0]] * 3
    assert forward.done == 1


def test_what_the_replay_needs_is_freed_in_the_backward() -> None:
    weight = nn.Parameter(torch.ones(3, 2))
    loss, logits = Region.apply(weight, torch.ones(4, 3))
    replay = Replay(weight)
    loss, logits = hand_out((loss, logits), Forward(), replay, frozenset({1}))
    loss.backward(retain_graph=True)
    assert not replay.freed
    loss.backward()
    assert replay.freed


def test_an_error_before_the_backward_prevents_it() -> None:
    weight, forward = nn.Parameter(torch.ones(3, 2)), Forward(refusal=ValueError("too large now"))
    with pytest.raises(ValueError, match="too large now"):
        call(weight, forward)[0].backward()
    assert weight.grad is None


def test_gradients_of_gradients_are_refused() -> None:
    weight, forward = nn.Parameter(torch.ones(3, 2)), Forward()
    outputs = Region.apply(weight, torch.ones(4, 3))
    with pytest.raises(UnplannedGradientError, match=r"create_graph=True .* call memopt\.remove"):
        torch.autograd.grad(hand_out(outputs, forward)[0], weight, create_graph=True)
    with pytest.raises(UnplannedGradientError, match=r"of gradients of \[0\]"):
        torch.autograd.grad(call(weight, forward)[0], weight, create_graph=True)


def test_a_forward_with_a_retained_graph_still_waits() -> None:
    weight, forward = nn.Parameter(torch.ones(3, 2)), Forward()
    loss = call(weight, forward)[0]
    loss.backward(retain_graph=True)
    assert not forward.done
    loss.backward()
    assert forward.done == 1
    assert len(forward.leaves) == 2


def test_outputs_without_gradients_are_returned_unchanged() -> None:
    outputs = (torch.zeros(()), torch.zeros(3), None)
    handed = hand_out(outputs, Forward())
    assert all(ours is theirs for ours, theirs in zip(handed, outputs, strict=True))
