"""Kinds of operators, as passes ask for them."""

import torch

from passes.graphs.op_kinds import (
    fills_with,
    follows_input,
    is_cast,
    is_new,
    is_pointwise,
    is_view,
    moves_data,
    mutated_arguments,
    op_name,
    promotes,
)
from tests.passes.capture import Sketch, aten


def test_kinds() -> None:
    sketch = Sketch()
    x = sketch.input("x", 4, 4)
    calls = {
        "view": sketch.call(aten.view.default, x, [16]),
        "clone": sketch.call(aten.clone.default, x),
        "amax": sketch.call(aten.amax.default, x, [-1]),
        "cast": sketch.call(aten._to_copy.default, x, dtype=torch.bfloat16),
        "new": sketch.call(aten.zeros_like.default, x),
        "add": sketch.call(aten.add.Tensor, x, x),
        "gelu": sketch.call(aten.gelu.default, x),
        "mm": sketch.call(aten.mm.default, x, x),
    }
    kinds = {
        is_view: {"view"},
        moves_data: {"view", "clone"},
        follows_input: {"view", "clone", "amax"},
        is_cast: {"cast"},
        is_new: {"new"},
        promotes: {"add", "clone"},  # torch tags copies as pointwise
    }
    for is_kind, names in kinds.items():
        assert {name for name, call in calls.items() if is_kind(call)} == names, is_kind.__name__
    assert is_pointwise(calls["gelu"])
    assert not is_pointwise(calls["mm"])
    assert (op_name(calls["cast"]), op_name(x)) == ("_to_copy", "")


def test_arguments_that_are_written_to() -> None:
    sketch = Sketch()
    x, y = sketch.input("x", 4), sketch.input("y", 4)
    assert mutated_arguments(sketch.call(aten.add_.Tensor, x, y)) == (x,)
    assert mutated_arguments(sketch.call(aten.add.out, x, x, out=y)) == (y,)
    assert mutated_arguments(sketch.call(aten.add.Tensor, x, y)) == ()


def test_numbers_that_fill() -> None:
    sketch = Sketch()
    x, mask = sketch.input("x", 4), sketch.input("mask", 4, dtype=torch.bool)
    assert fills_with(sketch.call(aten.masked_fill.Scalar, x, mask, -1e9)) == ((2, -1e9),)
    assert fills_with(sketch.call(aten.mul.Tensor, x, 2.0)) == ()
