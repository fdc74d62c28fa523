"""Tensors that are no arrays of numbers in memory: a step with them trains as the plain model where that fits, and is
refused otherwise by a sentence that names their kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from tests.elsewhere import counted

__all__ = ["counted"]

ROOMY_GB, TINY_GB = 4.0, 1e-5
GENERATOR = torch.Generator().manual_seed(0)
COO = torch.sparse_coo_tensor(
    torch.randint(0, 64, (2, 400), generator=GENERATOR), torch.rand(400, generator=GENERATOR), (64, 64)
).coalesce()
DENSE, ROWS = COO.to_dense(), torch.randn(64, 16, generator=GENERATOR)
ITEMS = [torch.randn(rows, 16, generator=GENERATOR) for rows in (5, 3, 7)]


class Net(nn.Module):
    """Two layers with a product of another tensor between them, which is a buffer or an argument."""

    def __init__(self, product: Callable[[Any, Tensor], Tensor], held: Tensor | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("held", held)
        self.product, self.first, self.last = product, nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor, given: Any = None) -> Tensor:
        x = self.product(self.held if given is None else given, torch.tanh(self.first(x)))
        return self.last(x).square().mean()


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, nested: Tensor) -> Tensor:
        return self.last(torch.cat(list(torch.relu(self.first(nested)).unbind()))).square().mean()


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.last = nn.Embedding(100, 16, sparse=True), nn.Linear(16, 1)

    def forward(self, words: Tensor) -> Tensor:
        return self.last(torch.tanh(self.table(words))).square().mean()


class Packed(nn.Module):
    """Jagged tensors made within the forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 1)

    def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
        nested = torch.nested.nested_tensor_from_jagged(self.first(rows), offsets)
        return self.last(torch.relu(self.norm(nested)).values()).square().mean()


def from_quantized(held: Tensor, x: Tensor) -> Tensor:
    return held.dequantize() @ x


def from_special(held: Tensor, x: Tensor) -> Tensor:
    return held.to_dense() @ x


def made_sparse(held: Tensor, x: Tensor) -> Tensor:
    return torch.sparse.mm(held.to_sparse(), x)


CASES: dict[str, tuple[str, Callable[[], nn.Module], tuple[Any, ...]]] = {
    "COO buffer": ("sparse COO", lambda: Net(torch.sparse.mm, COO), (ROWS,)),
    "COO input": ("sparse COO", lambda: Net(torch.sparse.mm, None), (ROWS, COO)),
    "not coalesced": ("sparse COO", lambda: Net(torch.sparse.mm, None), (ROWS, (COO + COO))),
    "CSR buffer": ("sparse CSR", lambda: Net(torch.sparse.mm, COO.to_sparse_csr()), (ROWS,)),
    "CSR input": ("sparse CSR", lambda: Net(torch.sparse.mm, None), (ROWS, COO.to_sparse_csr())),
    "CSC buffer": ("sparse CSC", lambda: Net(torch.matmul, COO.to_sparse_csc()), (ROWS,)),
    "BSR buffer": ("sparse BSR", lambda: Net(from_special, DENSE.to_sparse_bsr((4, 4))), (ROWS,)),
    "quantized buffer": (
        "quantized",
        lambda: Net(from_quantized, torch.quantize_per_tensor(DENSE, 0.1, 0, torch.qint8)),
        (ROWS,),
    ),
    "quantized by channel": (
        "quantized",
        lambda: Net(from_quantized, torch.quantize_per_channel(DENSE, torch.ones(64), torch.zeros(64), 0, torch.qint8)),
        (ROWS,),
    ),
    "mkldnn buffer": ("mkldnn", lambda: Net(from_special, DENSE.to_mkldnn()), (ROWS,)),
    "jagged input": ("jagged nested", Nested, (torch.nested.nested_tensor(ITEMS, layout=torch.jagged),)),
    "strided nested input": ("strided nested", Nested, (torch.nested.nested_tensor(ITEMS),)),
    "sparse gradients": ("sparse", Words, (torch.randint(0, 100, (8, 5), generator=GENERATOR),)),
    "sparse within": ("too small", lambda: Net(made_sparse, DENSE), (ROWS,)),
    "jagged within": (
        "jagged nested",
        Packed,
        (torch.randn(20, 16, generator=GENERATOR), torch.tensor([0, 6, 14, 20])),
    ),
}


def optimized(model: nn.Module, budget_gb: float, **options: Any) -> nn.Module:
    return memopt.optimize(model.train(), budget_gb, precision="fp32", allow={"recompute", "reinplace"}, **options)


@pytest.mark.parametrize("case", CASES)
def test_they_train_where_the_plain_step_fits(case: str) -> None:
    _, make, batch = CASES[case]
    plain, planned = make(), optimized(make(), ROOMY_GB)
    for _ in range(2):
        for model in (plain, planned):
            model(*batch).backward()
    for ours, theirs in zip(planned.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None and theirs.grad is not None:
            assert torch.equal(ours.grad.to_dense(), theirs.grad.to_dense())


@pytest.mark.parametrize("case", CASES)
def test_a_refusal_names_their_kind(case: str) -> None:
    kind, make, batch = CASES[case]
    with pytest.raises((memopt.BudgetError, memopt.CaptureError)) as refused:
        optimized(make(), TINY_GB)(*batch)
    assert kind in str(refused.value), str(refused.value)


@pytest.mark.usefixtures("counted")
def test_those_of_other_code_count_and_are_described() -> None:
    """A sparse tensor shares its memory with the tensors that it was made of."""
    at, values = torch.zeros(2, 20_000, dtype=torch.int64), torch.rand(20_000)
    sparse = torch.sparse_coo_tensor(at, values, (2, 2), check_invariants=False)
    nested = torch.nested.nested_tensor([torch.rand(10_000), torch.rand(20_000)])
    plan = memopt.plan(nn.Linear(4, 1), 1, (torch.ones(2, 4),))
    rounding = plan.account.tolerance // 2
    assert plan.account.elsewhere > at.nbytes + values.nbytes + nested.nbytes - rounding
    (note,) = (note for note in plan.notes if "elsewhere" in note)
    assert "int64 [2, 20000] of 312 kB, float32 nested of 117 kB, float32 [20000] of 78.1 kB" in note
    assert sparse.layout is torch.sparse_coo
