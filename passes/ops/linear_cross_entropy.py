"""`memopt::linear_cross_entropy`: the operator with which `ChunkLoss` replaces a linear layer and its loss.

After Liger-Kernel (Hsu et al. 2024, arXiv:2410.10989): the gradients of the cross entropy are computed with the loss,
while the logits of a chunk are there, so that no logits are computed twice. They are those of the *sum* over the rows:
the division by the number of targets and the incoming gradient, a loss scale perhaps, come in the backward as one
factor in fp32, so that small gradients are not lost in 16 bits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from passes.compat import define_operator
from passes.ops.linear_rows import IMPLEMENTATIONS as OF_ROWS
from passes.ops.linear_rows import ChunkedLinear, chunk_rows

# Gradients of logits lie between -1 and 1 and are as small as probabilities: lifted into fp16's range for its matmul.
_FP16_LIFT = 128.0


@dataclass(frozen=True)
class _LossOptions:
    """The options of a cross entropy of `softcap * tanh(scale * x)`, where `x = hidden @ weight.T + bias`.

    With `softcap` 0 it is the cross entropy of `scale * x`."""

    reduction: str = "mean"
    """"mean" over the rows whose target is not `ignore_index`, weighted by class as in torch; or "sum"."""
    ignore_index: int = -100
    label_smoothing: float = 0.0
    scale: float = 1.0
    softcap: float = 0.0
    rows: int = 0
    """Rows of a chunk; 0: see `chunk_rows`."""


def _gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which the gradient of an input of dtype `dtype` is held from the forward to the backward:
    fp32 for fp16, in which sums overflow, else `dtype`."""
    return torch.float32 if dtype == torch.float16 else dtype


class _ChunkedCrossEntropy:
    """A linear layer's cross entropy and its gradients, both computed in the forward, one chunk of rows after another.

    Args:
        hidden: [rows, width].
        weight: [classes, width]; used in the dtype of `hidden`, with its gradient summed in fp32.
        bias: [classes], or None.
        target: [rows], int64.
        class_weight: [classes], or None.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None,
        how: _LossOptions,
    ) -> None:  # fmt: skip
        self.how, self.class_weight = how, class_weight
        self.layer = ChunkedLinear(hidden, weight, bias)
        # Logits are reduced in the dtype in which the weight's gradient is summed.
        self.wide = self.layer.wide
        valid = target != how.ignore_index
        self.target = target.masked_fill(~valid, 0)
        if class_weight is None:
            self.row_weight = valid.to(self.wide)
            self.all_weights: Tensor | float = float(weight.shape[0])
        else:
            self.class_weight = class_weight.to(self.wide)
            self.row_weight = self.class_weight[self.target].masked_fill_(~valid, 0.0)
            self.all_weights = self.class_weight.sum()
        self.smoothing = valid.to(self.wide).mul_(how.label_smoothing / weight.shape[0])

    def run(self, *, hidden: bool, weight: bool, bias: bool) -> tuple[Tensor, Tensor, tuple[Tensor | None, ...]]:
        """Returns the loss; what its mean was divided by (1 for a sum); and the gradients of the undivided sum by
        hidden, weight and bias, None for those that are not asked for."""
        given = self.layer.hidden
        rows, width = given.shape
        make = given.new_zeros
        of_hidden = given.new_empty((rows, width), dtype=_gradient_dtype(given.dtype)) if hidden else None
        of_weight = make((self.layer.classes, width), dtype=self.wide) if weight else None
        of_bias = make(self.layer.classes, dtype=self.wide) if bias else None
        total = make((), dtype=self.wide)
        size = self.how.rows or chunk_rows(rows, width)
        for start in range(0, rows, size):
            total += self._chunk(slice(start, min(start + size, rows)), of_hidden, of_weight, of_bias)
        divisor = self.row_weight.sum() if self.how.reduction == "mean" else torch.ones_like(total)
        return total / divisor, divisor, (of_hidden, of_weight, of_bias)

    def _chunk(self, part: slice, of_hidden: Tensor | None, of_weight: Tensor | None, of_bias: Tensor | None) -> Tensor:
        """Returns the summed loss of the rows `part`, and writes or adds their gradients to the tensors given. What it
        allocates is freed when it returns."""
        differentiates = not (of_hidden is of_weight is of_bias is None)
        logits = self._logits(part)
        tanh = logits.clone() if self.how.softcap and differentiates else None
        if self.how.softcap:
            logits.mul_(self.how.softcap)
        loss, sums = self._loss(logits, part)
        if not differentiates:
            return loss
        self._differentiate(logits, sums, part, tanh)
        del tanh
        if of_bias is not None:
            of_bias += logits.sum(0)
        lift = _FP16_LIFT if self.layer.hidden.dtype == torch.float16 else 1.0
        self.layer.spread(logits, part, of_hidden, of_weight, lift)
        return loss

    def _logits(self, part: slice) -> Tensor:
        """[chunk, classes] in the wide dtype: `scale * x`, its tanh where there is a softcap."""
        logits = self.layer.logits(part).to(self.wide, memory_format=torch.contiguous_format)
        if self.how.scale != 1.0:
            logits.mul_(self.how.scale)
        return logits.tanh_() if self.how.softcap else logits

    def _loss(self, logits: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """Returns the summed loss of a chunk and the sums of the exponentials, [chunk, 1]; `logits` become those."""
        logits.sub_(logits.amax(1, keepdim=True))
        chosen = logits.gather(1, self.target[part].unsqueeze(1))
        smooth = None
        if self.how.label_smoothing:
            smooth = logits.sum(1) if self.class_weight is None else logits @ self.class_weight
        sums = logits.exp_().sum(1, keepdim=True)
        log_sums = sums.log()
        row_weight, smoothing = self.row_weight[part], self.smoothing[part]
        losses = (1 - self.how.label_smoothing) * row_weight * (log_sums - chosen).squeeze(1)
        if smooth is not None:
            losses += smoothing * (self.all_weights * log_sums.squeeze(1) - smooth)
        # A weight of 0 is not enough, since the logits of an ignored row may be infinite.
        ignored = (smoothing == 0) & (row_weight == 0) if smooth is not None else row_weight == 0
        return losses.masked_fill_(ignored, 0.0).sum(), sums

    def _differentiate(self, exponentials: Tensor, sums: Tensor, part: slice, tanh: Tensor | None) -> None:
        """Turns the exponentials into the gradient of the chunk's summed loss with respect to `x`, in place."""
        slope = self.how.scale * (self.how.softcap or 1.0)
        towards = ((1 - self.how.label_smoothing) * slope * self.row_weight[part]).unsqueeze(1)
        smoothing = (slope * self.smoothing[part]).unsqueeze(1)
        index = self.target[part].unsqueeze(1)
        gradient = exponentials.mul_((towards + smoothing * self.all_weights) / sums)
        if self.how.label_smoothing:
            gradient.sub_(smoothing if self.class_weight is None else smoothing * self.class_weight)
        gradient.scatter_(1, index, gradient.gather(1, index) - towards)
        if tanh is not None:
            gradient.mul_(tanh.square_().neg_().add_(1.0))


