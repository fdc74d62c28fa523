"""What lies on the card beside a step, as torch's allocator counts it."""

from __future__ import annotations

import torch
from torch import nn

from memopt.account.account import BOOKKEEPING_BYTES
from memopt.account.elsewhere import Around, look

MB = 1024**2


def test_blocks_that_the_allocator_does_not_split_are_nothing_elsewhere() -> None:
    """The parameter takes the place of a tensor that was a little larger, and its block has the rest, too."""
    device = torch.device("cuda", 0)
    before = look(nn.Linear(1, 1, device=device), device, Around()).other
    larger = torch.empty(30 * MB, dtype=torch.uint8, device=device)
    del larger
    model = nn.Linear(1024, 30 * 256 - 100, bias=False, device=device)
    assert look(model, device, Around()).other - before <= BOOKKEEPING_BYTES
