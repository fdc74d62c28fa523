"""Calls as keys: equal for equal shapes, strides and dtypes, and able to make arguments of their kind."""

from __future__ import annotations

import torch

from memopt.device.op_call import TensorSpec, describe, tensors_in

aten = torch.ops.aten


def test_bytes_of_expanded_and_gapped_tensors() -> None:
    expanded = TensorSpec((4, 8), (0, 1), torch.float32)
    gapped = TensorSpec((4, 8), (16, 1), torch.float32)
    assert (expanded.bytes, expanded.dense_bytes) == (32, 128)
    assert (gapped.bytes, gapped.dense_bytes) == ((3 * 16 + 8) * 4, 128)
    assert TensorSpec((0, 8), (8, 1), torch.float32).bytes == 0
    assert [spec.contiguous for spec in (expanded, gapped, TensorSpec((1, 8), (99, 1), torch.float32))] == [
        False, False, True,
    ]  # fmt: skip


def test_calls_are_equal_where_the_kinds_of_their_arguments_are() -> None:
    first, second = torch.zeros(3), torch.ones(3)
    call = describe(aten.add.Tensor, (first, 1.0), {}, first)
    assert call == describe(aten.add.Tensor, (second, 1.0), {}, second)
    assert call != describe(aten.add.Tensor, (first, 2.0), {}, first)
    assert call != describe(aten.add.Tensor, (first.double(), 1.0), {}, first.double())
    assert (call.argument(1), call.argument(2, "alpha")) == (1.0, None)


def test_made_up_arguments_have_the_shapes_and_valid_values() -> None:
    table, indices = torch.zeros(5, 2), torch.tensor([4, 4, 4])
    call = describe(aten.embedding.default, (table, indices), {}, table[indices])
    args, kwargs = call.make_arguments("cpu")
    assert aten.embedding.default(*args, **kwargs).shape == (3, 2)
    assert call.make_results("meta").device.type == "meta"


def test_tensors_are_found_in_nested_tuples_and_lists() -> None:
    x = torch.zeros(1)
    assert list(tensors_in((x, [x, (2, x)], None))) == [x, x, x]
