"""A linear layer whose results are computed, and differentiated, for some rows at a time; and its cross entropy.

After Liger-Kernel (Hsu et al. 2024, arXiv:2410.10989): the gradients of the cross entropy are computed with the loss,
while the logits of a chunk are there, so that no logits are computed twice. They are those of the *sum* over the rows:
the division by the number of targets and the incoming gradient, a loss scale perhaps, come in the backward as one
factor in fp32, so that small gradients are not lost in 16 bits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

LARGEST_SHARE = 8
"""A chunk holds at most one in this many rows."""
_LEAST_ROWS = 512
_ALIGNED = 8
"""Numbers of 16 bits in 16 bytes. On an H100 a chunk of 1,024 rows of 1,024 features and 50,257 classes took 1.11, 0.79
and 0.86 ms for the logits and the gradients of the rows and of the weight, and 0.16, 0.15 and 0.33 with 50,264."""


def chunk_rows(rows: int, width: int) -> int:
    """Returns the number of rows in a chunk, for `rows` rows of `width` features: an eighth of the rows, at most half
    of `width` or 512, whichever is more.

    Where `width` is 1,024 or more, the logits of a chunk have at most half as many elements as the weight's gradient.
    """
    return max(1, min(-(-rows // LARGEST_SHARE), max(_LEAST_ROWS, width // 2)))


class ChunkedLinear:
    """A linear layer and its input, for computing logits and gradients for some rows at a time.

    Args:
        hidden: [rows, width].
        weight: [classes, width]; used in the dtype of `hidden`.
        bias: [classes], or None.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self.hidden = hidden
        self.wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        """The dtype in which the weight's gradient is summed."""
        self.classes = weight.shape[0]
        # A card multiplies 16-bit matrices much faster where their sizes are multiples of 8. A dry run for one is on
        # "meta".
        pads = hidden.device.type != "cpu" and hidden.element_size() == 2
        self.padding = -self.classes % _ALIGNED if pads else 0
        self.weight = self.padded(weight)
        self.bias = None if bias is None else self.padded(bias)

    def padded(self, given: Tensor) -> Tensor:
        """Returns `given`, a weight or bias, in the dtype of `hidden`, with `self.padding` classes of zeros
        appended."""
        if not self.padding:
            return given.to(self.hidden.dtype)
        padded = self.hidden.new_empty(self.classes + self.padding, *given.shape[1:])
        padded[: self.classes].copy_(given)
        padded[self.classes :].zero_()
        return padded

    def logits(self, part: slice) -> Tensor:
        """Returns the logits of the rows `part`, [chunk, classes], in the dtype of `hidden`."""
        return F.linear(self.hidden[part], self.weight, self.bias)[:, : self.classes]

    def spread(
        self, gradient: Tensor, part: slice, of_hidden: Tensor | None, of_weight: Tensor | None, lift: float = 1.0
    ) -> None:
        """Computes the gradients of the layer from that of a chunk's logits, `gradient`, [chunk, classes].

        Writes the rows `part` of `of_hidden`, [rows, width], and adds to `of_weight`, [classes, width], which is in
        fp32, or in fp64 for fp64 input; where one is None, that gradient is not computed. The logits' gradient is
        multiplied with `lift` while it is in the dtype of `hidden`, so that small values do not become 0, and the
        results are divided by `lift`."""
        hidden, low = self.hidden[part], self.hidden.dtype
        narrow = gradient * lift if lift != 1.0 and low != self.wide else gradient
        if low != self.wide and self.padding:
            wide = narrow
            narrow = hidden.new_empty(len(hidden), self.classes + self.padding)
            narrow[:, : self.classes].copy_(wide)
            narrow[:, self.classes :].zero_()
            del wide
        else:
            narrow = narrow.to(low)
        if of_hidden is not None and lift == 1.0:
            torch.mm(narrow, self.weight, out=of_hidden[part])
        elif of_hidden is not None:
            of_hidden[part] = torch.mm(narrow, self.weight)
            of_hidden[part].div_(lift)
        if of_weight is None:
            return
        if low == self.wide or hidden.device.type == "cpu":
            of_weight.addmm_(gradient.to(self.wide).t(), hidden.to(self.wide))
        else:
            # Its matrix units read 16 bits and sum in fp32.
            torch.addmm(
                of_weight, narrow[:, : self.classes].t(), hidden, alpha=1 / lift, out_dtype=self.wide, out=of_weight
            )


# Gradients of logits lie between -1 and 1 and are as small as probabilities: lifted into fp16's range for its matmul.
_FP16_LIFT = 128.0


@dataclass(frozen=True)
class LossOptions:
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


@dataclass(frozen=True)
class _Result:
    """Loss, a scalar; what its mean was divided by, a scalar (1 for a sum); and the gradients of the undivided sum."""

    loss: Tensor
    divisor: Tensor
    hidden: Tensor | None = None
    """[rows, width]"""
    weight: Tensor | None = None
    """[classes, width]"""
    bias: Tensor | None = None
    """[classes]"""


def gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which the gradient of an input of dtype `dtype` is held from the forward to the backward:
    fp32 for fp16, in which sums overflow, else `dtype`."""
    return torch.float32 if dtype == torch.float16 else dtype


class ChunkedCrossEntropy:
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
        how: LossOptions,
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

    def run(self, *, hidden: bool, weight: bool, bias: bool) -> _Result:
        """Returns the loss, and the gradients of those of `hidden`, `weight` and `bias` that are True."""
        given = self.layer.hidden
        rows, width = given.shape
        make = given.new_zeros
        of_hidden = given.new_empty((rows, width), dtype=gradient_dtype(given.dtype)) if hidden else None
        of_weight = make((self.layer.classes, width), dtype=self.wide) if weight else None
        of_bias = make(self.layer.classes, dtype=self.wide) if bias else None
        total = make((), dtype=self.wide)
        size = self.how.rows or chunk_rows(rows, width)
        for start in range(0, rows, size):
            total += self._chunk(slice(start, min(start + size, rows)), of_hidden, of_weight, of_bias)
        divisor = self.row_weight.sum() if self.how.reduction == "mean" else torch.ones_like(total)
        return _Result(total / divisor, divisor, of_hidden, of_weight, of_bias)

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
