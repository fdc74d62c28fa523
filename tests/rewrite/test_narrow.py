import torch
from torch.fx import GraphModule

from memopt.rewrite.narrow import LEAST_BYTES, narrowed
from tests.passes.capture import Sketch, aten

ROWS, WIDTH = LEAST_BYTES // 4, 8


def normalised() -> GraphModule:
    """A norm, a softmax and the logarithm of one, with what their backwards read."""
    sketch = Sketch()
    x, tangent = sketch.input("primals_1", ROWS, WIDTH), sketch.input("tangents_1", ROWS, WIDTH)
    hidden = sketch.call(aten.tanh.default, x)
    rstd = sketch.call(aten.rsqrt.default, sketch.call(aten.mean.dim, hidden, [-1], True))
    likely = sketch.call(aten._softmax.default, hidden, -1, False)
    logs = sketch.call(aten._log_softmax.default, hidden, -1, False)
    gradients = [
        sketch.call(aten.mul.Tensor, tangent, hidden),
        sketch.call(aten.mul.Tensor, tangent, rstd),
        sketch.call(aten._softmax_backward_data.default, tangent, likely, -1, torch.float32),
        sketch.call(aten._log_softmax_backward_data.default, tangent, logs, -1, torch.float32),
    ]
    return sketch.returns(sketch.call(aten.exp.default, likely), *gradients)


def test_products_are_tolerant_exponents_and_statistics_are_not() -> None:
    assert narrowed(normalised().graph, 1) == ("tanh", "_softmax")


def test_what_is_returned_stays_as_it_is() -> None:
    graph_module = normalised()
    output = graph_module.graph.output_node()
    (results,) = output.args
    hidden = next(node for node in graph_module.graph.nodes if node.name == "tanh")
    output.args = ((hidden, *results),)  # type: ignore[misc]
    assert narrowed(graph_module.graph, 2) == ("_softmax",)


def test_one_reader_that_needs_all_bits_is_enough() -> None:
    graph_module = normalised()
    output = graph_module.graph.output_node()
    (results,) = output.args
    named = {node.name: node for node in graph_module.graph.nodes}
    with graph_module.graph.inserting_before(output):
        logs = graph_module.graph.call_function(aten.sub.Tensor, (named["tangents_1"], named["tanh"]))
    logs.meta["val"] = named["tanh"].meta["val"]
    output.args = ((*results, logs),)  # type: ignore[misc]
    assert narrowed(graph_module.graph, 1) == ("_softmax",)
