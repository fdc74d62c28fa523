from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from memopt.budget.account import BOOKKEEPING_BYTES, CUDA_RESERVE_BYTES, Account, account_of, distinct_bytes

CPU = torch.device("cpu")
ACCOUNT = Account(
    parameters=1000, buffers=30, inputs=200, optimizer_state=2000, optimizer_temporaries=40, gradients=900, reserve=16
)


class Tied(nn.Module):
    """Embedding and head share a weight; a frozen layer; a buffer that is a view of another."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("positions", torch.arange(8))
        self.register_buffer("first", self.positions[:2])


def test_each_storage_counts_once() -> None:
    account = account_of(Tied(), [], None, CPU)
    assert account.parameters == (10 * 4 + 4 * 4 + 4) * 4
    assert account.buffers == 8 * 8
    assert account.gradients == 10 * 4 * 4, "of what is trained only"
    assert account.optimizer_state == account.optimizer_temporaries == 0
    assert account.reserve == BOOKKEEPING_BYTES


def test_inputs_on_the_device_count_once_as_what_they_hold() -> None:
    x = torch.randn(6, 8)
    given = [x, x[:2], torch.randn(3, device="meta"), torch.zeros(1).expand(50)]
    assert account_of(nn.Linear(8, 8), given, None, CPU).inputs == 6 * 8 * 4 + 3 * 4 + 4


def test_inputs_elsewhere_do_not_count() -> None:
    model = nn.Linear(8, 8, device="meta")
    inputs = [torch.randn(6), torch.randn(6, device="meta")]
    account = account_of(model, inputs, None, torch.device("cuda"))
    assert account.inputs == 24
    assert account.parameters == account.gradients == (64 + 8) * 4
    assert account.reserve == BOOKKEEPING_BYTES + CUDA_RESERVE_BYTES


def test_adam_keeps_two_numbers_a_parameter() -> None:
    account = account_of(Tied(), [], torch.optim.AdamW, CPU)
    assert 2 * account.gradients <= account.optimizer_state <= 2 * account.gradients + 8
    assert account.optimizer_temporaries > 0


def test_distinct_bytes() -> None:
    x = torch.zeros(10)
    assert distinct_bytes([x, x[3:], x.view(2, 5), x.clone(), torch.zeros(0)]) == 80
    meta = torch.empty(1000, device="meta")
    assert distinct_bytes([meta, meta, torch.empty_like(meta)]) == 8000
    assert distinct_bytes([]) == 0


def test_resident_bytes() -> None:
    assert ACCOUNT.resident_bytes == 1000 + 30 + 200 + 2000 + 16
    assert replace(ACCOUNT, gradients_held=True).resident_bytes == ACCOUNT.resident_bytes + 900
    assert replace(ACCOUNT, other_forwards=70).resident_bytes == ACCOUNT.resident_bytes + 70
    assert replace(ACCOUNT, between_regions=8).resident_bytes == ACCOUNT.resident_bytes + 8


def test_the_optimizer_step_holds_all_gradients_and_the_outputs() -> None:
    expected = ACCOUNT.resident_bytes + 900 + 40 + 5
    assert ACCOUNT.optimizer_step_bytes(outputs=5) == expected
    assert replace(ACCOUNT, gradients_held=True).optimizer_step_bytes(outputs=5) == expected, "gradients count once"
