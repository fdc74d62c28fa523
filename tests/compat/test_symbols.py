from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import passes.compat
from memopt.compat.fakes import FakeTensorMode
from memopt.compat.symbols import (
    AssumedSizes,
    data_symbols_of,
    known_sizes,
    plain_symbol,
    rebind_data_sizes,
    sizes_up_to,
    upper_bound,
)
from memopt.errors import CaptureError


@pytest.fixture
def mode() -> FakeTensorMode:
    return FakeTensorMode(shape_env=ShapeEnv())


def data_size(mode: FakeTensorMode, most: int | None = None) -> torch.SymInt:
    size: Any = mode.shape_env.create_unbacked_symint()  # type: ignore[union-attr]
    torch._check(size >= 0)
    if most is not None:
        torch._check(size <= most)
    return size


def test_an_upper_bound_follows_from_the_checks_in_the_model(mode: FakeTensorMode) -> None:
    assert upper_bound(data_size(mode, 7)) == 7
    assert upper_bound(2 * data_size(mode, 7) + 1) == 15


def test_an_upper_bound_follows_from_known_sizes(mode: FakeTensorMode) -> None:
    size = data_size(mode, 7)
    name = plain_symbol(size)
    assert name is not None
    with known_sizes({name: 3}):
        assert upper_bound(2 * size) == 6
    assert upper_bound(2 * size) == 14


def test_sizes_that_shrink_as_others_grow_are_bounded_by_the_smallest_of_these(mode: FakeTensorMode) -> None:
    height, width = data_size(mode, 16), data_size(mode, 16)
    torch._check(height > 0)
    names = [plain_symbol(size) or "" for size in (height, width)]
    rest = 256 - height * width
    with sizes_up_to(dict.fromkeys(names, 10)):
        assert upper_bound(height * width) == 100
        assert upper_bound(rest) == 256
        assert upper_bound(16 + height - width) == 26
    with known_sizes(dict.fromkeys(names, 20)):
        assert upper_bound(rest) == 0
    number: Any = mode.shape_env.create_unbacked_symint()  # type: ignore[union-attr]
    with sizes_up_to({plain_symbol(number) or "": 20}):
        assert upper_bound(64 - number) == 64


def test_a_size_by_which_another_is_divided_is_no_smaller_than_one(mode: FakeTensorMode) -> None:
    rows, groups = data_size(mode, 64), data_size(mode, 8)
    names = [plain_symbol(size) or "" for size in (rows, groups)]
    with sizes_up_to(dict(zip(names, (64, 8), strict=True))):
        assert upper_bound(rows // groups) == 64


def test_a_size_without_a_bound_is_refused(mode: FakeTensorMode) -> None:
    with pytest.raises(CaptureError, match=r"depends on data and has no bound; call torch\._check"):
        upper_bound(data_size(mode))


def test_a_condition_that_divides_by_zero_is_broken() -> None:
    """As one on what is left by a tile of rows, for a batch with fewer rows than tiles."""
    shape_env = ShapeEnv()
    value = FakeTensorMode(shape_env=shape_env).from_tensor(
        torch.empty(16, 2), symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
    )
    size = value.shape[0]
    assert isinstance(size, torch.SymInt)
    assert not size % (size // 4)
    assumed = AssumedSizes([size])
    assert assumed.hold([32])
    assert list(assumed.broken([3])) == [str(size)]


def test_the_symbols_of_values(mode: FakeTensorMode) -> None:
    one, other = data_size(mode, 7), data_size(mode, 9)
    with mode:
        tensor = torch.empty(one, 2)
    assert data_symbols_of((tensor, [other])) == {plain_symbol(one), plain_symbol(other)}
    assert data_symbols_of((3, None, torch.ones(2))) == set()


def test_plain_symbols(mode: FakeTensorMode) -> None:
    size = data_size(mode, 7)
    assert plain_symbol(size) is not None
    assert plain_symbol(size + 1) is None
    assert plain_symbol(4) is None


def test_a_second_run_stands_for_the_first() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    graph = make_fx(torch.nonzero, tracing_mode="symbolic")(torch.ones(3)).graph
    node = next(iter(graph.find_nodes(op="call_function", target=torch.ops.aten.nonzero.default)))
    first = node.meta["val"]
    env = first.fake_mode.shape_env
    with first.fake_mode:
        second = torch.nonzero(first.fake_mode.from_tensor(torch.ones(3)))
    assert mode is not first.fake_mode
    assert data_symbols_of(second) != data_symbols_of(first)
    rebind_data_sizes(first.fake_mode, node, second)
    assert env.simplify(second.shape[0].node.expr) == env.simplify(first.shape[0].node.expr)


def test_statically_known_true(mode: FakeTensorMode) -> None:
    size = data_size(mode, 7)
    assert passes.compat.statically_known_true(size <= 7)
    assert not passes.compat.statically_known_true(size == 3)
    assert passes.compat.statically_known_true(True)
    assert not passes.compat.statically_known_true(False)


def test_free_unbacked_symbols(mode: FakeTensorMode) -> None:
    size = data_size(mode, 7)
    assert {symbol.name for symbol in passes.compat.free_unbacked_symbols((size, 3))} == {plain_symbol(size)}
    assert passes.compat.free_unbacked_symbols(torch.ones(2)) == set()
