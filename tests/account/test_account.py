from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from memopt.account.account import BOOKKEEPING_BYTES, Account, account_of, distinct_bytes
from memopt.account.optimizer_trial import LiveOptimizer
from memopt.device import hardware

CPU = hardware("cpu")
KB, MB = 1024, 1024**2
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
    account = account_of(model, inputs, None, hardware("cpu"))
    assert account.inputs == 24


@pytest.mark.parametrize(("card", "workspace"), [("h100", 32 * MB), ("rtx-4090", 8 * MB + 128 * KB)])
def test_on_a_card_blocks_are_rounded_and_libraries_and_the_context_counted(card: str, workspace: int) -> None:
    model = nn.Linear(8, 8, device="meta")
    account = account_of(model, [torch.randn(6, device="meta")], None, hardware(card))
    assert account.inputs == 512
    assert account.parameters == account.gradients == 1024
    context = {"h100": 770 * MB, "rtx-4090": 512 * MB}[card]
    assert account.reserve == BOOKKEEPING_BYTES + context + 2 * (workspace + MB)
    assert account.context == account.uncounted_bytes == context


def test_on_a_card_sparse_buffers_count_by_what_they_hold() -> None:
    """They are not copied before a step, as other small buffers are."""
    model = nn.Linear(4, 4)
    bare = account_of(model, (), None, hardware("t4")).buffers
    model.register_buffer("adjacency", torch.eye(64).to_sparse())
    assert account_of(model, (), None, hardware("t4")).buffers == bare + 2 * 64 * 8 + 512


def test_adam_keeps_two_numbers_a_parameter() -> None:
    account = account_of(Tied(), [], torch.optim.AdamW, CPU)
    assert 2 * account.gradients <= account.optimizer_state <= 2 * account.gradients + 8
    assert account.optimizer_temporaries > 0


def test_trained_parameters_are_in_the_order_of_the_optimizer() -> None:
    """The allocator's blocks lie in that order, not in that in which the forward reads them."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))
    live = LiveOptimizer.of(torch.optim.SGD(reversed(list(model.parameters())), lr=0.1))
    model[0].bias.requires_grad_(False)
    common: dict[str, Any] = {"inputs": [], "optimizer": torch.optim.SGD, "card": hardware("h100")}
    assert account_of(model, **common).trained == (24, 48, 16)
    assert account_of(model, **common, live=live).trained == (16, 48, 24)


def test_distinct_bytes() -> None:
    x = torch.zeros(10)
    assert distinct_bytes([x, x[3:], x.view(2, 5), x.clone(), torch.zeros(0)]) == 80
    assert distinct_bytes([x, torch.zeros(1)], 512) == 1024
    meta = torch.empty(1000, device="meta")
    assert distinct_bytes([meta, meta, torch.empty_like(meta)]) == 8000
    assert distinct_bytes([]) == 0


def test_resident_bytes() -> None:
    assert ACCOUNT.resident_bytes == 1000 + 30 + 200 + 2000 + 16
    assert replace(ACCOUNT, gradients_held=True).resident_bytes == ACCOUNT.resident_bytes + 900
    assert replace(ACCOUNT, other_forwards=70).resident_bytes == ACCOUNT.resident_bytes + 70
    allocator = replace(ACCOUNT, rounding=3, fragmentation=4)
    assert allocator.resident_bytes == ACCOUNT.resident_bytes + 7
    assert allocator.uncounted_bytes == 4


def test_the_optimizer_step_holds_all_gradients_and_the_outputs() -> None:
    expected = ACCOUNT.resident_bytes + 900 + 40 + 5
    assert ACCOUNT.optimizer_step_bytes(outputs=5) == expected
    assert replace(ACCOUNT, gradients_held=True).optimizer_step_bytes(outputs=5) == expected, "gradients count once"
