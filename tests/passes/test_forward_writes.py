import random
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch.fx import GraphModule

from passes import ForwardWrites, diff_graphs, format_graph
from passes.forward_writes import _VECTOR
from tests.passes.capture import Sketch, assert_bitwise_equal, aten, capture, dynamic_mlp, gpt2, resnet, with_inputs


def tile(width: int = 8) -> GraphModule:
    """The functional form of `torch.mm(x, weight, out=buffer[:, :width])`; the part is read twice and written again."""
    sketch = Sketch()
    x, weight = sketch.input("x", 4, 2), sketch.input("weight", 2, width)
    buffer = sketch.call(aten.zeros.default, [4, 16])
    part = sketch.call(aten.slice.Tensor, buffer, 1, 0, width)
    written = sketch.call(aten.copy.default, part, sketch.call(aten.mm.default, x, weight))
    buffer = sketch.call(aten.slice_scatter.default, buffer, written, 1, 0, width)
    part = sketch.call(aten.slice.Tensor, buffer, 1, 0, width)
    squares = sketch.call(aten.copy.default, part, sketch.call(aten.mul.Tensor, part, part))
    buffer = sketch.call(aten.slice_scatter.default, buffer, squares, 1, 0, width)
    turned = sketch.call(aten.t.default, sketch.call(aten.slice.Tensor, buffer, 1, 0, width))
    return sketch.returns(sketch.call(aten.mm.default, turned, x))


def test_golden() -> None:
    assert_expected_inline(
        format_graph(ForwardWrites()(tile())),
        """\
input x: f32[4, 2]
input weight: f32[2, 8]
mm: f32[4, 8] = aten.mm(x, weight)
mul: f32[4, 8] = aten.mul.Tensor(mm, mm)
t: f32[8, 4] = aten.t(mul)
mm_1: f32[8, 2] = aten.mm(t, x)
return (mm_1,)""",
    )


def test_the_same_numbers() -> None:
    assert_bitwise_equal(with_inputs(tile()), tile(), ForwardWrites()(tile()))


def test_layouts_behind_it_are_those_of_what_is_read() -> None:
    turned = next(node for node in ForwardWrites()(tile()).graph.nodes if node.name == "t")
    assert turned.meta["val"].stride() == (1, 8)


@pytest.mark.parametrize(
    ("width", "read"),
    [
        (3, aten.mm.default),
        (8, aten.sum.default),
        (8, aten.linalg_vector_norm.default),
        (8, aten.native_layer_norm.default),
    ],
)
def test_a_part_with_gaps_is_read_where_bits_depend_on_them(width: int, read: Any) -> None:
    """Sums run in the order of the memory, and kernels of matrix products take other ways for other rows."""
    sketch = Sketch()
    x, buffer = sketch.input("x", 4, width), sketch.input("buffer", 4, 16)
    whole = sketch.call(aten.slice_scatter.default, buffer, sketch.call(aten.neg.default, x), 1, 0, width)
    part = sketch.call(aten.slice.Tensor, whole, 1, 0, width)
    further = {
        aten.mm.default: [sketch.input("weight", width, 5)],
        aten.native_layer_norm.default: [[width], None, None, 1e-5],
    }
    before = sketch.returns(sketch.call(read, part, *further.get(read, [])))
    after = ForwardWrites()(before)
    (reader,) = after.graph.find_nodes(op="call_function", target=read)
    assert reader.args[0].meta["val"].stride() == (16, 1)


def test_a_part_that_lays_out_a_copy_for_a_sum_stays() -> None:
    """The copy has the strides of the part that it is written to, and the sum runs in their order."""
    sketch = Sketch()
    x, buffer, values = sketch.input("x", 4, 8), sketch.input("buffer", 4, 16), sketch.input("values", 4, 8)
    whole = sketch.call(aten.slice_scatter.default, buffer, sketch.call(aten.neg.default, x), 1, 0, 8)
    part = sketch.call(aten.slice.Tensor, whole, 1, 0, 8)
    before = sketch.returns(sketch.call(aten.sum.default, sketch.call(aten.copy.default, part, values)))
    (reader,) = ForwardWrites()(before).graph.find_nodes(op="call_function", target=aten.sum.default)
    assert reader.args[0].meta["val"].stride() == (16, 1)


@pytest.mark.slow
def test_products_of_aligned_rows_have_the_same_bits_with_and_without_gaps() -> None:
    """The assumption of the pass about the kernels of this machine, with one thread and with several."""
    draws, threads = random.Random(0), torch.get_num_threads()
    try:
        for number in range(400):
            torch.set_num_threads(1 + number % 4)
            rows, width, gap, columns = (
                draws.choice((1, 3, 8, 17, 64, 200)), _VECTOR * draws.randint(1, 80), _VECTOR * draws.randint(1, 80),
                draws.choice((1, 3, 16, 33, 128)),
            )  # fmt: skip
            part = torch.randn(rows, width + gap)[:, :width]
            weight, bias, given = torch.randn(width, columns), torch.randn(columns), torch.randn(rows, columns)
            for product in (
                lambda tile, weight=weight: tile @ weight,
                lambda tile, weight=weight, bias=bias: torch.addmm(bias, tile, weight),
                lambda tile, given=given: tile.t() @ given,
            ):
                assert torch.equal(product(part), product(part.contiguous())), (rows, width, gap, columns)
    finally:
        torch.set_num_threads(threads)


