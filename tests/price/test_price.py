"""The problem of a joint graph: what its ops read and make, what is kept or resident, which ops may be recomputed."""

import operator

import torch
from expecttest import assert_expected_inline
from torch.fx import Graph, Node

from memopt.device import CPU
from memopt.price.price import is_scheduled, price, split_halves
from memopt.price.priced_graph import GraphUse, NodePrice, PricedGraph
from memopt.solver import RematProblem
from memopt.solver.problem import BlockCall
from passes import CANONICAL, find_reuses
from passes.graphs.node_facts import backward_nodes
from tests.passes.capture import Sketch, aten, resnet, rows_above_zero

ONE = NodePrice(1.0, 0)


def describe(problem: RematProblem) -> str:
    """A line for each op: what it makes (`!` for kept storages), what it reads, and whether it may be recomputed."""
    lines = []
    for index, op in enumerate(problem.ops):
        made = [f"{problem.storages[s].bytes} B{'!' if problem.storages[s].kept else ''}" for s in op.makes]
        reads = [problem.storages[s].name for s in op.reads]
        lines += ["---"] if index == problem.forward_ops else []
        again = "again" if op.recomputable else "once"
        workspace = f", workspace {op.workspace_bytes} B" if op.workspace_bytes else ""
        lines.append(f"{op.name}({', '.join(reads)}) -> {', '.join(made) or 'nothing'}; {again}{workspace}")
    return "\n".join(lines)


def sketch_layer() -> Sketch:
    """relu(x @ weight + bias), its sum, and gradients of weight and bias."""
    sketch = Sketch()
    weight, bias = sketch.input("primals_1", 3, 5), sketch.input("primals_2", 5)
    x, tangent = sketch.input("primals_3", 4, 3), sketch.input("tangents_1")
    relu = sketch.call(aten.relu.default, sketch.call(aten.addmm.default, bias, x, weight))
    loss = sketch.call(aten.sum.default, sketch.call(aten.view.default, relu, [20]))
    spread = sketch.call(aten.expand.default, tangent, [4, 5])
    gradient = sketch.call(aten.threshold_backward.default, spread, relu, 0)
    weights = sketch.call(aten.mm.default, sketch.call(aten.t.default, x), gradient)
    biases = sketch.call(aten.view.default, sketch.call(aten.sum.dim_IntList, gradient, [0], True), [5])
    sketch.returns(loss, weights, biases, None)
    return sketch


def priced(graph: Graph, forward_outputs: int = 1, **options: object) -> PricedGraph:
    return price(torch.fx.GraphModule({}, graph), forward_outputs, lambda _: ONE, GraphUse(**options))


def test_golden() -> None:
    made = priced(sketch_layer().graph)
    assert_expected_inline(
        describe(made.problem),
        """\
addmm() -> 80 B; again
relu(addmm) -> 80 B; again
sum_1(relu) -> 4 B!; again
---
tangents_1() -> 4 B!; once
threshold_backward(tangents_1, relu) -> 80 B; once
mm(threshold_backward) -> 60 B!; once
sum_2(threshold_backward) -> 20 B!; once
hand_over_gradients() -> nothing; once""",
    )
    assert made.nodes == ("addmm", "relu", "sum_1", "", "threshold_backward", "mm", "sum_2", "")


def sketch_written_over() -> tuple[torch.fx.GraphModule, tuple[tuple[str, str], ...]]:
    """The gradient of sum(relu(x)), which is written over a product, and that reuse."""
    sketch = Sketch()
    x, tangent = sketch.input("primals_1", 4, 4), sketch.input("tangents_1")
    relu = sketch.call(aten.relu.default, x)
    loss = sketch.call(aten.sum.default, relu)
    spread = sketch.call(aten.mul.Tensor, sketch.call(aten.expand.default, tangent, [4, 4]), 2.0)
    gradient = sketch.call(aten.threshold_backward.default, spread, relu, 0)
    graph = sketch.returns(loss, gradient)
    reuses = find_reuses(graph, backward_nodes(graph.graph))
    assert reuses == (("threshold_backward", "mul"),)
    return graph, reuses


def test_a_result_over_an_operand_makes_nothing() -> None:
    """Nor can that memory be offloaded, since the next result is written into it."""
    graph, reuses = sketch_written_over()
    problem = priced(graph.graph, reuses=reuses).problem
    over = next(op for op in problem.ops if op.name == "threshold_backward")
    assert not over.makes
    assert [(storage.name, storage.kept, storage.movable) for storage in problem.storages] == [
        ("relu", False, True), ("sum_1", True, True), ("tangents_1", True, False), ("mul", True, False),
    ]  # fmt: skip


def test_a_result_over_an_operand_has_no_block_of_its_own() -> None:
    """Of the calls that a run of the operator alone shows, those of its workspace are left. The result's block was
    taken for a part of that, which nothing frees: plans without a chunked loss were predicted 25% too high."""
    graph, reuses = sketch_written_over()
    within = (BlockCall(True, 1, 4096), BlockCall(True, 0, 64), BlockCall(False, 1, 4096))

    def price_of(node: Node) -> NodePrice:
        return NodePrice(1.0, 4096, calls=within if node.name == "threshold_backward" else ())

    problem = price(graph, 1, price_of, GraphUse(reuses=reuses)).problem
    over = next(op for op in problem.ops if op.name == "threshold_backward")
    assert over.calls == (BlockCall(True, 0, 4096), BlockCall(False, 0, 4096))
    alone = next(op for op in price(graph, 1, price_of).problem.ops if op.name == "threshold_backward")
    assert alone.calls == within


