"""The prices of 8-bit operators: rules against measurement, and what the time model counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from memopt.device import hardware
from memopt.device.op_call import describe
from memopt.device.time_model import node_bytes, node_flops, node_seconds
from memopt.device.workspace import _is_cheap, _measure, estimate_workspace
from passes.ops.fp8_formats import DELAYED_SCALE, E4M3, E5M2, E8M0, TILES, WHOLE, quantize, scale_shape, turned
from passes.ops.fp8_ops import DEQUANTIZE, MATMUL, QUANTIZE
from tests.passes.capture import Sketch

BF16, FP32 = torch.bfloat16, torch.float32
ROWS, INNER, COLUMNS = 512, 768, 256


def product(dtype: torch.dtype, tiles: tuple[str, str] = (WHOLE, WHOLE)) -> tuple[Any, ...]:
    """A product of two operands that are stored by rows: the second is transposed, with its tiles."""
    a = quantize(torch.randn(ROWS, INNER), E4M3, tiles[0])
    b = quantize(torch.randn(COLUMNS, INNER), E4M3, turned(tiles[1]))
    return *a, *b, None, False, True, dtype


CASES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "quantize fp32": (QUANTIZE, (torch.randn(ROWS, INNER), E4M3, WHOLE)),
    "quantize bf16": (QUANTIZE, (torch.randn(ROWS, INNER, dtype=BF16), E5M2, WHOLE)),
    **{f"quantize {tile}": (QUANTIZE, (torch.randn(ROWS, INNER, dtype=BF16), E4M3, tile)) for tile in TILES},
    "quantize in parts": (QUANTIZE, (torch.randn(3000, 3000, dtype=BF16), E4M3, WHOLE)),
    "dequantize": (DEQUANTIZE, (*quantize(torch.randn(ROWS, INNER), E4M3, WHOLE), BF16)),
    "product": (MATMUL, product(BF16)),
    "product in fp32": (MATMUL, product(FP32)),
    "product of tiles of 128": (MATMUL, product(BF16, ("1x128", "128x128"))),
    "product of tiles of 32": (MATMUL, product(FP32, ("1x32", "32x1"))),
}


@pytest.mark.parametrize("case", CASES)
def test_the_rule_is_an_upper_bound_and_near(case: str) -> None:
    operator, arguments = CASES[case]
    call = describe(operator, arguments, {}, operator(*arguments))
    measured = _measure(call)
    assert measured is not None
    estimated = estimate_workspace(call, "cpu")
    assert measured.workspace_bytes <= estimated <= 2.5 * measured.workspace_bytes + 2**16


def node(turn_a: bool, turn_b: bool) -> fx.Node:
    sketch = Sketch()
    a = sketch.input("a", *((INNER, ROWS) if turn_a else (ROWS, INNER)), dtype=E5M2)
    b = sketch.input("b", *((COLUMNS, INNER) if turn_b else (INNER, COLUMNS)), dtype=E4M3)
    return sketch.call(MATMUL, a, sketch.input("s"), b, sketch.input("t"), None, turn_a, turn_b, BF16)


@pytest.mark.parametrize("turn_a", [False, True])
@pytest.mark.parametrize("turn_b", [False, True])
def test_what_a_product_computes_and_moves(turn_a: bool, turn_b: bool) -> None:
    """An operand that is not in the layout of the kernel is read and written once more."""
    found = node(turn_a, turn_b)
    assert node_flops(found) == 2 * ROWS * INNER * COLUMNS
    turned = 2 * (ROWS * INNER * turn_a + INNER * COLUMNS * (not turn_b))
    assert node_bytes(found) == ROWS * INNER + INNER * COLUMNS + 2 * ROWS * COLUMNS + 8 + turned


def test_a_large_product_takes_half_of_bf16s_time_on_a_card_with_units() -> None:
    sketch, aten, h100 = Sketch(), torch.ops.aten, hardware("h100")
    a, b = sketch.input("a", 8192, 8192, dtype=BF16), sketch.input("b", 8192, 8192, dtype=BF16)
    wide = sketch.call(aten.mm.default, a, b)
    narrow = [sketch.input(name, 8192, 8192, dtype=E4M3) for name in ("a8", "b8")]
    scales = [sketch.input(name) for name in ("s", "t")]
    found = sketch.call(MATMUL, narrow[0], scales[0], narrow[1], scales[1], None, False, True, BF16)
    assert node_seconds(found, h100) == pytest.approx(node_seconds(wide, h100) / 2, rel=0.01)


@pytest.mark.parametrize(
    ("tile", "quick"), [("1x128", ["h100", "h200"]), ("1x32", ["b200", "rtx-5090"])], ids=["128", "32"]
)
def test_tiles_are_multiplied_quickly_where_there_are_units_for_them(tile: str, quick: list[str]) -> None:
    """Elsewhere as fast as the results' type is, with the time to write and read wider copies on top."""
    sketch, size = Sketch(), 8192
    a, b = sketch.input("a", size, size, dtype=BF16), sketch.input("b", size, size, dtype=BF16)
    wide = sketch.call(torch.ops.aten.mm.default, a, b)
    scales = E8M0 if tile == "1x32" else FP32
    a8, b8 = (sketch.input(name, size, size, dtype=E4M3) for name in ("a8", "b8"))
    s, t = (sketch.input(name, *scale_shape(size, size, tile), dtype=scales) for name in ("s", "t"))
    found = sketch.call(MATMUL, a8, s, b8, t, None, False, True, BF16)
    for card in ("l4", "a100-80", "h100", "h200", "b200", "rtx-4090", "rtx-5090"):
        ratio = node_seconds(found, hardware(card)) / node_seconds(wide, hardware(card))
        assert ratio == pytest.approx(0.5, rel=0.01) if card in quick else 1 < ratio < 1.5


def test_what_remembers_is_not_run_for_its_price() -> None:
    arguments = (torch.randn(4, 4), E4M3, "price")
    assert not _is_cheap(describe(DELAYED_SCALE, arguments, {}, torch.tensor(1.0)))