def test_a_sum_written_over_all_of_a_result_is_the_result() -> None:
    sketch = Sketch()
    x, zeros = sketch.input("x", 4, 2), sketch.call(aten.zeros.default, [4, 2])
    part = sketch.call(aten.slice.Tensor, zeros, 0, 0, 4)
    added = sketch.call(aten.add.Tensor, part, x)
    before = sketch.returns(sketch.call(aten.slice_scatter.default, zeros, added, 0, 0, 4))
    after = ForwardWrites()(before)
    assert [node.name for node in after.graph.output_node().all_input_nodes] == ["add"]
    assert_bitwise_equal(with_inputs(before), before, after)


@pytest.mark.parametrize("ranges", [((0, 2), (0, 3)), ((0, 2), (1, 3)), ((1, 3), (1, 4))])
def test_another_part_is_read_where_it_lies(ranges: tuple[tuple[int, int], tuple[int, int]]) -> None:
    written, read = ranges
    sketch = Sketch()
    x, buffer = sketch.input("x", written[1] - written[0], 4), sketch.input("buffer", 5, 4)
    whole = sketch.call(aten.slice_scatter.default, buffer, sketch.call(aten.neg.default, x), 0, *written)
    before = sketch.returns(sketch.call(aten.neg.default, sketch.call(aten.slice.Tensor, whole, 0, *read)))
    assert not diff_graphs(before, ForwardWrites()(before))


def test_copies_that_convert_stay() -> None:
    sketch = Sketch()
    x, low = sketch.input("x", 4), sketch.input("low", 4, dtype=torch.bfloat16)
    row, rows = sketch.input("row", 3), sketch.input("rows", 2, 3)
    rounded = sketch.call(aten.copy.default, low, sketch.call(aten.neg.default, x))
    spread = sketch.call(aten.copy.default, rows, sketch.call(aten.neg.default, row))
    before = sketch.returns(rounded, spread)
    assert not diff_graphs(before, ForwardWrites()(before))


def test_results_of_their_own_stay() -> None:
    """A copy that is returned beside what it is made of, or that is one of an input or of a part of a larger one."""
    sketch = Sketch()
    x, into = sketch.input("x", 4), sketch.input("into", 4)
    neg = sketch.call(aten.neg.default, x)
    part = sketch.call(aten.slice.Tensor, sketch.call(aten.exp.default, sketch.input("long", 8)), 0, 0, 4)
    copies = [sketch.call(aten.copy.default, into, source) for source in (neg, x, part)]
    before = sketch.returns(neg, *copies)
    assert not diff_graphs(before, ForwardWrites()(before))


def test_what_lies_in_an_input_or_in_larger_memory_stays() -> None:
    """An input may be written to later, and a part of something keeps all of it."""
    sketch = Sketch()
    x, into = sketch.input("x", 4), sketch.input("into", 4)
    part = sketch.call(aten.slice.Tensor, sketch.call(aten.exp.default, sketch.input("long", 8)), 0, 0, 4)
    sources = x, sketch.call(aten.view.default, x, [4]), part
    copies = [sketch.call(aten.copy.default, into, source) for source in sources]
    before = sketch.returns(*(sketch.call(aten.neg.default, copied) for copied in copies))
    assert not diff_graphs(before, ForwardWrites()(before))


def test_what_is_written_to_stays() -> None:
    sketch = Sketch()
    copied = sketch.call(
        aten.copy.default, sketch.input("into", 4), sketch.call(aten.neg.default, sketch.input("x", 4))
    )
    sketch.call(aten.add_.Tensor, copied, 1.0)
    before = sketch.returns(sketch.call(aten.exp.default, copied))
    assert not diff_graphs(before, ForwardWrites()(before))


def test_a_source_that_is_laid_out_otherwise_stays() -> None:
    """Sums over other strides could round in another way."""
    sketch = Sketch()
    turned = sketch.call(aten.t.default, sketch.call(aten.neg.default, sketch.input("x", 3, 4)))
    copied = sketch.call(aten.copy.default, sketch.input("into", 4, 3), turned)
    before = sketch.returns(sketch.call(aten.sum.dim_IntList, copied, [0]))
    assert not diff_graphs(before, ForwardWrites()(before))


def test_nothing_written_nothing_done() -> None:
    for captured in (gpt2(), resnet(), dynamic_mlp()):
        assert not diff_graphs(captured.graph_module, ForwardWrites()(captured.graph_module))


class Tiled(torch.nn.Module):
    """Writes a product to a part of a buffer of many rows, as a loss over tiles of the vocabulary does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        buffer = x.new_empty(x.shape[0], 4096)
        part = buffer.narrow(1, 0, 16)
        part.copy_(x @ self.weight)
        return part.exp().log1p().mean()


def test_a_part_of_rows_whose_number_is_a_symbol_is_read_where_it_was_made() -> None:
    captured = capture(Tiled(), torch.randn(24, 8), dynamic=True)
    graph_module = ForwardWrites()(captured.graph_module)
    assert "slice_scatter" in format_graph(captured.graph_module)
    assert "slice_scatter" not in format_graph(graph_module)
    assert_bitwise_equal(captured, captured.graph_module, graph_module)
