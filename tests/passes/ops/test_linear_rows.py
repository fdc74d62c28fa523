"""`memopt::linear_rows`: its gradients, its chunks, and what it allocates."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from memopt.device.hardware import LARGE
from memopt.device.op_call import describe
from memopt.device.workspace import estimate_workspace, op_dry_run
from passes.ops.linear_rows import LINEAR_ROWS

ROWS, WIDTH, CLASSES = 23, 4, 11
PROGRAM = (
    "x0, x1, r0, r1, w0: a = aten.mul.Tensor(x0, w0); b = aten.log_softmax.int(a, -1); "
    "c = aten.gather.default(b, -1, r0); d = aten.mul.Tensor(b, aten.softmax.int(x1, -1)); "
    "e = aten.sum.dim_IntList(aten.mul.Tensor(d, r1), [-1]); return [c, e]"
)


def operands(dtype: torch.dtype = torch.float64, rows: int = ROWS) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (rows, WIDTH), (CLASSES, WIDTH), (CLASSES,), (rows, 2), (CLASSES, 2), (rows, CLASSES), ()
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def picked(rows: int = ROWS) -> Tensor:
    return torch.arange(rows).unsqueeze(1) % CLASSES


def in_chunks(hidden: Tensor, weight: Tensor, bias: Tensor, *others: Tensor, chunk: int = 5) -> Any:
    other, matrix, mask, scale = others
    rows = [picked(len(hidden)), mask]
    return LINEAR_ROWS([hidden, other], [weight, matrix], [bias], rows, [scale], [0], PROGRAM, chunk)


def plain(hidden: Tensor, weight: Tensor, bias: Tensor, *others: Tensor) -> list[Tensor]:
    other, matrix, mask, scale = others
    logarithms = (F.linear(hidden, weight, bias) * scale).log_softmax(-1)
    return [
        logarithms.gather(-1, picked(len(hidden))),
        (logarithms * F.linear(other, matrix).softmax(-1) * mask).sum(-1),
    ]


def test_gradients_in_double_precision() -> None:
    assert torch.autograd.gradcheck(lambda *given: tuple(in_chunks(*given)), operands(rows=7))


@pytest.mark.parametrize("chunk", [0, 1, 5, ROWS, 100])
@pytest.mark.parametrize("used", [[0], [1], [0, 1]])
def test_equal_to_the_plain_operators(chunk: int, used: list[int]) -> None:
    """Also where only one of the results has a gradient."""
    given = operands()
    sums = []
    for results in (plain(*given), in_chunks(*given, chunk=chunk)):
        loss = torch.stack([(results[at] ** 2).sum() for at in used]).sum()
        sums.append((*results, *torch.autograd.grad(loss, given, allow_unused=True, materialize_grads=True)))
    for expected, found in zip(*sums, strict=True):
        torch.testing.assert_close(found, expected)


def test_no_rows() -> None:
    given = operands(rows=0)
    chosen, weighted = in_chunks(*given)
    assert (chosen.shape, weighted.shape) == ((0, 1), (0,))
    for gradient in torch.autograd.grad(chosen.sum() + weighted.sum(), given):
        assert not gradient.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_in_fp32_have_gradients_in_fp32(dtype: torch.dtype) -> None:
    given = operands(torch.float32)
    low = [one.detach().to(dtype).requires_grad_() if at in (0, 3) else one for at, one in enumerate(given)]
    (chosen, _) = in_chunks(*low)
    assert chosen.dtype == dtype
    found = torch.autograd.grad(chosen.sum(), low[:3])
    expected = torch.autograd.grad(plain(*given)[0].sum(), given[:3])
    assert [one.dtype for one in found] == [dtype, torch.float32, torch.float32]
    for one, other in zip(found, expected, strict=True):
        assert (one.float() - other).norm() < 0.02 * other.norm()


def test_gradients_of_gradients_are_refused() -> None:
    given = operands()
    with pytest.raises(NotImplementedError, match="no gradients of gradients"):
        torch.autograd.grad(in_chunks(*given)[1].sum(), given, create_graph=True)


def test_operator_is_registered_as_torch_wants_it() -> None:
    other, matrix, mask, scale = (given := operands())[3:]
    rows = [picked(), mask]
    arguments = ([given[0], other], [given[1], matrix], [given[2]], rows, [scale], [0], PROGRAM, 5)
    torch.library.opcheck(LINEAR_ROWS, arguments)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_chunk_is_all_that_is_held(dtype: torch.dtype) -> None:
    """On a card, of 2,048 rows of 8,192 classes: some values of a sixteenth of the logits, less than by the rule."""
    hidden, weight = torch.empty(2048, 256, dtype=dtype, device="meta"), torch.empty(8192, 256, device="meta")
    target = torch.empty(2048, 1, dtype=torch.int64, device="meta")
    program = "x0, r0: a = aten.log_softmax.int(x0, -1); b = aten.gather.default(a, -1, r0); return [b]"
    given = [hidden], [weight], [], [target], [], [], program, 0
    results = LINEAR_ROWS(*given)
    backward = torch.ops.memopt.linear_rows_backward.default
    needs = {"needs": [True, True, False]}
    logits = 4 * 2048 * 8192
    for operator, arguments, keywords in ((LINEAR_ROWS, given, {}), (backward, (results, *given), needs)):
        call = describe(operator, arguments, keywords, operator(*arguments, **keywords))
        dry_run = op_dry_run(call, "cuda", LARGE)
        assert dry_run is not None
        assert 0 < dry_run.workspace_bytes <= min(logits // 2, estimate_workspace(call, "cuda"))
        freed = {one.block for one in dry_run.calls if not one.allocates}
        assert freed == {one.block for one in dry_run.calls if one.allocates and one.block >= len(call.outputs)}
