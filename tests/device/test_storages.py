"""Which memory each node of a graph holds: by schema, checked against the fake tensors' own storages."""

import operator
from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch.fx import Graph, GraphModule

from memopt.device.storages import find_storages, is_view, storage_bytes
from memopt.errors import CaptureError
from passes import CANONICAL
from passes.graphs.aliases import storages as fake_storages
from passes.graphs.edit import on_stored_values, refresh
from tests.passes.capture import Captured, Sketch, aten, dynamic_mlp, gpt2, resnet, rows_above_zero


def describe(module: GraphModule) -> str:
    """A line for each node: the storages that it makes, with bytes, and those that it views."""
    found = find_storages(module.graph)
    lines = []
    for node, indices in found.of.items():
        made = [f"{found.bytes[index]} B" for index in found.made_by(node)]
        seen = [found.blocks[index].maker.name for index in dict.fromkeys(indices) if index not in found.made_by(node)]
        lines.append(f"{node.name}: {', '.join(made + [f'in {name}' for name in seen]) or 'nothing'}")
    return "\n".join(lines)


def test_views_share_the_storage_of_what_they_view() -> None:
    sketch = Sketch()
    x = sketch.input("x", 4, 6)
    sin = sketch.call(aten.sin.default, x)
    view = sketch.call(aten.view.default, sin, [24])
    sketch.call(aten._unsafe_view.default, view, [6, 4])
    sketch.call(aten.expand.default, sketch.call(aten.sum.default, sin), [8])
    sketch.call(aten.select.int, sketch.call(aten.t.default, x), 0, 1)
    sketch.call(aten.slice.Tensor, sketch.call(aten.clone.default, sin), 0, 0, 1)
    assert_expected_inline(
        describe(sketch.returns(view)),
        """\
x: 96 B
sin: 96 B
view: in sin
_unsafe_view: in sin
sum_1: 4 B
expand: in sum_1
t: in x
select: in x
clone: 96 B
slice_1: in clone""",
    )


def test_several_results() -> None:
    sketch = Sketch()
    x = sketch.input("x", 2, 8)
    norm = sketch.call(aten.native_layer_norm.default, x, [8], None, None, 1e-5)
    for place in range(3):
        sketch.call(operator.getitem, norm, place)
    halves = sketch.call(aten.split.Tensor, sketch.call(aten.neg.default, x), 4, 1)
    second = sketch.call(operator.getitem, halves, 1)
    weights = (sketch.input("image", 1, 2, 4, 4), sketch.input("kernel", 3, 2, 1, 1))
    given = sketch.input("gradient", 1, 3, 4, 4)
    options = ([3], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, True])
    backward = sketch.call(aten.convolution_backward.default, given, *weights, *options)
    for place in range(3):
        sketch.call(operator.getitem, backward, place)
    assert_expected_inline(
        describe(sketch.returns(second)),
        """\
x: 64 B
native_layer_norm: 64 B, 8 B, 8 B
getitem: in native_layer_norm
getitem_1: in native_layer_norm
getitem_2: in native_layer_norm
neg: 64 B
split: in neg
getitem_3: in neg
image: 128 B
kernel: 24 B
gradient: 192 B
convolution_backward: 24 B, 12 B
getitem_4: nothing
getitem_5: in convolution_backward
getitem_6: in convolution_backward""",
    )


def test_writes_stay_in_the_storage_written_to() -> None:
    sketch = Sketch()
    buffer, x = sketch.input("buffer", 4), sketch.input("x", 4)
    new = sketch.call(aten.add.Tensor, sketch.call(aten.mul.Tensor, buffer, 0.9), x)
    sketch.call(aten.add_.Tensor, new, 1.0)
    epilogue = sketch.call(aten.copy_.default, buffer, new)
    module = sketch.returns(new, epilogue)
    assert_expected_inline(
        describe(module),
        """\
buffer: 16 B
x: 16 B
mul: 16 B
add: 16 B
add_: in add
copy_: in buffer""",
    )
    found = find_storages(module.graph)
    assert [found.blocks[index].maker.name for index in found.read_by(epilogue)] == ["buffer", "add"]


def test_bytes_are_those_of_the_storage() -> None:
    whole = torch.empty(10, 10)
    assert storage_bytes(whole[2:4]) == 400
    assert storage_bytes(torch.empty(1, dtype=torch.int64).expand(100)) == 8
    assert storage_bytes(torch.empty_strided((2, 2), (64, 1), dtype=torch.float16)) == 132


def test_sizes_that_depend_on_data_count_as_the_largest() -> None:
    sketch = Sketch()
    x = sketch.input("x", 6, 2)
    assert storage_bytes(sketch.call(aten.nonzero.default, x).meta["val"]) == 12 * 2 * 8
    with sketch.mode:
        count = x.meta["val"].long().sum().item()
        rows = torch.empty(count, 5)
        with pytest.raises(CaptureError, match=r"the size .* depends on data and has no bound; call torch\._check\("):
            storage_bytes(rows)
        torch._check(count <= 7)
        assert storage_bytes(rows) == 7 * 5 * 4


def assert_agrees_with_fake_tensors(graph: Graph) -> None:
    """Two values share a storage by the schemas exactly if their fake tensors do."""
    found = find_storages(graph)
    nodes = [node for node in found.of if isinstance(node.meta.get("val"), torch.Tensor)]
    ours = {node: found.of[node] for node in nodes}
    for node in nodes:
        (mine,) = ours[node]
        for read in node.all_input_nodes:
            if read in ours:
                shares = bool(fake_storages(node) & fake_storages(read))
                assert shares == (ours[read] == (mine,)), f"{node.name} of {read.name}"
    assert all(found.blocks[found.of[node][0]].maker is not node for node in nodes if is_view(node))


@pytest.mark.parametrize("model", [gpt2, resnet, dynamic_mlp, rows_above_zero])
def test_real_graphs_agree_with_their_fake_tensors(model: Callable[[], Captured]) -> None:
    traced = model().graph_module
    assert_agrees_with_fake_tensors(traced.graph)
    canonical = CANONICAL(traced).graph
    with on_stored_values(canonical):
        for node in canonical.nodes:
            if is_view(node):  # a view of a value that was merged with another has the storage that it had before
                refresh(node)
    assert_agrees_with_fake_tensors(canonical)


def test_a_result_over_an_operand_is_in_its_memory() -> None:
    sketch = Sketch()
    x = sketch.input("x", 4, 6)
    mm = sketch.call(aten.mm.default, x, sketch.call(aten.t.default, x))
    mul = sketch.call(aten.mul.Tensor, sketch.call(aten.view.default, mm, [16]), 2.0)
    found = find_storages(sketch.returns(mul).graph, reuses=[("mul", "view")])
    assert found.of[mul] == found.of[mm]
    assert not found.made_by(mul)
    assert len(found.blocks) == 2
