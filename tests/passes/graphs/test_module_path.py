"""The module that a node comes from, however tracing writes it."""

import pytest
import torch

from passes.graphs.node_facts import module_path
from tests.passes.capture import Sketch, aten


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
