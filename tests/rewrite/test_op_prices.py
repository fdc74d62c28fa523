import torch
from torch.fx import Node

from memopt.device.devices import hardware
from memopt.device.time_model import op_seconds
from memopt.rewrite.op_prices import OpPrice, OpPrices, Saved, operands
from tests.passes.capture import Sketch, aten

H100 = hardware("h100")
ROWS, WIDTH = 4096, 1024
NBYTES = ROWS * WIDTH


def sketched() -> tuple[Sketch, Node, Node]:
    sketch = Sketch()
    return sketch, sketch.input("x", ROWS, WIDTH), sketch.input("weight", WIDTH, WIDTH)


def price(node: Node, dtype: torch.dtype, *, narrows: bool = False) -> OpPrice:
    found = OpPrices(H100, narrows).price(node, dtype, set(operands(node)))
    assert found is not None
    return found


def test_a_linear_keeps_both_operands_and_costs_three_products() -> None:
    sketch, x, weight = sketched()
    node = sketch.call(aten.linear.default, x, weight)
    for dtype, name in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16")):
        found = price(node, dtype, narrows=True)
        moved = dtype.itemsize * (2 * ROWS * WIDTH + WIDTH * WIDTH)
        one = op_seconds(2 * ROWS * WIDTH * WIDTH, moved, name, H100)
        assert found.forward_seconds == one
        assert found.backward_seconds == 2 * one
        assert found.operands == (Saved.WHOLE, Saved.WHOLE)
        assert (found.result, found.inner_bytes) == (Saved.NOTHING, 0)


def test_what_a_backward_may_read_rounded() -> None:
    sketch, x, weight = sketched()
    softmax = sketch.call(aten.softmax.int, x, -1)
    assert price(softmax, torch.float32, narrows=True).result is Saved.ROUNDED
    assert price(softmax, torch.float32).result is Saved.WHOLE
    assert price(softmax, torch.bfloat16, narrows=True).result is Saved.WHOLE
    norm = sketch.call(aten.layer_norm.default, x, [WIDTH], sketch.call(aten.select.int, weight, 0, 0))
    found = price(norm, torch.float32, narrows=True)
    assert found.operands == (Saved.ROUNDED, Saved.WHOLE)
    assert found.inner_bytes == 2 * ROWS * 4, "mean and reciprocal of the deviation of each row"


def test_inner_values_are_counted() -> None:
    sketch, x, _ = sketched()
    labels = sketch.input("labels", ROWS, dtype=torch.int64)
    loss = sketch.call(aten.cross_entropy_loss.default, x, labels)
    assert price(loss, torch.float32).inner_bytes == 4 * NBYTES + 4, "log-probabilities and the total weight"


def test_without_gradients_there_is_no_backward() -> None:
    sketch, x, weight = sketched()
    found = OpPrices(H100).price(sketch.call(aten.linear.default, x, weight), torch.float32, set())
    assert found is not None
    assert found.backward_seconds == 0
    assert set(found.operands) == {Saved.NOTHING}


def test_in_place_calls_are_priced_like_their_twins() -> None:
    sketch, x, _ = sketched()
    plain = sketch.call(aten.relu.default, x)
    assert price(sketch.call(aten.relu_.default, x), torch.float32) == price(plain, torch.float32)


def test_statistics_of_a_batch_norm_stay_in_fp32() -> None:
    sketch = Sketch()
    image = sketch.input("image", 8, 64, 56, 56)
    scale, shift, mean, variance = (sketch.input(name, 64) for name in ("scale", "shift", "mean", "variance"))
    norm = sketch.call(aten.batch_norm.default, image, scale, shift, mean, variance, True, 0.1, 1e-5, False)
    found = OpPrices(H100).price(norm, torch.bfloat16, {image, scale, shift})
    assert found is not None
    assert found.operands[0] is Saved.WHOLE


def test_one_trace_serves_all_calls_of_a_kind() -> None:
    sketch, x, weight = sketched()
    prices = OpPrices(H100)
    first, second = (sketch.call(aten.linear.default, x, weight) for _ in range(2))
    assert prices.price(first, torch.float32, {x, weight}) is prices.price(second, torch.float32, {x, weight})


def test_sizes_that_depend_on_data_count_as_the_largest() -> None:
    sketch, x, _ = sketched()
    mask = sketch.input("mask", ROWS, WIDTH, dtype=torch.bool)
    found = price(sketch.call(aten.masked_select.default, x, mask), torch.float32)
    assert found.forward_seconds >= op_seconds(0, 8 * NBYTES, "float32", H100)


def test_a_dtype_that_the_operator_refuses_has_no_price() -> None:
    sketch, _, weight = sketched()
    node = sketch.call(aten.linalg_inv.default, weight)
    prices = OpPrices(H100)
    assert prices.price(node, torch.float32, {weight}) is not None
    assert prices.price(node, torch.bfloat16, {weight}) is None
