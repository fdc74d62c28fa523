"""`memopt::linear_rows`: numbers computed from each row of linear layers' results, which are never held.

What is computed from a row is a *program*: calls of ATen operators that treat each row alone, written as text. The
operator runs it for one chunk of rows after the other. In the backward the logits of a chunk are computed once more,
and autograd differentiates the program, so that the loss of each token, its log probability, an entropy, and a
divergence from another layer's logits all have their gradients.

A program for the log probabilities of the classes in `r0`, from the logits `x0`:

    x0, r0: a = aten.log_softmax.int(x0, -1); b = aten.gather.default(a, -1, r0); return [b]
"""

import itertools
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from passes.compat import define_operator

LARGEST_SHARE = 8
"""A chunk holds at most one in this many rows."""
_LEAST_ROWS = 512
_ALIGNED = 8
"""Numbers of 16 bits in 16 bytes. On an H100 a chunk of 1,024 rows of 1,024 features and 50,257 classes took 1.11, 0.79
and 0.86 ms for the logits and the gradients of the rows and of the weight, and 0.16, 0.15 and 0.33 with 50,264."""
_MORE_VALUES = 2
"""A program holds more values of its logits' size than the cross entropy does: its chunks have half the rows."""
_GLOBALS = {"aten": torch.ops.aten, "torch": torch, "device": torch.device, "inf": float("inf"), "nan": float("nan")}

_OPERANDS = "Tensor[] hidden, Tensor[] weight, Tensor[] bias, Tensor[] rows, Tensor[] whole"
_OPTIONS = "int[] biased, str program, int chunk"


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
        """Returns a weight or bias in the dtype of `hidden`, with `self.padding` classes of zeros appended."""
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


@lru_cache(maxsize=256)
def _compiled(program: str) -> Callable[..., list[Tensor]]:
    """Returns the function of a program. Its parameters are ahead of the colon: logits, rows, whole values."""
    made: dict[str, Any] = {}
    parameters, _, body = program.partition(": ")
    exec(f"def rows({parameters}): {body}", dict(_GLOBALS), made)
    function: Callable[..., list[Tensor]] = made["rows"]
    return function


def _layers(hidden: list[Tensor], weight: list[Tensor], bias: list[Tensor], biased: list[int]) -> list[ChunkedLinear]:
    biases = dict(zip(biased, bias, strict=True))
    pairs = enumerate(zip(hidden, weight, strict=True))
    return [ChunkedLinear(given, matrix, biases.get(at)) for at, (given, matrix) in pairs]


def _chunks(hidden: Tensor, chunk: int) -> list[slice]:
    """Returns the rows of each chunk as slices; one empty slice where there are no rows."""
    rows, width = hidden.shape
    size = chunk or -(-chunk_rows(rows, width) // _MORE_VALUES)
    return [slice(start, min(start + size, rows)) for start in range(0, max(1, rows), size)]


def _forward(
    hidden: list[Tensor], weight: list[Tensor], bias: list[Tensor], rows: list[Tensor], whole: list[Tensor],
    biased: list[int], program: str, chunk: int,
) -> list[Tensor]:  # fmt: skip
    layers, found = _layers(hidden, weight, bias, biased), list[Tensor]()
    for part in _chunks(hidden[0], chunk):
        results = _compiled(program)(*(layer.logits(part) for layer in layers), *(one[part] for one in rows), *whole)
        found = found or [result.new_empty((len(hidden[0]), *result.shape[1:])) for result in results]
        for whole_result, result in zip(found, results, strict=True):
            whole_result[part] = result
    return found


def _backward(
    gradients: list[Tensor | None], hidden: list[Tensor], weight: list[Tensor], bias: list[Tensor],
    rows: list[Tensor], whole: list[Tensor], biased: list[int], program: str, chunk: int, *, needs: list[bool],
) -> list[Tensor]:  # fmt: skip
    """Returns the gradients of the operands that need one, by `needs`, which has an entry for each, in their order.
    What is summed over the rows is summed in fp32 (fp64 for fp64)."""
    groups = (hidden, False), (weight, True), (bias, True), (rows, False), (whole, True)
    remaining = iter(needs)
    made = [[_zeros(one, summed) if next(remaining) else None for one in group] for group, summed in groups]
    of_hidden, of_weight, of_bias, of_rows, of_whole = made
    biases = dict(zip(biased, of_bias, strict=True))
    layers = [
        (layer, of_hidden[at], of_weight[at], biases.get(at))
        for at, layer in enumerate(_layers(hidden, weight, bias, biased))
    ]
    others = [(one, of, False) for one, of in zip(rows, of_rows, strict=True)]
    others += [(one, of, True) for one, of in zip(whole, of_whole, strict=True)]
    for part in _chunks(hidden[0], chunk):
        given = [None if gradient is None else gradient[part] for gradient in gradients]
        _differentiate(part, given, layers, others, program)
    pairs = zip([*hidden, *weight, *bias, *rows, *whole], itertools.chain(*made), strict=True)
    return [of.to(one.dtype) for one, of in pairs if of is not None]


def _zeros(operand: Tensor, summed: bool) -> Tensor:
    wide = torch.promote_types(operand.dtype, torch.float32)
    return operand.new_zeros(operand.shape, dtype=wide if summed else operand.dtype)


_Layer: TypeAlias = tuple[ChunkedLinear, Tensor | None, Tensor | None, Tensor | None]
"""A layer, and the gradients of its input, weight and bias; None where one needs none."""
_Other: TypeAlias = tuple[Tensor, Tensor | None, bool]
"""An operand, its gradient or None, and whether that is a sum over the rows."""


def _differentiate(
    part: slice, gradients: list[Tensor | None], layers: list[_Layer], others: list[_Other], program: str
) -> None:
    """Adds the gradients of a chunk. What it allocates is freed when it returns."""
    leaves = [layer.logits(part).detach().requires_grad_(any(of is not None for of in made)) for layer, *made in layers]
    leaves += [(one if summed else one[part]).detach().requires_grad_(of is not None) for one, of, summed in others]
    with torch.enable_grad():
        results = _compiled(program)(*leaves)
    pairs = [pair for pair in zip(results, gradients, strict=True) if pair[0].requires_grad and pair[1] is not None]
    learned = [leaf for leaf in leaves if leaf.requires_grad]
    if not pairs:
        return
    outputs, given = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(outputs, learned, given, allow_unused=True))
    of_leaves = [next(found) if leaf.requires_grad else None for leaf in leaves]
    del found, results, pairs, outputs, learned, leaves
    for (layer, of_hidden, of_weight, of_bias), gradient in zip(layers, of_leaves, strict=False):
        if gradient is not None:
            if of_bias is not None:
                of_bias += gradient.sum(0, dtype=of_bias.dtype)
            layer.spread(gradient, part, of_hidden, of_weight)
    for (_, of, summed), gradient in zip(others, of_leaves[len(layers) :], strict=True):
        if of is not None and gradient is not None:
            target = of if summed else of[part]
            target += gradient


