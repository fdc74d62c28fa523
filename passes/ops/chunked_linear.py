"""A linear layer whose results are computed, and differentiated, for some rows at a time."""

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
        results are divided by `lift`.
        """
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
