"""The blocks of memory that an operator written in Python allocates on a card, found by running it on tensors without
memory."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch

from memopt.compat.dispatch import plain_tensors
from memopt.device.chip import Chip
from memopt.device.live_bytes import LiveBytes
from memopt.device.op_call import OpCall, describe, tensors_in
from memopt.device.workspace_table import estimate_workspace
from memopt.solver import BlockCall
from passes.patterns.linear_cross_entropy import IMPLEMENTATIONS

_NOTABLE = 1024**2
"""Workspace blocks of fewer bytes have a pool of their own, and make no holes in which larger ones would lie."""


@dataclass(frozen=True)
class Rehearsal:
    """The allocator's calls while an operator runs, and the most bytes alive beside its results."""

    calls: tuple[BlockCall, ...]
    """Without those of small workspace blocks."""
    workspace_bytes: int


@lru_cache(maxsize=256)
def rehearsal(call: OpCall, chip: Chip, block_bytes: int) -> Rehearsal | None:
    """The operator run on a card with that `chip`, whose allocator rounds blocks up to multiples of `block_bytes`; None
    for operators that are not written in Python."""
    implementation = IMPLEMENTATIONS.get(call.op)
    if implementation is None:
        return None
    record = _Record(chip, block_bytes)
    with plain_tensors(), torch.no_grad():
        args, kwargs = call.make_arguments("meta")
        with record:
            results = list(tensors_in(implementation(*args, **kwargs)))
        return record.seen_from_outside(results)


class _Record(LiveBytes):  # type: ignore[no-untyped-call]
    """Lists the allocations and frees of the operators that run on meta tensors, the workspaces of kernels included."""

    def __init__(self, chip: Chip, block_bytes: int) -> None:
        super().__init__(block_bytes=block_bytes)
        self.chip = chip
        self.calls: list[BlockCall] = []
        self._bytes: list[int] = []
        self._number: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The operator's result. What is written to a given tensor needs no run, which torch lacks for some dtypes."""
        return kwargs["out"] if isinstance(kwargs.get("out"), torch.Tensor) else func(*args, **kwargs)

    def count(self, tensors: Any) -> None:
        """Count and list the storages of these tensors that are new."""
        for tensor in tensors_in(tensors):
            storage, before = tensor.untyped_storage(), self.live_bytes
            super().count(tensor)
            if self.live_bytes > before:
                self._number[storage] = self._allocated(self.live_bytes - before)
                weakref.finalize(storage, self._freed, self._number[storage])

    def workspace_bytes(self, func: Any, args: Any, kwargs: Any, result: Any) -> int:
        """The bytes of the kernel's workspace by rule, which are listed as a block that is freed at once."""
        nbytes = self._rounded(estimate_workspace(describe(func, args, kwargs, result), "cuda", self.chip))
        if nbytes:
            self._freed(self._allocated(nbytes))
        return nbytes

    def seen_from_outside(self, results: Sequence[torch.Tensor]) -> Rehearsal:
        """The calls with the results' blocks first in number, and without the workspace's small ones."""
        made = {
            self._number[storage]: at for at, storage in enumerate(map(_storage, results)) if storage in self._number
        }
        named = [(made.get(number, len(results) + number), makes, nbytes) for makes, number, nbytes in self.calls]
        shown = (BlockCall(makes, at, size) for at, makes, size in named if at < len(results) or size > _NOTABLE)
        alive = accumulate(nbytes if makes else -nbytes for makes, _, nbytes in self.calls)
        return Rehearsal(tuple(shown), max(alive, default=0) - sum(self._bytes[number] for number in made))

    def _allocated(self, nbytes: int) -> int:
        self._bytes.append(nbytes)
        self.calls.append(BlockCall(True, len(self._bytes) - 1, nbytes))
        return len(self._bytes) - 1

    def _freed(self, number: int) -> None:
        self.calls.append(BlockCall(False, number, self._bytes[number]))

    def _rounded(self, nbytes: int) -> int:
        return -(-nbytes // self._block_bytes) * self._block_bytes


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()
