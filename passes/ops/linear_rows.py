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
from torch.utils.flop_counter import register_flop_formula

from passes.compat import define_operator
from passes.ops.chunked import ChunkedLinear, chunk_rows
from passes.ops.linear_cross_entropy import IMPLEMENTATIONS as OF_LOSSES

_MORE_VALUES = 2
"""A program holds more values of its logits' size than the cross entropy does: its chunks have half the rows."""
_GLOBALS = {"aten": torch.ops.aten, "torch": torch, "device": torch.device, "inf": float("inf"), "nan": float("nan")}

_OPERANDS = "Tensor[] hidden, Tensor[] weight, Tensor[] bias, Tensor[] rows, Tensor[] whole"
_OPTIONS = "int[] biased, str program, int chunk"


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
IMPLEMENTATIONS: dict[Any, Callable[..., Any]] = {**OF_LOSSES, LINEAR_ROWS: _forward, _BACKWARD: _backward}
"""By operator of this folder that computes in chunks, the Python function that it runs, which allocates as the operator
does, on tensors of any device."""


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
