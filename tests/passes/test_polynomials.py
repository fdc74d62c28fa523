"""Calls read as polynomials: coefficients by the powers of x and t."""

import math

import pytest
import torch
from torch.fx import Node

from passes.fuse_activations import _T, _X, _Polynomial, _Reader, _Unknown
from tests.passes.capture import Sketch, aten


def read(sketch: Sketch, result: Node, **given: _Polynomial) -> _Polynomial:
    nodes = {node.name: node for node in sketch.returns(result).graph.nodes}
    return _Reader({nodes[name]: value for name, value in given.items()})(nodes[result.name])


def test_sums_products_and_powers() -> None:
    sketch = Sketch()
    x, t = sketch.input("x", 4), sketch.input("t", 4)
    half = sketch.call(aten.div.Tensor, x, 2.0)
    cube = sketch.call(aten.pow.Tensor_Scalar, x, 3)
    both = sketch.call(aten.add.Tensor, half, cube, alpha=4)
    assert read(sketch, sketch.call(aten.mul.Tensor, both, t), x=_X, t=_T) == {(1, 1): 0.5, (3, 1): 4.0}


def test_subtraction_from_a_number_and_constants_in_the_graph() -> None:
    sketch = Sketch()
    x, number = sketch.input("x", 4), sketch.constant("number", torch.tensor(3.0))
    left = sketch.call(aten.rsub.Scalar, x, 1.0)
    assert read(sketch, sketch.call(aten.mul.Tensor, left, number), x=_X) == {(0, 0): 3.0, (1, 0): -3.0}


def test_terms_that_cancel_are_none() -> None:
    sketch = Sketch()
    x = sketch.input("x", 4)
    doubled = sketch.call(aten.mul.Tensor, x, 2.0)
    assert read(sketch, sketch.call(aten.sub.Tensor, doubled, x), x=_X) == {(1, 0): 1.0}
    assert math.isclose(_X[1, 0], 1.0)


@pytest.mark.parametrize("operator", [aten.exp.default, aten.sqrt.default])
def test_other_functions_are_unknown(operator: object) -> None:
    sketch = Sketch()
    x = sketch.input("x", 4)
    with pytest.raises(_Unknown):
        read(sketch, sketch.call(operator, x), x=_X)  # type: ignore[arg-type]
