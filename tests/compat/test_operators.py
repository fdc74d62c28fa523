from __future__ import annotations

import operator

import pytest
import torch

import passes.compat
from memopt.compat.operators import HigherOrderOperator, OpOverload, overload_name, schema_of

aten = torch.ops.aten


def test_kinds() -> None:
    assert isinstance(aten.add.Tensor, OpOverload)
    assert isinstance(torch.ops.higher_order.cond, HigherOrderOperator)
    assert not isinstance(operator.add, (OpOverload, HigherOrderOperator))
    assert not isinstance(aten.add, OpOverload)


@pytest.mark.parametrize("read", [schema_of, passes.compat.schema_of])
def test_schema(read: object) -> None:
    assert callable(read)
    schema = read(aten.add_.Tensor)
    assert schema.name == "aten::add_"
    assert [argument.name for argument in schema.arguments] == ["self", "other", "alpha"]
    assert schema.is_mutable
    assert not read(aten.add.Tensor).is_mutable


@pytest.mark.parametrize("read", [overload_name, passes.compat.overload_name])
def test_overload_name(read: object) -> None:
    assert callable(read)
    assert [read(aten.mm.default), read(aten.add.Tensor), read(aten.mm.out)] == ["default", "Tensor", "out"]
