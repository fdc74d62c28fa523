from typing import Any

import pytest
from torch.fx import Graph, Node

from memopt.price.price import is_attention_core, number_blocks
from passes.graphs.node_facts import module_path
from tests.passes.capture import aten, gpt2


def node(target: Any = aten.relu.default, **meta: Any) -> Node:
    made = Graph().call_function(target)
    made.meta.update(meta)
    return made


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ("L['self']", ""),
        ("L['self'].transformer.h.0.attn", "transformer.h.0.attn"),
        ("L['self']._modules['layers']._modules['3'].mlp", "layers.3.mlp"),
        ("L['self'].layers[11].norm", "layers.11.norm"),
        ("L['run'].__self__.layers.0", "layers.0"),
        ("L['run'].__closure__[0].cell_contents.__self__.encoder", "encoder"),
        ("L['run'].__func__.__closure__[12].cell_contents", ""),
        ("G['model'].head", "head"),
    ],
)
def test_paths_are_those_of_named_modules(source: str, path: str) -> None:
    stack = {"outer": ("L['self']", object), "inner": (source, object)}
    assert module_path(node(nn_module_stack=stack)) == path
    assert module_path(node(fwd_nn_module_stack=stack)) == path


def test_without_a_stack() -> None:
    assert module_path(node()) == ""
    assert module_path(node(nn_module_stack={})) == ""


def test_paths_of_a_real_model() -> None:
    paths = {module_path(node) for node in gpt2().graph_module.graph.nodes}
    assert {"transformer.wte", "transformer.h.0.attn", "transformer.h.1.mlp.c_fc", "lm_head"} <= paths
    assert not any("[" in path or "'" in path for path in paths)


def test_blocks_are_the_outermost_list_elements() -> None:
    paths = ["embed", "layers.0.attention", "layers.0.experts.2", "layers.1", "layers.0", "decoder.layers.0.mlp"]
    assert number_blocks(paths) == {
        "layers.0.attention": 0,
        "layers.0.experts.2": 0,
        "layers.1": 1,
        "layers.0": 0,
        "decoder.layers.0.mlp": 2,
    }


def test_attention_cores() -> None:
    assert is_attention_core(node(aten._scaled_dot_product_flash_attention.default), "")
    assert is_attention_core(node(aten._softmax.default), "layers.0.self_attn")
    assert is_attention_core(node(aten.bmm.default), "encoder.Attention")
    assert not is_attention_core(node(aten.addmm.default), "layers.0.self_attn"), "a projection"
    assert not is_attention_core(node(aten.mm.default), "layers.0.self_attn"), "a projection"
    assert not is_attention_core(node(aten._softmax.default), "head")
