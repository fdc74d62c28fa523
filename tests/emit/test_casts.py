from __future__ import annotations

import torch

from memopt.emit.inductor import spell_casts
from passes import format_graph
from tests.passes.capture import Sketch, aten


def test_only_casts_without_a_device_are_replaced() -> None:
    sketch = Sketch()
    x = sketch.input("x", 4)
    low = sketch.call(aten._to_copy.default, x, dtype=torch.bfloat16)
    moved = sketch.call(aten._to_copy.default, x, dtype=torch.bfloat16, device=torch.device("cpu"))
    module = sketch.returns(low, moved)
    value = torch.randn(4)
    before = module(value)
    spell_casts(module)
    text = format_graph(module.graph)
    assert text.count("prims.convert_element_type") == text.count("_to_copy(") == 1
    assert torch.equal(module(value)[0], before[0])
