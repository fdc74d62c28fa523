"""The decisions on activations and norms that are written out."""

from __future__ import annotations

from memopt.capture.operators import OperatorGraph
from memopt.levers.fused_ops import fuse_ops
from tests.passes.capture import Sketch, aten


def formulas(*, root: float = 1.4142135623730951) -> OperatorGraph:
    """A GELU by erf, with `root` for √2, and a layer norm behind it."""
    sketch = Sketch()
    hidden = sketch.input("hidden", 4, 8)
    erf = sketch.call(aten.erf.default, sketch.call(aten.div.Tensor, hidden, root))
    half = sketch.call(aten.mul.Tensor, hidden, 0.5)
    gelu = sketch.call(aten.mul.Tensor, half, sketch.call(aten.add.Tensor, erf, 1.0))
    mean = sketch.call(aten.mean.dim, gelu, [-1], True)
    centred = sketch.call(aten.sub.Tensor, gelu, mean)
    variance = sketch.call(aten.add.Tensor, sketch.call(aten.var.dim, gelu, [-1], False, True), 1e-5)
    normed = sketch.call(aten.mul.Tensor, centred, sketch.call(aten.rsqrt.default, variance))
    return OperatorGraph(sketch.returns(normed), frozenset())


def test_both_are_fused() -> None:
    graph = formulas()
    decision = fuse_ops(graph)
    after = decision.pipeline(graph.module)
    calls = [str(node.target) for node in after.graph.nodes if node.op == "call_function"]
    assert calls == ["aten.gelu.default", "aten.layer_norm.default"]
    assert decision.notes == ("fused_ops: 1 activations and 1 norms run as one kernel each; equal but for rounding",)
    assert set(decision.reasons.values()) == {"fused"}


def test_what_only_looks_like_it_is_left_alone_and_said() -> None:
    decision = fuse_ops(formulas(root=1.5))
    assert [item.name for item in decision.pipeline][:1] == ["FuseNorms"]
    assert any(note.startswith("fused_ops: some formulas are left as they are, since ") for note in decision.notes)


def test_nothing_to_do() -> None:
    sketch = Sketch()
    graph_module = sketch.returns(sketch.call(aten.relu.default, sketch.input("x", 4)))
    decision = fuse_ops(OperatorGraph(graph_module, frozenset()))
    assert (len(decision.pipeline), decision.notes) == (0, ())