def _fake(
    hidden: list[Tensor], weight: list[Tensor], bias: list[Tensor], rows: list[Tensor], whole: list[Tensor],
    biased: list[int], program: str, chunk: int,
) -> list[Tensor]:  # fmt: skip
    # Of two rows, since operators take shortcuts on symbolic sizes that end in other shapes (nll_loss, torch 2.13).
    logits = [one.new_empty((2, matrix.shape[0])) for one, matrix in zip(hidden, weight, strict=True)]
    results = _compiled(program)(*logits, *(one.new_empty((2, *one.shape[1:])) for one in rows), *whole)
    return [result.new_empty((hidden[0].shape[0], *result.shape[1:])) for result in results]


def _fake_backward(gradients: list[Tensor | None], *given: Any, needs: list[bool]) -> list[Tensor]:
    operands = itertools.chain(*given[:5])
    return [one.new_empty(one.shape) for one, needed in zip(operands, needs, strict=True) if needed]


LINEAR_ROWS: Any = define_operator(f"linear_rows({_OPERANDS}, {_OPTIONS}) -> Tensor[]", _forward, _fake)
"""The results of a program, each [rows, ...].

`hidden` has for each layer its input, [rows, width], and `weight` its weight, [classes, width], which is used in the
dtype of its input. `bias` has the biases, [classes], of the layers whose numbers are in `biased`. `rows` are values
with an entry for each row, [rows, ...], `whole` those that are the same for all. `chunk` is the number of rows in a
chunk; 0: half of `chunk_rows`."""
_BACKWARD: Any = define_operator(
    f"linear_rows_backward(Tensor?[] gradients, {_OPERANDS}, {_OPTIONS}, *, bool[] needs) -> Tensor[]",
    _backward,
    _fake_backward,
)
IMPLEMENTATIONS: dict[Any, Callable[..., Any]] = {LINEAR_ROWS: _forward, _BACKWARD: _backward}
"""By operator, the Python function that it runs."""


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.sizes, ctx.options = [len(group) for group in inputs[:5]], inputs[5:]
    ctx.save_for_backward(*itertools.chain(*inputs[:5]))


def _of_operands(ctx: Any, gradients: list[Tensor | None]) -> tuple[Any, ...]:
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "the chunked loss (ChunkLoss, operator linear_rows) has no gradients of gradients; leave 'chunked_loss' "
            "out of allow, or ChunkLoss out of passes"
        )
    groups: Any = ctx.needs_input_grad[:5]
    needs = [needed for group in groups for needed in group]
    saved = iter(ctx.saved_tensors)
    operands = [[next(saved) for _ in range(size)] for size in ctx.sizes]
    found = iter(_BACKWARD(gradients, *operands, *ctx.options, needs=needs))
    biased, *_ = ctx.options
    return (
        *([next(found) if needed else None for needed in group] for group in groups),
        None if biased else [],
        None,
        None,
    )


torch.library.register_autograd("memopt::linear_rows", _of_operands, setup_context=_keep)


@register_flop_formula(torch.ops.memopt.linear_rows)
def _flops(hidden: Any, weight: Any, *options: Any, **_: Any) -> int:
    """The operations of one product for each layer's logits."""
    return sum(2 * rows * width * classes for (rows, width), (classes, _) in zip(hidden, weight, strict=True))


@register_flop_formula(torch.ops.memopt.linear_rows_backward)
def _flops_of_backward(gradients: Any, hidden: Any, weight: Any, *options: Any, needs: Any, **_: Any) -> int:
    """One product for each layer's logits, and one for the gradient of each matrix."""
    products = zip(hidden, weight, needs, needs[len(hidden) :], strict=False)
    return sum(_flops([one], [matrix]) * (1 + of_one + of_matrix) for one, matrix, of_one, of_matrix in products)
