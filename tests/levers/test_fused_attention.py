"""The decisions on attention that is written out."""

from __future__ import annotations

from torch.fx import GraphModule

from memopt.capture.operators import OperatorGraph
from memopt.levers.fused_ops import fuse_attention
from tests.passes.capture import Sketch, aten


def attentions(*dropouts: float) -> OperatorGraph:
    sketch = Sketch()
    results = []
    for number, dropout in enumerate(dropouts):
        query, key, value = (sketch.input(f"{name}{number}", 2, 4, 8, 16) for name in ("query", "key", "value"))
        turned = sketch.call(aten.transpose.int, key, -2, -1)
        scores = sketch.call(aten.mul.Tensor, sketch.call(aten.matmul.default, query, turned), 0.25)
        weights = sketch.call(aten.softmax.int, scores, -1)
        if dropout:
            weights = sketch.call(aten.dropout.default, weights, dropout, True)
        results.append(sketch.call(aten.matmul.default, weights, value))
    return OperatorGraph(sketch.returns(*results), frozenset())


def called(module: GraphModule) -> list[str]:
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


def test_what_can_be_fused_is_and_the_rest_is_said() -> None:
    graph = attentions(0.0, 0.1)
    decision = fuse_attention(graph)
    after = called(decision.pipeline(graph.module))
    assert after.count("aten.scaled_dot_product_attention.default") == 1
    assert after.count("aten.softmax.int") == 1
    assert list(decision.reasons.values()) == ["fused"]
    assert decision.notes[0] == "fused_attention: 1 of 2 attentions run as one kernel each; equal but for rounding"
    assert decision.notes[1].startswith("fused_attention: some attention is left as it is, since ")


def test_nothing_to_do() -> None:
    decision = fuse_attention(attentions(0.1))
    assert len(decision.pipeline) == 0
    assert decision.pipeline.label == "fused_attention"
    assert len(decision.notes) == 1
