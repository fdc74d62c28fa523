from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn

from memopt.capture.outputs import detach_all_but_scalars, hand_out
from memopt.errors import UnplannedGradientError
from passes import format_graph


def region(*returned: str | None) -> fx.GraphModule:
    """A graph as Dynamo captures it, which returns the named values and None."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    examples = {
        "hidden": torch.zeros(2, 3, requires_grad=True),
        "logits": torch.zeros(2, 5, requires_grad=True),
        "tokens": torch.zeros(2, dtype=torch.int64),
        "loss": torch.zeros((), requires_grad=True),
        "auxiliary": torch.zeros((), requires_grad=True),
        "accuracy": torch.zeros(()),
    }
    results: list[fx.Node | None] = []
    for name in returned:
        results.append(None if name is None else graph.create_node("call_function", torch.relu, (x,), name=name))
        if results[-1] is not None:
            results[-1].meta["example_value"] = examples[name]
    graph.output(tuple(results))
    return fx.GraphModule({}, graph)


def test_golden() -> None:
    module = region("loss", "logits", "tokens", None, "hidden")
    assert detach_all_but_scalars(module) == frozenset({1, 4})
    assert_expected_inline(
        format_graph(module),
        """\
input x
loss = relu(x)
logits = relu(x)
tokens = relu(x)
hidden = relu(x)
detach = call_method.detach(logits)
detach_1 = call_method.detach(hidden)
return (loss, detach, tokens, None, detach_1)""",
    )
    assert ".detach()" in module.code, "the module is recompiled"


def test_scalar_outputs_are_not_detached() -> None:
    assert detach_all_but_scalars(region("loss", "auxiliary", "accuracy", "tokens")) == frozenset()


@pytest.mark.parametrize("returned", [("logits", "hidden"), ("logits", "tokens"), ("logits", "accuracy"), ("tokens",)])
def test_without_a_loss_nothing_is_detached(returned: tuple[str, ...]) -> None:
    module = region(*returned)
    before = format_graph(module)
    assert detach_all_but_scalars(module) == frozenset()
    assert format_graph(module) == before


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


def call(weight: Tensor, forward: Forward) -> tuple[Tensor, Tensor, int]:
    loss, logits = Region.apply(weight, torch.ones(4, 3))
    return hand_out((loss, logits, 7), frozenset({1}), forward)


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


def test_a_gradient_into_another_output_is_refused() -> None:
    weight, forward = nn.Parameter(torch.ones(3, 2)), Forward()
    loss, logits, _ = call(weight, forward)
    with pytest.raises(UnplannedGradientError, match=r"output of shape \(4, 2\), .* optimise with outputs='all'"):
        (loss + logits.mean()).backward()
    assert weight.grad is None
    assert not forward.done


def test_an_error_before_the_backward_prevents_it() -> None:
    weight, forward = nn.Parameter(torch.ones(3, 2)), Forward(refusal=ValueError("too large now"))
    with pytest.raises(ValueError, match="too large now"):
        call(weight, forward)[0].backward()
    assert weight.grad is None


def test_gradients_of_gradients_are_refused() -> None:
    weight, forward = nn.Parameter(torch.ones(3, 2)), Forward()
    with pytest.raises(UnplannedGradientError, match=r"create_graph=True .* call memopt\.remove"):
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
    handed = hand_out(outputs, frozenset(), Forward())
    assert all(ours is theirs for ours, theirs in zip(handed, outputs, strict=True))
