from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn

from memopt.capture.outputs import detach_all_but_loss, hand_out
from memopt.errors import UnplannedGradientError
from passes import format_graph


def region(*returned: str | None, of: Mapping[str, tuple[str, ...]] | None = None) -> fx.GraphModule:
    """A graph as Dynamo captures it, which returns the named values and None; `of` says from which values others are
    computed: by default logits from hidden states, and losses from logits."""
    graph = fx.Graph()
    examples = {
        "x": torch.zeros(2, 3),
        "weight": nn.Parameter(torch.zeros(3, 5)),
        "head": nn.Parameter(torch.zeros(3, 5), requires_grad=False),
        "hidden": torch.zeros(2, 3, requires_grad=True),
        "logits": torch.zeros(2, 5, requires_grad=True),
        "cut": torch.zeros(1, 5, requires_grad=True),
        "tokens": torch.zeros(2, dtype=torch.int64),
        "loss": torch.zeros((), requires_grad=True),
        "auxiliary": torch.zeros((), requires_grad=True),
        "accuracy": torch.zeros(()),
    }
    sources = {"x": (), "weight": (), "head": (), "cut": ("logits",)}
    sources |= {"hidden": ("x", "weight"), "logits": ("hidden", "head"), "tokens": ("x",), "accuracy": ("x",)}
    sources |= {"loss": ("logits", "tokens"), "auxiliary": ("logits",), **(of or {})}
    nodes: dict[str, fx.Node] = {}
    for name in examples:
        nodes[name] = graph.placeholder(name) if not sources[name] else _call(graph, name, nodes, sources[name])
        nodes[name].meta["example_value"] = examples[name]
    graph.output(tuple(None if name is None else nodes[name] for name in returned))
    module = fx.GraphModule({}, graph)
    module.graph.eliminate_dead_code()
    return module


def _call(graph: fx.Graph, name: str, nodes: Mapping[str, fx.Node], sources: tuple[str, ...]) -> fx.Node:
    arguments = tuple(nodes[source] for source in sources)
    return graph.create_node("call_function", torch.relu, arguments, name=name)


def test_golden() -> None:
    module = region("loss", "logits", "tokens", None, "hidden")
    assert detach_all_but_loss(module) == frozenset({1, 4})
    assert_expected_inline(
        format_graph(module),
        """\
input x
input weight
input head
hidden = relu(x, weight)
logits = relu(hidden, head)
tokens = relu(x)
loss = relu(logits, tokens)
detach = call_method.detach(logits)
detach_1 = call_method.detach(hidden)
return (loss, detach, tokens, None, detach_1)""",
    )
    assert ".detach()" in module.code, "the module is recompiled"


@pytest.mark.parametrize("of", [{}, {"cut": ("hidden",)}])
def test_what_does_not_flow_into_the_loss_is_detached(of: Mapping[str, tuple[str, ...]]) -> None:
    """A part of the logits, and a recurrent state: the loss is computed from all of their parameters."""
    assert detach_all_but_loss(region("loss", "cut", of=of)) == frozenset({1})


@pytest.mark.parametrize(
    "of",
    [
        pytest.param({"auxiliary": ("weight",)}, id="a learned temperature"),
        pytest.param({"auxiliary": ("hidden", "tokens")}, id="a commitment loss before a frozen decoder"),
    ],
)
def test_a_scalar_that_is_no_loss(of: Mapping[str, tuple[str, ...]]) -> None:
    module = region("logits", "auxiliary", of=of)
    before = format_graph(module)
    assert detach_all_but_loss(module) == frozenset()
    assert format_graph(module) == before


def test_scalar_outputs_are_not_detached() -> None:
    assert detach_all_but_loss(region("loss", "auxiliary", "accuracy", "tokens")) == frozenset()


@pytest.mark.parametrize("returned", [("logits", "hidden"), ("logits", "tokens"), ("logits", "accuracy"), ("tokens",)])
def test_without_a_loss_nothing_is_detached(returned: tuple[str, ...]) -> None:
    module = region(*returned)
    before = format_graph(module)
    assert detach_all_but_loss(module) == frozenset()
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
