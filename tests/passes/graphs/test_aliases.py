"""Which memory values lie in: by schema, cautiously, and by the storages of stored values."""

import operator

import torch
from torch.fx import Node

from passes.graphs.aliases import Aliases, find_aliases, find_cautious_aliases, storages, viewed_argument
from tests.passes.capture import Sketch, aten, gpt2, resnet


@torch.library.custom_op("passes_test::opaque", mutates_args=())
def opaque(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@opaque.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def described(aliases: Aliases) -> dict[str, list[str]]:
    """By node the nodes that make the blocks in which its value lies."""
    return {node.name: [aliases.blocks[block].maker.name for block in blocks] for node, blocks in aliases.of.items()}


def views_of(aliases: Aliases) -> list[Node]:
    """The nodes whose values lie in memory that other nodes make."""
    return [node for node, blocks in aliases.of.items() if blocks and not aliases.made_by(node)]


def layers() -> tuple[Sketch, dict[str, Node]]:
    sketch = Sketch()
    x = sketch.input("x", 2, 8)
    norm = sketch.call(aten.native_layer_norm.default, x, [8], None, None, 1e-5)
    value = sketch.call(operator.getitem, norm, 0)
    view = sketch.call(aten.view.default, value, [16])
    unknown = sketch.call(torch.ops.passes_test.opaque.default, view)
    product = sketch.call(aten.mul.Tensor, unknown, view)
    graph = sketch.returns(product).graph
    return sketch, {node.name: node for node in graph.nodes}


def test_by_schema_a_call_makes_memory_unless_it_aliases() -> None:
    _, nodes = layers()
    aliases = find_aliases(nodes["x"].graph)
    assert described(aliases) == {
        "x": ["x"],
        "native_layer_norm": ["native_layer_norm"] * 3,
        "getitem": ["native_layer_norm"],
        "view": ["native_layer_norm"],
        "opaque": ["opaque"],
        "mul": ["mul"],
    }
    assert {node.name for node in views_of(aliases)} == {"getitem", "view"}
    (held,) = aliases.of[nodes["view"]]
    assert aliases.read_by(nodes["mul"]) == (*aliases.of[nodes["opaque"]], held)
    assert [node.name for node in aliases.readers[held]] == ["getitem", "view", "opaque", "mul"]
    assert aliases.last_reader[held] is nodes["mul"]
    assert aliases.made_by(nodes["getitem"]) == ()


def test_cautiously_an_unknown_call_may_return_what_it_reads() -> None:
    _, nodes = layers()
    aliases = find_cautious_aliases(nodes["x"].graph)
    assert described(aliases)["opaque"] == ["native_layer_norm"]
    assert aliases.own_block(nodes["opaque"]) == aliases.own_block(nodes["getitem"])
    assert aliases.own_block(nodes["x"]) is None  # it was there before
    assert aliases.own_block(nodes["mul"]) is not None


def test_calls_that_read_nothing_make_memory() -> None:
    sketch = Sketch()
    order = sketch.call(aten.randperm.default, 4, device="cpu", pin_memory=False)
    rows = sketch.call(aten.full.default, [4, 8], 0.0, dtype=torch.float32, device="cpu", pin_memory=False)
    put = sketch.call(aten.index_put.default, rows, [order], sketch.call(aten.relu.default, sketch.input("x", 4, 8)))
    aliases = find_cautious_aliases(put.graph)
    assert described(aliases)["index_put"] == ["full", "randperm", "relu"]
    assert aliases.own_block(put) is None


def test_a_result_that_is_written_over_an_operand_lies_in_its_memory() -> None:
    _, nodes = layers()
    aliases = find_aliases(nodes["x"].graph, written_over={"mul": "view"})
    assert aliases.of[nodes["mul"]] == aliases.of[nodes["view"]]
    assert aliases.written_over == set(aliases.of[nodes["view"]])


def test_values_that_are_never_held_stand_for_what_they_are_computed_from() -> None:
    _, nodes = layers()
    aliases = find_aliases(nodes["x"].graph, fused=[nodes["opaque"]])
    assert aliases.of[nodes["opaque"]] == aliases.of[nodes["view"]]


def test_in_place_operators_return_their_argument() -> None:
    sketch = Sketch()
    x = sketch.input("x", 4)
    written = sketch.call(aten.relu_.default, x)
    assert viewed_argument(written) is x
    assert viewed_argument(sketch.call(aten.relu.default, x)) is None


def test_what_the_schema_says_is_what_fake_tensors_share() -> None:
    for captured in (gpt2(), resnet()):
        graph = captured.graph_module.graph
        aliases = find_aliases(graph)
        for view in (node for node in views_of(aliases) if node.op == "call_function"):
            (source,) = {viewed_argument(view) or view.args[0]}
            assert storages(view) <= storages(source)


def test_storages_follow_views() -> None:
    sketch = Sketch()
    x = sketch.input("primals_1", 4, 2)
    transposed, product = sketch.call(aten.t.default, x), sketch.call(aten.mul.Tensor, x, 2)
    assert storages(transposed) == storages(x)
    assert storages(product) != storages(x)
