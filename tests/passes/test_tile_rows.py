"""Segments of a graph in tiles: the operators stay the same, on fewer rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.fx import GraphModule

from passes import EliminateDeadCode, PassError, RowSegment, TileRows, diff_graphs, find_row_segments, format_graph
from passes.patterns.row_wise import RowsPlace
from tests.marks import slow
from tests.passes.capture import Sketch, aten
from tests.passes.operators import Operators, assert_same_gradients, capture_operators

F = torch.nn.functional
Tensor = torch.Tensor


def segments(graph: GraphModule, tiles: int) -> tuple[RowSegment, ...]:
    """Matrices are parameters."""
    given = graph.graph.find_nodes(op="placeholder")
    values = [node.meta["val"] for node in given]
    matrices = {number for number, value in enumerate(values) if isinstance(value, Tensor) and value.dim() == 2}
    return find_row_segments(graph, tiles, matrices)


def mlp(x: Tensor, weight: Tensor, back: Tensor) -> Tensor:
    return x + F.linear(F.gelu(F.linear(x, weight)), back)


def conv1d(x: Tensor, weight: Tensor, back: Tensor) -> Tensor:
    """GPT-2's: samples and tokens are one dimension in between."""
    rows = F.layer_norm(x, x.shape[-1:], back[:, 0])
    hidden = torch.addmm(weight[:, 0], rows.view(-1, rows.shape[-1]), weight.t()).view(*x.shape[:2], -1)
    return F.gelu(hidden).relu() @ back.t()


def heads(x: Tensor, weight: Tensor, back: Tensor) -> Tensor:
    """Attention's inputs: rows in the third dimension, in memory of another order, and a view of a product."""
    hidden = F.linear(F.gelu(F.linear(x, weight)).exp().sin(), back)
    query = hidden.view(*x.shape[:2], 2, -1).transpose(1, 2)
    return F.scaled_dot_product_attention(query * 2.0, query.neg(), query, is_causal=True)


def eager_attention(x: Tensor, weight: Tensor, back: Tensor) -> Tensor:
    """The rows are those of the queries; keys and values are read by all."""
    scores = F.linear(x, weight[:8]) @ x.transpose(1, 2)
    return (scores + torch.ones(x.shape[1], x.shape[1]).tril()).softmax(-1).exp().log().softmax(-1) @ x


def branches(x: Tensor, weight: Tensor, back: Tensor) -> Tensor:
    """Two calls that could each begin a segment with what follows."""
    both = torch.cat([F.gelu(F.linear(x, weight)), F.linear(x, weight).sin()], -1)
    return F.linear(both, torch.cat([back, back], 1))


def low(x: Tensor, weight: Tensor, back: Tensor) -> Tensor:
    weight, back = weight.to(torch.bfloat16), back.to(torch.bfloat16)
    return x + F.linear(F.gelu(F.linear(x.to(torch.bfloat16), weight)), back)


FORMS: dict[str, Callable[..., Tensor]] = {
    "mlp": mlp, "conv1d": conv1d, "heads": heads, "eager attention": eager_attention, "branches": branches, "low": low
}  # fmt: skip


def captured(form: Callable[..., Tensor]) -> Operators:
    torch.manual_seed(0)
    given = [(torch.randn(shape) / 4).requires_grad_() for shape in ((2, 13, 8), (64, 8), (8, 64))]
    return capture_operators(lambda *tensors: form(*tensors).float().square().sum(), *given)


def in_tiles(operators: Operators, tiles: int) -> GraphModule:
    return TileRows(segments(operators.graph_module, tiles), tiles)(operators.graph_module)


@pytest.mark.parametrize("tiles", [2, 4, 13])
@pytest.mark.parametrize("name", FORMS)
def test_loss_and_gradients_are_those_of_the_whole(name: str, tiles: int) -> None:
    before = captured(FORMS[name])
    after = in_tiles(before, tiles)
    assert sum("tile" in node.name for node in after.graph.nodes) > tiles
    assert_same_gradients(before.graph_module, after, before.inputs, 2e-2 if name == "low" else 1e-6)


