from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from memopt import measure_peak
from passes.ops.linear_cross_entropy import LINEAR_CROSS_ENTROPY, weight_gradient, with_gradients
from passes.ops.linear_rows import LARGEST_SHARE, chunk_rows

ROWS, WIDTH, CLASSES = 23, 8, 37


def tensors(dtype: torch.dtype = torch.float32, rows: int = ROWS, *, ignored: int = -100) -> list[Tensor]:
    """Hidden, weight, bias (leaves that require gradients) and targets, every fifth one ignored."""
    torch.manual_seed(0)
    floats = [torch.randn(rows, WIDTH), torch.randn(CLASSES, WIDTH), torch.randn(CLASSES)]
    target = torch.randint(0, CLASSES, (rows,)).masked_fill_(torch.arange(rows) % 5 == 0, ignored)
    return [*(tensor.to(dtype).requires_grad_() for tensor in floats), target]


def plain(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None = None,
    scale: float = 1.0,
    softcap: float = 0.0,
    rows: int = 0,
    **options: Any,
) -> Tensor:
    logits = F.linear(hidden, weight, bias).float() if hidden.dtype.itemsize < 4 else F.linear(hidden, weight, bias)
    logits = softcap * torch.tanh(scale * logits) if softcap else scale * logits
    return F.cross_entropy(logits, target, class_weight, **options)


def gradients(function: Any, leaves: list[Tensor], *rest: Any, by: float = 1.0, **options: Any) -> list[Tensor]:
    loss = function(*leaves, *rest, **options)
    return [loss, *torch.autograd.grad(loss * by, [leaf for leaf in leaves if leaf.requires_grad])]


