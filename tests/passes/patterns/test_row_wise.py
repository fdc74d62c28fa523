"""Operators on some rows after the others give the rows that they give at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

from passes.patterns.row_wise import _RULES, RowsPlace, moved_place, row_operands, row_result
from passes.tile_rows import with_rows
from tests.passes.capture import Sketch, aten

Rows = set[tuple[int, ...]]


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    made = torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape)
    return (made % 7 % 3).to(dtype) if dtype == torch.int64 else torch.sin(made.to(dtype))


def first(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else value[0]


def parts_of(value: Any, start: int, rows: int, place: RowsPlace) -> Any:
    """The rows from `start` on, of a tensor or of each in a tuple."""
    if not isinstance(value, torch.Tensor):
        return [parts_of(one, start, rows, place) for one in value]
    return value.narrow(place.dim, start * place.inner, rows * place.inner)


def rows_of(target: Callable[..., Any], *args: Any, **kwargs: Any) -> set[int]:
    """The dimensions of a call's result along which it is known to treat rows apart; checks each of them."""
    sketch = Sketch()
    names: dict[Any, torch.Tensor] = {}

    def node(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            made = sketch.input(f"input_{len(names)}", *value.shape, dtype=value.dtype)
            names[made] = value
            return made
        return [node(one) for one in value] if isinstance(value, list) else value

    call = sketch.call(target, *map(node, args), **{name: node(value) for name, value in kwargs.items()})
    expected = target(*args, **kwargs)
    found = set()
    for dim in range(first(expected).dim()):
        count, place = first(expected).shape[dim], RowsPlace(dim)
        operands = row_operands(call, place)
        if operands is None or count < 2 or all(at is None for _, at in operands):
            continue
        if any(at is not None and at.outer > 1 for _, at in operands):
            continue
        found.add(dim)
        places = dict(operands)
        for start, rows in ((0, count // 2), (count // 2, count - count // 2)):

            def read(source: Any, start: int = start, rows: int = rows, places: Any = places) -> Any:
                at = places[source]
                return names[source] if at is None else parts_of(names[source], start, rows, at)

            given, options = torch.fx.map_arg(
                (with_rows(call, place, lambda size, _, rows=rows, count=count: size * rows // count), call.kwargs),
                read,
            )
            torch.testing.assert_close(target(*given, **options), parts_of(expected, start, rows, place))
    return found


X, W, M = numbers(4, 6, 8), numbers(5, 8), numbers(4, 8, 6)
INDEX = numbers(4, 6, 8, dtype=torch.int64)
KNOWN: list[tuple[Any, tuple[Any, ...], set[int]]] = [
    (aten.add.Tensor, (X, numbers(6, 1)), {0, 1, 2}),
    (aten.squeeze.dim, (X, 0), {1, 2}),  # which a tile of one row would lose
    (aten.where.self, (X > 0, X, numbers(8)), {0, 1, 2}),
    (aten.masked_fill.Scalar, (X, numbers(4, 1, 8) > 0, 2.0), {0, 1, 2}),
    (aten.gelu.default, (X,), {0, 1, 2}),
    (aten.to.dtype, (X, torch.bfloat16), {0, 1, 2}),
    (aten.zeros_like.default, (X,), {0, 1, 2}),
    (aten.dropout.default, (X, 0.0, True), {0, 1, 2}),
    (aten.linear.default, (X, W, numbers(5)), {0, 1}),
    (aten.mm.default, (X[0], W.t().contiguous()), {0, 1}),
    (aten.addmm.default, (numbers(6, 5), X[0], W.t().contiguous()), {0, 1}),
    (aten.addmm.default, (numbers(5), X[0], W.t().contiguous()), {0, 1}),
    (aten.bmm.default, (X, M), {0, 1, 2}),
    (aten.baddbmm.default, (numbers(6, 6), X, M), {0, 1, 2}),
    (aten.matmul.default, (numbers(3, 1, 6, 8), M), {0, 1, 2, 3}),
    (aten.matmul.default, (X, numbers(8)), {0, 1}),
    (aten.einsum.default, ("bth,oh->bot", [X, W]), {0, 1, 2}),
    (aten.layer_norm.default, (X, [8], numbers(8), numbers(8)), {0, 1}),
    (aten.rms_norm.default, (X, [6, 8]), {0}),
    (aten.group_norm.default, (X, 3), {0}),
    (aten.softmax.int, (X, 1), {0, 2}),
    (aten.log_softmax.int, (X, -1), {0, 1}),
    (aten.cumsum.default, (X, 0), {1, 2}),
    (aten.topk.default, (X, 2, -1), {0, 1}),
    (aten.glu.default, (X, 1), {0, 2}),
    (aten.split.Tensor, (X, 2, 1), {0, 2}),
    (aten.chunk.default, (X, 2, -1), {0, 1}),
    (aten.repeat_interleave.self_int, (X, 2, 1), {0, 2}),
    (aten.flip.default, (X, [1]), {0, 2}),
    (aten.roll.default, (X, [1], [0]), {1, 2}),
    (aten.sum.dim_IntList, (X, [1]), {0, 1}),
    (aten.mean.dim, (X, [-1], True), {0, 1}),
    (aten.max.dim, (X, 0), {0, 1}),
    (aten.var.correction, (X, [0]), {0, 1}),
    (aten.linalg_vector_norm.default, (X, 2, [-1], True), {0, 1}),
    (aten.select.int, (X, 1, 3), {0, 1}),
    (aten.unbind.int, (X, 1), {0, 1}),
    (aten.squeeze.dim, (X[:, :1], 1), {0, 1}),
    (aten.unsqueeze.default, (X, 1), {0, 2, 3}),
    (aten.slice.Tensor, (X, 2, 0, 4), {0, 1}),
    (aten.slice.Tensor, (X, 1, 0, 6), {0, 1, 2}),
    (aten.transpose.int, (X, 0, 2), {0, 1, 2}),
    (aten.permute.default, (X, [2, 0, 1]), {0, 1, 2}),
    (aten.t.default, (W,), {0, 1}),
    (aten.view.default, (X, [4, 6, 2, 4]), {0, 1, 2}),
    (aten.view.default, (X, [24, 8]), {1}),
    (aten.reshape.default, (X, [4, -1]), {0}),
    (aten.unflatten.int, (X, 2, [2, 4]), {0, 1, 2}),
    (aten.flatten.using_ints, (X, 1), {0}),
    (aten.expand.default, (numbers(4, 1, 8), [4, 6, 8]), {0, 2}),
    (aten.cat.default, ([X, X], 1), {0, 2}),
    (aten.stack.default, ([X, X], 1), {0, 2, 3}),
    (aten.pad.default, (X, [1, 1]), {0, 1}),
    (aten.tril.default, (X,), {0}),
    (aten.gather.default, (X, 1, INDEX), {0, 2}),
    (aten.scatter.value, (X, 1, INDEX, 1.0), {0, 2}),
    (aten.scaled_dot_product_attention.default, (X, X, X, numbers(6, 6)), {0}),
]


@pytest.mark.parametrize(
    ("target", "args", "dims"), KNOWN, ids=[f"{number}-{target}" for number, (target, _, _) in enumerate(KNOWN)]
)
def test_rows_apart_are_those_at_once(target: Any, args: tuple[Any, ...], dims: set[int]) -> None:
    assert rows_of(target, *args) == dims


MIX = [
    (aten.sum.default, (X,)),
    (aten.dropout.default, (X, 0.5, True)),
    (aten.relu_.default, (X.clone(),)),
    (aten.embedding.default, (W, INDEX)),
    (aten.prelu.default, (numbers(2, 6, 6), numbers(6))),
    (aten.bucketize.Tensor, (X, numbers(6).sort().values)),
    (aten.scaled_dot_product_attention.default, (X, X, X, None, 0.5)),
    (aten.batch_norm.default, (X, None, None, None, None, True, 0.1, 1e-5, False)),
]


@pytest.mark.parametrize(("target", "args"), MIX, ids=[str(target) for target, _ in MIX])
def test_others_mix_rows(target: Any, args: tuple[Any, ...]) -> None:
    assert rows_of(target, *args) == set()


def elementwise() -> list[Any]:
    return [one for one in op_db if hasattr(one.aten_name, "lower") and _overload(one.aten_name) is not None]


def _overload(name: str) -> Any:
    packet = getattr(aten, name, None)
    overloads = [getattr(packet, one) for one in packet.overloads()] if packet is not None else []
    overloads = [one for one in overloads if "Tensor" in str(one._schema.returns) and not one._schema.is_mutable]
    tagged = [one for one in overloads if torch.Tag.pointwise in one.tags]
    return tagged[0] if tagged else None


@pytest.mark.parametrize("info", elementwise(), ids=lambda info: info.name)
def test_samples_of_elementwise_operators(info: Any) -> None:
    """OpInfo's own samples, as far as the operator's first overload that is elementwise takes them."""
    if torch.float32 not in info.dtypes:
        pytest.skip("no fp32")
    checked = 0
    for sample in info.sample_inputs("cpu", torch.float32):
        try:
            _overload(info.aten_name)(sample.input, *sample.args, **sample.kwargs)
        except (RuntimeError, TypeError, ValueError, NotImplementedError):
            continue
        if all(isinstance(value, (torch.Tensor, int, float)) for value in (sample.input, *sample.args)):
            rows_of(_overload(info.aten_name), sample.input, *sample.args, **sample.kwargs)
            checked += 1
        if checked == 5:
            break


def test_rows_that_a_view_merges_with_others() -> None:
    assert moved_place((2, 6, 8), (12, 8), RowsPlace(1)) == RowsPlace(0, outer=2)
    assert moved_place((12, 8), (2, 6, 8), RowsPlace(0, outer=2)) == RowsPlace(1)
    assert moved_place((6, 2, 8), (12, 8), RowsPlace(0)) == RowsPlace(0, inner=2)
    assert moved_place((1, 6, 8), (6, 2, 4), RowsPlace(1)) == RowsPlace(0)
    assert moved_place((6, 8), (2, 3, 8), RowsPlace(0)) is None


def test_every_rule_is_tried() -> None:
    tried = {target.overloadpacket.__name__ for target, *_ in KNOWN}
    kin = {"_softmax", "_log_softmax", "_unsafe_view", "concat", "constant_pad_nd", "triu", "mT", "swapaxes",
           "swapdims", "sort", "argsort", "split_with_sizes", "unsafe_split", "unsafe_chunk", "cumprod", "amax",
           "amin", "min", "argmax", "argmin", "logsumexp", "std", "any", "all", "mean", "sum"}  # fmt: skip
    assert set(_RULES) <= tried | kin


def test_a_result_takes_the_place_of_its_operand() -> None:
    sketch = Sketch()
    x = sketch.input("x", 6, 8)
    turned = sketch.call(aten.t.default, x)
    assert row_result(turned, x, RowsPlace(0)) == (RowsPlace(1), ((x, RowsPlace(0)),))
    assert row_result(sketch.call(aten.mm.default, x, turned), x, RowsPlace(1)) is None
