"""Code that is made when it is first needed is the code of the graph as it is then."""

import copy
import pickle

import torch
from torch import fx

from passes.graphs.edit import LazyCode


def double(x: torch.Tensor) -> torch.Tensor:
    return x + x


def made() -> LazyCode:
    traced = fx.symbolic_trace(double)
    return LazyCode(traced, traced.graph, "Double")


def squared(module: fx.GraphModule) -> None:
    for node in module.graph.nodes:
        if node.op == "call_function":
            node.target = torch.mul
    module.recompile()


def test_a_call_runs_the_graph_as_it_is_now() -> None:
    module, three = made(), torch.tensor(3.0)
    assert module(three) == 6
    squared(module)
    assert module(three) == 9
    assert module.forward(three) == 9


def test_the_code_is_that_of_the_graph_as_it_is_now() -> None:
    module = made()
    assert "x + x" in module.code
    squared(module)
    assert "torch.mul(x, x)" in module.code
    assert "torch.mul(x, x)" in str(module)


def test_nothing_is_compiled_before_that() -> None:
    module = made()
    assert not hasattr(module, "_code")
    assert "x + x" in module.code


def test_two_modules_keep_apart() -> None:
    one, other, three = made(), made(), torch.tensor(3.0)
    squared(other)
    assert (one(three), other(three)) == (6, 9)


def test_copies_and_pickles() -> None:
    module, three = made(), torch.tensor(3.0)
    for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert again(three) == 6
        squared(again)
        assert again(three) == 9
    assert module(three) == 6
