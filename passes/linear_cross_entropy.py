"""`memopt::linear_cross_entropy`: the operator that `ChunkLoss` puts in the place of a linear layer and its loss."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from passes.chunked_cross_entropy import ChunkedCrossEntropy, Options, gradient_dtype


@torch.library.custom_op("memopt::linear_cross_entropy_with_gradients", mutates_args=())
def with_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    scale: float,
    softcap: float,
    rows: int,
    needs_hidden: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss, divisor and gradients of hidden, weight and bias (see `Result`); those not needed are empty."""
    how = Options(reduction, ignore_index, label_smoothing, scale, softcap, rows)
    chunks = ChunkedCrossEntropy(hidden, weight, bias, target, class_weight, how)
    found = chunks.run(hidden=needs_hidden, weight=needs_weight, bias=needs_bias)
    gradients = ((found.hidden, hidden), (found.weight, weight), (found.bias, bias))
    of_hidden, of_weight, of_bias = (
        hidden.new_empty(0) if gradient is None or of is None else gradient.to(gradient_dtype(of.dtype))
        for gradient, of in gradients
    )
    return found.loss, found.divisor, of_hidden, of_weight, of_bias


@with_gradients.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> tuple[Tensor, ...]:
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    loss, divisor = (hidden.new_empty((), dtype=wide) for _ in range(2))
    of_hidden, of_weight, of_bias = (
        of.new_empty(of.shape, dtype=gradient_dtype(of.dtype)) if of is not None and needed else hidden.new_empty(0)
        for of, needed in zip((hidden, weight, bias), options[-3:], strict=True)
    )
    return loss, divisor, of_hidden, of_weight, of_bias


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    _, divisor, *gradients = output
    ctx.needed = inputs[-3:]
    ctx.dtypes = [None if each is None else each.dtype for each in inputs[:3]]
    ctx.save_for_backward(divisor, *(each for each, needed in zip(gradients, ctx.needed, strict=True) if needed))


def _backward(ctx: Any, of_loss: Tensor | None, *of_gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    if any(each is not None for each in of_gradients):
        raise NotImplementedError("linear_cross_entropy has no gradients of gradients; leave ChunkLoss out")
    nothing = (None,) * 11
    if of_loss is None:
        return (None, None, None, *nothing)
    divisor, *kept = ctx.saved_tensors
    # No target at all: the mean is not a number, its gradients are zeros, as torch has it.
    factor = torch.where(divisor == 0, 0.0, of_loss / divisor)
    remaining = iter(kept)
    gradients = tuple(
        (next(remaining) * factor).to(dtype) if needed else None
        for dtype, needed in zip(ctx.dtypes, ctx.needed, strict=True)
    )
    return (*gradients, *nothing)


with_gradients.register_autograd(_backward, setup_context=_keep)

torch.library.define(
    "memopt::linear_cross_entropy",
    "(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weight=None, *, str reduction='mean', "
    "int ignore_index=-100, float label_smoothing=0., float scale=1., float softcap=0., int rows=0) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@torch.library.impl("memopt::linear_cross_entropy", "CompositeImplicitAutograd")
def _linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None = None,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    scale: float = 1.0,
    softcap: float = 0.0,
    rows: int = 0,
) -> Tensor:
    """Only where it is differentiated is it known whose gradients are wanted: frozen weights get none."""
    needs = [torch.is_grad_enabled() and each is not None and each.requires_grad for each in (hidden, weight, bias)]
    loss: Tensor = with_gradients(
        hidden,
        weight,
        bias,
        target,
        class_weight,
        reduction,
        ignore_index,
        label_smoothing,
        scale,
        softcap,
        rows,
        *needs,
    )[0]
    return loss


LINEAR_CROSS_ENTROPY: Any = torch.ops.memopt.linear_cross_entropy.default
"""Cross entropy of `linear(hidden, weight, bias)`, [rows, width] · [classes, width] and targets [rows], without its
logits; a scalar in fp32 (fp64 for fp64). The options are those of `Options`."""


@register_flop_formula(torch.ops.memopt.linear_cross_entropy_with_gradients)
def _flops(hidden: Any, weight: Any, *options: Any, **_: Any) -> int:
    """A matmul for the logits, and one for each of the two gradients."""
    rows, width = hidden
    return int(2 * rows * width * weight[0] * (1 + options[-3] + options[-2]))