def error(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest element."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    wide, reference = found.detach().double(), expected.detach().double()
    return float((wide - reference).abs().max() / reference.abs().max())


def typical_error(found: Tensor, expected: Tensor) -> float:
    """The median of the elements' relative errors: that of small ones, which underflow first."""
    wide, reference = found.detach().double(), expected.detach()
    return float(((wide - reference).abs() / reference.abs().clamp(min=1e-30)).median())


@settings(deadline=None, max_examples=60)
@given(
    reduction=st.sampled_from(["mean", "sum"]),
    smoothing=st.sampled_from([0.0, 0.1]),
    weighted=st.booleans(),
    scale=st.sampled_from([1.0, 0.25]),
    softcap=st.sampled_from([0.0, 2.0]),
    rows=st.sampled_from([0, 1, 5, 23, 100]),
    ignored=st.sampled_from([-100, 3]),
    weight_in_backward=st.booleans(),
)
def test_equal_to_the_plain_loss(weighted: bool, ignored: int, weight_in_backward: bool, **options: Any) -> None:
    smoothing = options.pop("smoothing")
    *leaves, target = tensors(ignored=ignored)
    options.update(label_smoothing=smoothing, ignore_index=ignored)
    class_weight = torch.rand(CLASSES) if weighted else None
    later = {"weight_in_backward": weight_in_backward}
    found = gradients(LINEAR_CROSS_ENTROPY, leaves, target, class_weight, **options, **later)
    expected = gradients(plain, leaves, target, class_weight, **options)
    for one, other in zip(found, expected, strict=True):
        assert error(one, other) < 1e-6


def test_gradients_in_double_precision() -> None:
    hidden, weight, bias, target = tensors(torch.float64)
    options = {"label_smoothing": 0.1, "softcap": 3.0, "scale": 0.5, "rows": 4}
    assert torch.autograd.gradcheck(
        lambda *leaves: LINEAR_CROSS_ENTROPY(*leaves, target, **options), (hidden, weight, bias)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_no_worse_than_the_plain_loss(dtype: torch.dtype) -> None:
    *leaves, target = tensors(dtype)
    exact = gradients(plain, [leaf.detach().double().requires_grad_() for leaf in leaves], target)
    found, expected = (gradients(call, leaves, target) for call in (LINEAR_CROSS_ENTROPY, plain))
    for one, other, reference in zip(found, expected, exact, strict=True):
        assert one.dtype == other.dtype
        assert error(one.double(), reference) <= 1.5 * error(other.double(), reference) + torch.finfo(dtype).eps / 4


def test_fp32_weights_under_16_bit_activations_get_fp32_gradients() -> None:
    hidden, weight, bias, target = tensors()
    low = hidden.detach().bfloat16().requires_grad_()
    _, of_hidden, of_weight, of_bias = gradients(LINEAR_CROSS_ENTROPY, [low, weight, bias], target)
    assert (of_hidden.dtype, of_weight.dtype, of_bias.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    _, _, expected, _ = gradients(plain, [hidden, weight, bias], target)
    assert error(of_weight, expected) < 0.02
    assert not torch.equal(of_weight, of_weight.bfloat16().float())


def test_a_scaled_fp16_loss_keeps_small_gradients() -> None:
    """Sure of its targets, the loss has gradients that fp16 holds only once they are scaled."""
    hidden, weight, bias, _ = (tensor.detach() for tensor in tensors(torch.float16, 512))
    leaves = [tensor.requires_grad_() for tensor in (hidden, weight * 2, bias)]
    target = F.linear(*leaves).argmax(1)
    exact = gradients(plain, [leaf.detach().double().requires_grad_() for leaf in leaves], target, by=2.0**16)
    found, expected = (gradients(call, leaves, target, by=2.0**16) for call in (LINEAR_CROSS_ENTROPY, plain))
    for one, other, reference in zip(found, expected, exact, strict=True):
        assert typical_error(one, reference) <= 1.1 * typical_error(other, reference)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_no_target_gives_nan_and_gradients_of_zeros(smoothing: float) -> None:
    *leaves, target = tensors()
    loss, *found = gradients(LINEAR_CROSS_ENTROPY, leaves, torch.full_like(target, -100), label_smoothing=smoothing)
    assert loss.isnan()
    assert all((found_one == 0).all() for found_one in found)
    total, *_ = gradients(LINEAR_CROSS_ENTROPY, leaves, torch.full_like(target, -100), reduction="sum")
    assert total == 0


def test_no_rows() -> None:
    *leaves, target = tensors(rows=0)
    loss, of_hidden, of_weight, _ = gradients(LINEAR_CROSS_ENTROPY, leaves, target, reduction="sum")
    assert loss == 0
    assert of_hidden.shape == (0, WIDTH)
    assert (of_weight == 0).all()


def test_infinite_logits_of_a_row_that_is_ignored() -> None:
    hidden, weight, bias, target = tensors()
    with torch.no_grad():
        hidden[0] = float("inf")
    assert LINEAR_CROSS_ENTROPY(hidden, weight, bias, target).isfinite()


def test_a_class_that_is_masked_out() -> None:
    hidden, weight, bias, target = tensors()
    bias = bias.detach().index_fill_(0, torch.tensor([5]), float("-inf"))
    target = target.masked_fill(target == 5, 6)
    found, expected = (gradients(call, [hidden, weight], bias, target) for call in (LINEAR_CROSS_ENTROPY, plain))
    for one, other in zip(found, expected, strict=True):
        assert error(one, other) < 1e-6


def test_a_target_out_of_range_is_refused() -> None:
    hidden, weight, bias, target = tensors()
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        LINEAR_CROSS_ENTROPY(hidden, weight, bias, target.fill_(CLASSES))


@pytest.mark.parametrize("frozen", [(0,), (1,), (1, 2), (0, 1, 2)])
def test_only_wanted_gradients_are_computed(frozen: tuple[int, ...]) -> None:
    *leaves, target = tensors()
    for position in frozen:
        leaves[position] = leaves[position].detach()
    wanted: list[list[bool]] = []

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.memopt.linear_cross_entropy_with_gradients.default:
                wanted.append(list(args[-4:-1]))
            return func(*args, **(kwargs or {}))

    with Record():
        loss = LINEAR_CROSS_ENTROPY(*leaves, target)
    assert wanted == [[position not in frozen for position in range(3)]]
    assert loss.requires_grad == (len(frozen) < 3)


def test_no_gradients_of_gradients() -> None:
    *leaves, target = tensors()
    (of_hidden,) = torch.autograd.grad(LINEAR_CROSS_ENTROPY(*leaves, target), leaves[:1], create_graph=True)
    with pytest.raises(NotImplementedError, match="out of allow, or ChunkLoss out of passes"):
        of_hidden.sum().backward()


def test_torch_finds_the_operator_well_formed() -> None:
    hidden, weight, bias, target = tensors()
    arguments = (hidden, weight, bias, target, None, "mean", -100, 0.1, 1.0, 0.0, 4, True, True, True, False)
    torch.library.opcheck(with_gradients, arguments, test_utils=("test_schema", "test_faketensor"))
    none = (hidden, weight, None, target, torch.rand(CLASSES), "sum", -100, 0.0, 1.0, 0.0, 0, False, True, False, False)
    torch.library.opcheck(with_gradients, none, test_utils=("test_schema", "test_faketensor"))
    later = (*arguments[:-1], True)
    torch.library.opcheck(with_gradients, later, test_utils=("test_schema", "test_faketensor"))
    of_weight = (*arguments[:5], torch.tensor(0.5), *arguments[6:11], True, False)
    torch.library.opcheck(weight_gradient, of_weight, test_utils=("test_schema", "test_faketensor"))


@given(rows=st.integers(1, 100_000), width=st.integers(1, 16_384))
def test_chunks_are_an_eighth_at_most(rows: int, width: int) -> None:
    size = chunk_rows(rows, width)
    assert 1 <= size <= -(-rows // LARGEST_SHARE)
    assert size <= max(512, width)


@pytest.mark.parametrize("later", [False, True])
def test_peak_is_one_chunk_and_the_gradients(later: bool) -> None:
    rows, width, classes = 256, 16, 5000
    hidden, weight = torch.randn(rows, width, requires_grad=True), torch.randn(classes, width, requires_grad=True)
    target = torch.randint(0, classes, (rows,))
    with measure_peak() as peak:
        LINEAR_CROSS_ENTROPY(hidden, weight, None, target, rows=8, weight_in_backward=later).backward()
    chunk, of_weight, of_hidden = 8 * classes * 4, classes * width * 4, rows * width * 4
    rest = 2 * of_hidden + 64 * rows
    assert peak.allocated_bytes <= rest + (1.1 * chunk + of_weight if later else 2 * of_weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weight_gradient_of_16_bits_in_the_backward(dtype: torch.dtype) -> None:
    *leaves, target = tensors(dtype)
    found, expected = (
        gradients(LINEAR_CROSS_ENTROPY, leaves, target, weight_in_backward=item) for item in (True, False)
    )
    for one, other in zip(found, expected, strict=True):
        assert error(one, other) <= torch.finfo(dtype).eps


def test_a_frozen_weight_leaves_nothing_for_the_backward() -> None:
    hidden, weight, _, target = tensors()
    loss = LINEAR_CROSS_ENTROPY(hidden, weight.detach(), None, target, weight_in_backward=True)
    (found,) = torch.autograd.grad(loss, [hidden])
    (expected,) = torch.autograd.grad(plain(hidden, weight.detach(), None, target), [hidden])
    assert error(found, expected) < 1e-6