def _with_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None, reduction: str,
    ignore_index: int, label_smoothing: float, scale: float, softcap: float, rows: int, needs_hidden: bool,
    needs_weight: bool, needs_bias: bool, later: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns loss, divisor and the gradients of hidden, weight and bias (see `_ChunkedCrossEntropy.run`). Gradients
    that are not needed are empty, and so are those of weight and bias if they are computed `later`, in the backward."""
    how = _LossOptions(reduction, ignore_index, label_smoothing, scale, softcap, rows)
    chunks = _ChunkedCrossEntropy(hidden, weight, bias, target, class_weight, how)
    loss, divisor, gradients = chunks.run(
        hidden=needs_hidden, weight=needs_weight and not later, bias=needs_bias and not later
    )
    of_hidden, of_weight, of_bias = (
        hidden.new_empty(0) if gradient is None or of is None else gradient.to(_gradient_dtype(of.dtype))
        for gradient, of in zip(gradients, (hidden, weight, bias), strict=True)
    )
    return loss, divisor, of_hidden, of_weight, of_bias


with_gradients = torch.library.custom_op(
    "memopt::linear_cross_entropy_with_gradients", _with_gradients, mutates_args=()
)


@with_gradients.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> tuple[Tensor, ...]:
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    loss, divisor = (hidden.new_empty((), dtype=wide) for _ in range(2))
    of_hidden, of_weight, of_bias = (
        of.new_empty(of.shape, dtype=_gradient_dtype(of.dtype)) if of is not None and needed else hidden.new_empty(0)
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
    how = _LossOptions("sum", ignore_index, label_smoothing, scale, softcap, rows)
    chunks = _ChunkedCrossEntropy(hidden, weight, bias, target, class_weight, how)
    found = chunks.run(hidden=False, weight=needs_weight, bias=needs_bias)
    of_weight, of_bias = (
        hidden.new_empty(0) if gradient is None or of is None else gradient.mul_(factor).to(of.dtype)
        for gradient, of in zip(found[2][1:], (weight, bias), strict=True)
    )
    return of_weight, of_bias


weight_gradient = torch.library.custom_op(
    "memopt::linear_cross_entropy_weight_gradient", _weight_gradient, mutates_args=()
)

IMPLEMENTATIONS: dict[Any, Callable[..., Any]] = {
    **OF_ROWS,
    torch.ops.memopt.linear_cross_entropy_with_gradients.default: _with_gradients,
    torch.ops.memopt.linear_cross_entropy_weight_gradient.default: _weight_gradient,
}
"""By operator of this folder that computes in chunks, the Python function that it runs, which allocates as the operator
does, on tensors of any device."""


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
options are those of `_LossOptions`."""


@register_flop_formula(torch.ops.memopt.linear_cross_entropy_with_gradients)
def _flops(hidden: Any, weight: Any, *options: Any, **_: Any) -> int:
    """The operations of one matmul for the logits, and one for the gradient of each matrix."""
    return _matmul(hidden, weight) * (1 + sum(_at_once(options)[:2]))


@register_flop_formula(torch.ops.memopt.linear_cross_entropy_weight_gradient)
def _flops_of_weight_gradient(hidden: Any, weight: Any, *options: Any, **_: Any) -> int:
    return _matmul(hidden, weight) * (1 + options[-2])


def _matmul(hidden: Any, weight: Any) -> int:
    return 2 * hidden[0] * hidden[1] * weight[0]
