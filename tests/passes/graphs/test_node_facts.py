"""Facts about nodes, and the modules that they come from."""

import operator

import pytest
import torch

from passes import is_pure, is_random
from passes.graphs.node_facts import (
    argument_key,
    backward_nodes,
    binds_new_symbols,
    may_write,
    module_path,
)
from tests.passes.capture import Sketch, aten, gpt2, resnet, rows_above_zero


def test_what_is_not_known_to_be_pure_stays() -> None:
    sketch = Sketch()
    x = sketch.input("primals_1", 4)
    dropout = sketch.call(aten.native_dropout.default, x, 0.5, True)
    facts = {
        "pure": [sketch.call(aten.relu.default, x), sketch.call(operator.getitem, dropout, 0)],
        "random": [dropout, sketch.call(aten.rand_like.default, x), sketch.call(aten.bernoulli_.float, x, 0.5)],
        "writes": [
            sketch.call(aten.copy_.default, x, x),
            sketch.call(torch.ops.higher_order.run_and_save_rng_state, aten.native_dropout.default, x, 0.5, True),
            sketch.graph.call_function(torch.ops.aten._assert_scalar.default, (True, "")),
            sketch.graph.call_function(print, (x,)),
        ],
    }
    assert all(is_pure(node) and not is_random(node) and not may_write(node) for node in facts["pure"])
    assert all(is_random(node) and not is_pure(node) for node in facts["random"])
    assert [may_write(node) for node in facts["random"]] == [False, False, True]
    assert all(may_write(node) and not is_pure(node) for node in facts["writes"])
    assert not is_pure(x)
    assert not may_write(x)


def test_attention_without_dropout_draws_no_random_numbers() -> None:
    sketch = Sketch()
    q = sketch.input("primals_1", 1, 2, 4, 8)
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    without = [sketch.call(attention, q, q, q), sketch.call(attention, q, q, q, 0.0, True)]
    assert all(is_pure(node) and not is_random(node) for node in without)
    dropping = sketch.graph.call_function(attention, (q, q, q), {"dropout_p": 0.1})
    assert is_random(dropping)
    assert not is_pure(dropping)


def test_a_custom_operator_is_not_trusted() -> None:
    @torch.library.custom_op("passes_test::noise", mutates_args=())
    def noise(x: torch.Tensor) -> torch.Tensor:
        return torch.rand_like(x)

    noise.register_fake(torch.empty_like)
    sketch = Sketch()
    node = sketch.call(torch.ops.passes_test.noise.default, sketch.input("primals_1", 4))
    assert not is_pure(node)
    assert may_write(node)


def test_the_backward_half_is_what_depends_on_tangents_or_was_traced_there() -> None:
    for captured in (gpt2(), resnet()):
        graph = captured.graph_module.graph
        backward = backward_nodes(graph)
        outputs = graph.output_node().args[0]
        assert not any(node in backward for node in outputs[: captured.forward_outputs])
        assert all(node in backward for node in outputs[captured.forward_outputs :] if node is not None)
    sketch = Sketch()
    x, tangent = sketch.input("primals_1", 4), sketch.input("tangents_1", 4)
    forward, gradient = sketch.call(aten.neg.default, x), sketch.call(aten.neg.default, tangent)
    sketch.returns(forward, gradient)
    assert backward_nodes(sketch.graph) == {tangent, gradient}


def test_operators_whose_sizes_depend_on_data() -> None:
    found = [node.name for node in rows_above_zero().graph_module.graph.nodes if binds_new_symbols(node)]
    assert found == ["nonzero"]


def test_keys_tell_types_apart() -> None:
    different = [1, 1.0, True, "1", None, 0.0, -0.0, (1,), (1, 2), {"a": 1}, slice(1), torch.float32, torch.strided]
    assert len({argument_key(item) for item in different}) == len(different)
    assert argument_key([1, {"b": 2, "a": 1}]) == argument_key((1, {"a": 1, "b": 2}))
    assert argument_key(torch.device("cpu")) == argument_key(torch.device("cpu"))


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ("L['self'].layers.0", "layers.0"),
        ("L['self']._modules['layers']._modules['0']", "layers.0"),
        ("L['self'].layers[0].mlp", "layers.0.mlp"),
        ("L['run'].__self__.__dict__['_modules']['net'].__dict__['_modules']['model'].layers.0", "net.model.layers.0"),
        ("L['fn'].__closure__.0.cell_contents.head", "head"),
        ("L['self']", ""),
    ],
)
def test_paths(source: str, path: str) -> None:
    sketch = Sketch()
    node = sketch.call(aten.relu.default, sketch.input("x", 4))
    node.meta["nn_module_stack"] = {"outer": ("L['self']", torch.nn.Module), "inner": (source, torch.nn.ReLU)}
    assert module_path(node) == path


def test_a_node_of_the_backward_has_the_module_of_its_forward() -> None:
    sketch = Sketch()
    node = sketch.call(aten.relu.default, sketch.input("x", 4))
    assert module_path(node) == ""
    node.meta["fwd_nn_module_stack"] = {"inner": ("L['self'].head", torch.nn.Linear)}
    assert module_path(node) == "head"
