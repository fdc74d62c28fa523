"""The blocks of memory that an operator written in Python allocates, found by running it on tensors without memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from memopt.compat.dispatch import plain_tensors
from memopt.compat.fakes import FakeTensorMode
from memopt.device.block_calls import BlockCalls
from memopt.device.op_call import OpCall, describe, tensors_in
from memopt.solver.problem import BlockCall
from passes.ops.linear_cross_entropy import IMPLEMENTATIONS

NOTABLE = 1024**2
"""Workspace blocks of fewer bytes have a pool of their own, and make no holes in which larger ones would lie."""


@dataclass(frozen=True)
class Rehearsal:
    """The allocator's calls while an operator runs, and the most bytes alive beside its results."""

    calls: tuple[BlockCall, ...]
    """Without those of small workspace blocks."""
    workspace_bytes: int


def rehearse(
    call: OpCall, kernel_bytes: Callable[[OpCall], int], block_bytes: int = 1, *, device: str = "cpu"
) -> Rehearsal | None:
    """The operator run on the CPU or on "meta", which stands for a card whose allocator rounds blocks up to multiples
    of `block_bytes`; None for operators that are not written in Python. `kernel_bytes` says what the kernel of a call
    within the operator holds beside its inputs and outputs."""
    implementation = IMPLEMENTATIONS.get(call.op)
    if implementation is None:
        return None
    record = _Record(kernel_bytes, block_bytes)
    with plain_tensors(), torch.no_grad(), FakeTensorMode() if device == "cpu" else nullcontext():
        args, kwargs = call.make_arguments(device)
        with record:
            results = list(tensors_in(implementation(*args, **kwargs)))
        return record.seen_from_outside(results)


class _Record(BlockCalls):  # type: ignore[no-untyped-call]
    """Lists the calls of the operators that run on meta tensors, the workspaces of kernels included."""

    def __init__(self, kernel_bytes: Callable[[OpCall], int], block_bytes: int) -> None:
        super().__init__(block_bytes=block_bytes)
        self.kernel_bytes, self.block_bytes = kernel_bytes, block_bytes

    def workspace_bytes(self, func: Any, args: Any, kwargs: Any, result: Any) -> int:
        """The bytes of the kernel's workspace."""
        nbytes = self.kernel_bytes(describe(func, args, kwargs, result))
        return -(-nbytes // self.block_bytes) * self.block_bytes

    def seen_from_outside(self, results: Sequence[torch.Tensor]) -> Rehearsal:
        """The calls with the results' blocks first in number, and without the workspace's small ones."""
        storages = [tensor.untyped_storage() for tensor in results]
        made = {self.number[storage]: at for at, storage in enumerate(storages) if storage in self.number}
        named = [(made.get(number, len(results) + number), makes, nbytes) for makes, number, nbytes in self.calls]
        shown = (BlockCall(makes, at, size) for at, makes, size in named if at < len(results) or size > NOTABLE)
        alive = accumulate(nbytes if makes else -nbytes for makes, _, nbytes in self.calls)
        return Rehearsal(tuple(shown), max(alive, default=0) - sum(self.sizes[number] for number in made))