@pytest.mark.parametrize("name", [name if name in ("mlp", "heads") else slow(name) for name in FORMS])
def test_rows_whose_number_is_a_symbol(name: str) -> None:
    """The graph is captured with 13 rows in two samples, and right for other numbers that are enough for the tiles."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape) / 4) for shape in ((64, 8), (8, 64))]
    before = capture_operators(
        lambda x: FORMS[name](x, *weights).float().square().sum(), torch.randn(2, 13, 8), dynamic=True
    )
    after = in_tiles(before, 4)
    assert sum("tile" in node.name for node in after.graph.nodes) > 4
    for samples, rows in ((2, 13), (3, 12), (2, 41), (2, 5), (5, 4)):
        x = torch.randn(samples, rows, 8)
        given = before.graph_module.graph.find_nodes(op="placeholder")
        sizes = {"2": samples, "13": rows}
        inputs = [
            sizes[str(node.meta["val"].node.hint)] if isinstance(node.meta["val"], torch.SymInt) else value
            for node, value in zip(given, before.inputs, strict=True)
        ]
        inputs = [x if isinstance(value, Tensor) and value.dim() == 3 else value for value in inputs]
        assert_same_gradients(before.graph_module, after, inputs, 2e-2 if name == "low" else 1e-6)


@pytest.mark.parametrize(("heads", "shared", "samples", "masked"), [
    (8, 8, 2, ""), (8, 2, 2, "causal"), (6, 1, 1, "one mask"), (8, 4, 2, "each head"), (6, 3, 2, "for keys"),
])  # fmt: skip
def test_attention_in_tiles_of_heads(heads: int, shared: int, samples: int, masked: str) -> None:
    """Keys and values may be shared by heads; in memory, heads lie behind tokens."""
    torch.manual_seed(0)
    weights = [(torch.randn(8, 4 * count) / 2).requires_grad_() for count in (heads, shared, shared)]
    masks = {"one mask": (5, 5), "each head": (1, heads, 5, 5), "for keys": (samples, 1, 1, 5)}
    mask = torch.randn(masks[masked]) if masked in masks else None

    def form(x: Tensor, *matrices: Tensor) -> Tensor:
        query, key, value = ((x @ one).view(samples, 5, -1, 4).transpose(1, 2) for one in matrices)
        found = F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=masked == "causal", scale=0.7, enable_gqa=heads > shared
        )
        return found.transpose(1, 2).flatten(2).square().sum()

    before = capture_operators(form, torch.randn(samples, 5, 8), *weights)
    (segment,) = segments(before.graph_module, 4)
    assert segment.rows == (heads if shared == 1 else shared)
    assert segment.tiles(4) == {6: 3, 8: min(4, shared)}[heads]
    after = TileRows((segment,), 4)(before.graph_module)
    calls = [node for node in after.graph.nodes if node.target == aten.scaled_dot_product_attention.default]
    assert len(calls) == segment.tiles(4)
    assert_same_gradients(before.graph_module, after, before.inputs, 1e-6)


def test_attention_with_dropout_stays_whole() -> None:
    def form(x: Tensor, weight: Tensor) -> Tensor:
        query = (x @ weight).view(2, 5, 4, 4).transpose(1, 2)
        return F.scaled_dot_product_attention(query, query, query, dropout_p=0.1)

    assert segments(capture_operators(form, torch.randn(2, 5, 8), torch.randn(8, 16)).graph_module, 4) == ()


def test_text() -> None:
    sketch = Sketch()
    x, weight, back = sketch.input("x", 6, 4), sketch.input("weight", 16, 4), sketch.input("back", 4, 16)
    gelu = sketch.call(aten.gelu.default, sketch.call(aten.linear.default, x, weight))
    graph = sketch.returns(sketch.call(aten.linear.default, gelu, back))
    (segment,) = find_row_segments(graph, 2, {1, 2})
    assert str(segment) == "linear to linear_1: 3 calls on 6 rows"
    assert_expected_inline(
        format_graph(TileRows((segment,), 2)(graph).graph),
        """\
input x: f32[6, 4]
input weight: f32[16, 4]
input back: f32[4, 16]
split_with_sizes: (f32[3, 4], f32[3, 4]) = aten.split_with_sizes(x, [3, 3], 0)
getitem: f32[3, 4] = split_with_sizes[0]
getitem_1: f32[3, 4] = split_with_sizes[1]
linear_tile_0: f32[3, 16] = aten.linear(getitem, weight)
gelu_tile_0: f32[3, 16] = aten.gelu(linear_tile_0)
linear_1_tile_0: f32[3, 4] = aten.linear(gelu_tile_0, back)
linear_tile_1: f32[3, 16] = aten.linear(getitem_1, weight)
gelu_tile_1: f32[3, 16] = aten.gelu(linear_tile_1)
linear_1_tile_1: f32[3, 4] = aten.linear(gelu_tile_1, back)
cat: f32[6, 4] = aten.cat([linear_1_tile_0, linear_1_tile_1], 0)
return (cat,)""",
    )


def test_a_tile_casts_a_weight_itself() -> None:
    """So that its gradients are summed in fp32: the casts are merged once the graph is differentiated."""
    after = EliminateDeadCode()(in_tiles(captured(low), 4))
    weights = [node for node in after.graph.find_nodes(op="placeholder") if node.meta["val"].dim() == 2]
    assert [sum(user.target == aten.to.dtype for user in weight.users) for weight in weights] == [4, 4]


def test_what_is_written_to_is_no_part() -> None:
    def form(x: Tensor, weight: Tensor, back: Tensor) -> Tensor:
        return x + F.linear(F.linear(x, weight).relu_(), back)

    assert segments(captured(form).graph_module, 2) == ()


def test_little_inside_stays() -> None:
    def form(x: Tensor, weight: Tensor, back: Tensor) -> Tensor:
        return F.linear(x, weight)

    before = captured(form).graph_module
    assert segments(before, 2) == ()
    assert not diff_graphs(before, TileRows((), 2)(before))


def test_wrong_segments_are_refused() -> None:
    before = captured(mlp).graph_module
    (segment,) = segments(before, 2)
    with pytest.raises(PassError, match="2 rows cannot make 14 tiles"):
        TileRows((segment,), 14)(before)
    (name, _), *others = segment.members
    wrong = replace(segment, members=((name, RowsPlace(2)), *others))
    with pytest.raises(PassError, match=f"node {name}: a row of its result may depend on other rows of its inputs"):
        TileRows((wrong,), 2)(before)
