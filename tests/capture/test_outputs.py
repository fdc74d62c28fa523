from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx, nn

from memopt.capture.outputs import detach_all_but_loss
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
