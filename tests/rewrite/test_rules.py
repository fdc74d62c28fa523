"""The user's rules for dtypes: which pattern matches which node, and which goes first."""

import pytest
import torch

from memopt.rewrite.dtypes import Rules
from tests.passes.capture import Sketch, aten


def softmax(path: str) -> torch.fx.Node:
    sketch = Sketch()
    node = sketch.call(aten.softmax.int, sketch.input("x", 4, 4), -1)
    node.meta["nn_module_stack"] = {path: (f"L['self'].{path}", torch.nn.Softmax)}
    return node


def test_the_closest_pattern_decides() -> None:
    given = {"layers.*": "fp16", "layers.0.attn": "bf16", "aten.softmax": "fp32", "softmax": "fp32", "default": "bf16"}
    node = softmax("layers.0.attn")
    assert Rules.of(given).choose(node) is not None
    by_module = {name: dtype for name, dtype in given.items() if "softmax" not in name}
    assert Rules.of(by_module).choose(node) == ("layers.0.attn", torch.bfloat16)
    assert Rules.of({"layers.*": "fp16"}).choose(node) == ("layers.*", torch.float16)
    assert Rules.of({"lm_head": "fp32"}).choose(node) is None


def test_patterns_that_match_nothing() -> None:
    rules = Rules.of({"lm_head": "fp32", "softmax": "fp32"})
    assert rules.unmatched([softmax("layers.0")]) == ("lm_head",)


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="int7"):
        Rules.of({"softmax": "int7"})
