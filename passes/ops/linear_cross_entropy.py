"""`memopt::linear_cross_entropy`: the operator with which `ChunkLoss` replaces a linear layer and its loss."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from passes.compat import define_operator
from passes.ops.chunked import ChunkedCrossEntropy, LossOptions, gradient_dtype


def _with_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None, reduction: str,
    ignore_index: int, label_smoothing: float, scale: float, softcap: float, rows: int, needs_hidden: bool,
    needs_weight: bool, needs_bias: bool, later: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns loss, divisor and the gradients of hidden, weight and bias (see `passes.ops.chunked._Result`). Gradients
    that are not needed are empty, and so are those of weight and bias if they are computed `later`, in the backward."""
    how = LossOptions(reduction, ignore_index, label_smoothing, scale, softcap, rows)
    chunks = ChunkedCrossEntropy(hidden, weight, bias, target, class_weight, how)
    found = chunks.run(hidden=needs_hidden, weight=needs_weight and not later, bias=needs_bias and not later)
    gradients = ((found.hidden, hidden), (found.weight, weight), (found.bias, bias))
    of_hidden, of_weight, of_bias = (
        hidden.new_empty(0) if gradient is None or of is None else gradient.to(gradient_dtype(of.dtype))
        for gradient, of in gradients
    )
    return found.loss, found.divisor, of_hidden, of_weight, of_bias


with_gradients = torch.library.custom_op(
    "memopt::linear_cross_entropy_with_gradients", _with_gradients, mutates_args=()
)


@with_gradients.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> tuple[Tensor, ...]:
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    loss, divisor = (hidden.new_empty((), dtype=wide) for _ in range(2))
    of_hidden, of_weight, of_bias = (
        of.new_empty(of.shape, dtype=gradient_dtype(of.dtype)) if of is not None and needed else hidden.new_empty(0)
        for of, needed in zip((hidden, weight, bias), _at_once(options), strict=True)
    )
    return loss, divisor, of_hidden, of_weight, of_bias


def _at_once(options: tuple[Any, ...]) -> tuple[bool, bool, bool]:
    """Returns for hidden, weight and bias whether the forward computes the gradient."""
    needs_hidden, needs_weight, needs_bias, later = options[-4:]
    return needs_hidden, needs_weight and not later, needs_bias and not later


def _weight_gradient(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None, factor: Tensor,
    ignore_index: int, label_smoothing: float, scale: float, softcap: float, rows: int, needs_weight: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of weight and bias, times `factor`, from recomputed logits; empty where not needed."""
    how = LossOptions("sum", ignore_index, label_smoothing, scale, softcap, rows)
    chunks = ChunkedCrossEntropy(hidden, weight, bias, target, class_weight, how)
    found = chunks.run(hidden=False, weight=needs_weight, bias=needs_bias)
    of_weight, of_bias = (
        hidden.new_empty(0) if gradient is None or of is None else gradient.mul_(factor).to(of.dtype)
        for gradient, of in ((found.weight, weight), (found.bias, bias))
    )
    return of_weight, of_bias


weight_gradient = torch.library.custom_op(
    "memopt::linear_cross_entropy_weight_gradient", _weight_gradient, mutates_args=()
)

IMPLEMENTATIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.memopt.linear_cross_entropy_with_gradients.default: _with_gradients,
    torch.ops.memopt.linear_cross_entropy_weight_gradient.default: _weight_gradient,
}
"""By operator, the Python function that it runs, which allocates as the operator does, on tensors of any device."""


@weight_gradient.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> tuple[Tensor, ...]:
    pairs = zip((weight, bias), options[-2:], strict=True)
    of_weight, of_bias = (
        hidden.new_empty(0) if of is None or not needed else of.new_empty(of.shape) for of, needed in pairs
    )
    return of_weight, of_bias


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    _, divisor, *gradients = output
    ctx.at_once, ctx.later = _at_once(inputs), inputs[-1] and (inputs[-3] or inputs[-2])
    ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in inputs[:3]]
    # The options from the ignored index to the rows, and whether weight and bias need gradients.
    ctx.options = (*inputs[6:11], *inputs[-3:-1])
    again = inputs[:5] if ctx.later else ()
    ctx.save_for_backward(divisor, *again, *(pair for pair, now in zip(gradients, ctx.at_once, strict=True) if now))


def _backward(ctx: Any, of_loss: Tensor | None, *of_gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    if any(gradient is not None for gradient in of_gradients):
        raise NotImplementedError(
            "the chunked loss (ChunkLoss, operator linear_cross_entropy) has no gradients of gradients; leave "
            "'chunked_loss' out of allow, or ChunkLoss out of passes"
        )
    nothing = (None,) * 12
    if of_loss is None:
        return (None, None, None, *nothing)
    divisor, *kept = ctx.saved_tensors
    # Without any target the mean is NaN and its gradients are zeros, as in torch.
    factor = torch.where(divisor == 0, 0.0, of_loss / divisor)
    again, kept = (kept[:5], kept[5:]) if ctx.later else ([], kept)
    remaining = iter(kept)
    gradients: list[Tensor | None] = [
        (next(remaining) * factor).to(dtype) if now else None
        for dtype, now in zip(ctx.dtypes, ctx.at_once, strict=True)
    ]
    if again:
        computed = weight_gradient(*again, factor, *ctx.options)
        gradients[1:] = [pair if needed else None for pair, needed in zip(computed, ctx.options[-2:], strict=True)]
    return (*gradients, *nothing)


with_gradients.register_autograd(_backward, setup_context=_keep)


def _linear_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None = None, *,
    reduction: str = "mean", ignore_index: int = -100, label_smoothing: float = 0.0, scale: float = 1.0,
    softcap: float = 0.0, rows: int = 0, weight_in_backward: bool = False,
) -> Tensor:  # fmt: skip
    """Is decomposed where it is differentiated, since only there is it known which gradients are needed."""
    needs = [
        torch.is_grad_enabled() and tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias)
    ]
    given = (hidden, weight, bias, target, class_weight, reduction, ignore_index, label_smoothing, scale, softcap, rows)
    loss: Tensor = with_gradients(*given, *needs, weight_in_backward)[0]
    return loss


LINEAR_CROSS_ENTROPY: Any = define_operator(
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weight=None, *, "
    "str reduction='mean', int ignore_index=-100, float label_smoothing=0., float scale=1., float softcap=0., "
    "int rows=0, bool weight_in_backward=False) -> Tensor",
    _linear_cross_entropy,
)
"""Cross entropy of `linear(hidden, weight, bias)` and targets, computed without holding the logits.

`hidden` is [rows, width], `weight` [classes, width], the targets [rows]. Returns a scalar in fp32 (fp64 for fp64). The
options are those of `LossOptions`."""


@register_flop_formula(torch.ops.memopt.linear_cross_entropy_with_gradients)
def _flops(hidden: Any, weight: Any, *options: Any, **_: Any) -> int:
    """The operations of one matmul for the logits, and one for the gradient of each matrix."""
    return _matmul(hidden, weight) * (1 + sum(_at_once(options)[:2]))


@register_flop_formula(torch.ops.memopt.linear_cross_entropy_weight_gradient)
def _flops_of_weight_gradient(hidden: Any, weight: Any, *options: Any, **_: Any) -> int:
    return _matmul(hidden, weight) * (1 + options[-2])


def _matmul(hidden: Any, weight: Any) -> int:
    return 2 * hidden[0] * hidden[1] * weight[0]