def test_accumulated_gradients_are_not_kept() -> None:
    kept = [s.name for s in priced(sketch_layer().graph, accumulated=[1]).problem.storages if s.kept]
    assert kept == ["sum_1", "tangents_1", "sum_2"]


def test_prices_are_those_of_the_nodes() -> None:
    def price_of(node: Node) -> NodePrice:
        return NodePrice(len(node.name), 100, output_bytes=96 if node.name == "relu" else 0)

    problem = price(torch.fx.GraphModule({}, sketch_layer().graph), 1, price_of).problem
    assert [op.seconds for op in problem.ops] == [5, 4, 5, 0, 18, 2, 5, 0]
    assert [op.workspace_bytes for op in problem.ops] == [100, 100, 100, 0, 100, 100, 100, 0]
    assert {s.name: s.bytes for s in problem.storages}["relu"] == 96, "as measured: 16 B more than its shape says"


def test_gradients_of_other_strides_are_copied_at_the_end() -> None:
    sketch = Sketch()
    weight, tangent = sketch.input("primals_1", 3, 5), sketch.input("tangents_1", 5, 3)
    gradient = sketch.call(aten.t.default, sketch.call(aten.neg.default, tangent))
    sketch.returns(sketch.call(aten.t.default, sketch.call(aten.exp.default, weight)), gradient)
    assert priced(sketch.graph).problem.ops[-1].workspace_bytes == 15 * 4


def recomputable(graph: Graph) -> dict[str, bool]:
    made = priced(graph)
    return {node: op.recomputable for node, op in zip(made.nodes, made.problem.ops, strict=True) if node}


def test_readers_of_written_buffers_are_evaluated_once() -> None:
    sketch = Sketch()
    buffer, x = sketch.input("primals_1", 4), sketch.input("primals_2", 4)
    read = sketch.call(aten.mul.Tensor, sketch.call(aten.view.default, buffer, [4]), x)
    squared = sketch.call(aten.mul.Tensor, read, read)
    new = sketch.call(aten.add.Tensor, buffer, 1.0)
    sketch.call(aten.copy_.default, buffer, new)
    sketch.returns(squared)
    assert recomputable(sketch.graph) == {"mul": False, "mul_1": True, "add": False, "copy_": False}


def test_batch_norm_in_training_does_not_depend_on_the_statistics_it_writes() -> None:
    module = CANONICAL(resnet().graph_module)
    names = {name for name, again in recomputable(module.graph).items() if again}
    assert {"_native_batch_norm_legit_functional", "_native_batch_norm_legit_functional_3"} <= names
    assert not names & {"add", "add_1", "copy_", "copy__1"}
    # In evaluation they are what is read.
    for node in module.graph.nodes:
        if node.target is aten._native_batch_norm_legit_functional.default:
            node.args = (*node.args[:5], False, *node.args[6:])
    assert not any(again for name, again in recomputable(module.graph).items() if "batch_norm" in name)


def test_random_ops_are_repeated_from_a_state_that_is_kept() -> None:
    sketch = Sketch()
    x, tangent = sketch.input("primals_1", 8), sketch.input("tangents_1", 8)
    dropout = sketch.call(aten.native_dropout.default, x, 0.5, True)
    kept, mask = (sketch.call(operator.getitem, dropout, place) for place in (0, 1))
    sketch.returns(kept, sketch.call(aten.mul.Tensor, mask, tangent))
    assert_expected_inline(
        describe(priced(sketch.graph).problem),
        """\
native_dropout_state() -> 5056 B; once
native_dropout(native_dropout_state) -> 32 B!, 8 B; again, workspace 5056 B
---
tangents_1() -> 32 B!; once
mul(native_dropout, tangents_1) -> 32 B!; once
hand_over_gradients() -> nothing; once""",
    )
    assert torch.get_rng_state().nbytes == CPU.generator_state_bytes


def test_sizes_that_depend_on_data_bind_once() -> None:
    module = CANONICAL(rows_above_zero().graph_module)
    again = recomputable(module.graph)
    assert not again["nonzero"]
    assert again["index"]
    assert again["addmm"]


def test_halves() -> None:
    module = CANONICAL(resnet().graph_module)
    forward, backward = ([node.name for node in half] for half in split_halves(module.graph))
    assert forward[-2:] == ["copy__10", "copy__11"], "buffers are written by the forward"
    assert backward[:2] == ["_log_softmax_backward_data", "mm"]
    scheduled = {node.name for node in module.graph.nodes if is_scheduled(node)}
    assert scheduled == {*forward, *backward}
    assert not scheduled & {"primals_1", "getitem", "view", "t", "output"}


def test_blocks_and_modules() -> None:
    module = CANONICAL(resnet().graph_module)
    made = price(module, 1, lambda _: ONE)
    of = dict(zip(made.nodes, zip(made.modules, made.problem.ops, strict=True), strict=True))
    assert_expected_inline(
        "\n".join(f"{name}: {of[name][0]}, block {of[name][1].block}" for name in ("convolution", "relu_1", "addmm")),
        """\
convolution: 0.0, block 0
relu_1: 0.1, block 0
addmm: 1, block 1""",
    )
