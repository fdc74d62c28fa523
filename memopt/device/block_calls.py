"""Lists the allocator's calls while operators run: which blocks are allocated, and when each is freed."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from memopt.device.live_bytes import LiveBytes
from memopt.device.op_call import tensors_in
from memopt.solver.problem import BlockCall


class BlockCalls(LiveBytes):  # type: ignore[no-untyped-call]
    """Counts as `LiveBytes` does, and lists the allocations and frees of all storages and workspaces, in blocks that
    are numbered as they are allocated."""

    def __init__(self, *, block_bytes: int = 1) -> None:
        super().__init__(block_bytes=block_bytes)
        self.calls: list[BlockCall] = []
        self.sizes: list[int] = []
        """The bytes of each block."""
        self.number: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()
        """The blocks of the storages that are alive."""

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The operator's result. What is written to a given tensor needs no run, which torch lacks for some dtypes."""
        return kwargs["out"] if isinstance(kwargs.get("out"), torch.Tensor) else func(*args, **kwargs)

    def count(self, tensors: Any) -> None:
        """Count and list the storages of these tensors that are new."""
        for tensor in tensors_in(tensors):
            before = self.live_bytes
            super().count(tensor)
            if self.live_bytes > before:
                storage = tensor.untyped_storage()
                self.number[storage] = self._allocated(self.live_bytes - before)
                weakref.finalize(storage, self._freed, self.number[storage])

    def raise_peak(self, workspace_bytes: int) -> None:
        """Raise the peak, and list the workspace as a block that is freed at once."""
        super().raise_peak(workspace_bytes)
        if workspace_bytes:
            self._freed(self._allocated(workspace_bytes))

    def list_within(self, calls: Sequence[BlockCall], workspace_bytes: int, results: Sequence[torch.Tensor]) -> None:
        """Count the results of an operator, and list them and its workspace as its `calls` say (`Op.calls`)."""
        workspace: dict[int, int] = {}
        for allocates, block, nbytes in calls:
            if not allocates:
                self._freed(workspace[block])
            elif block < len(results):
                self.count(results[block])
            else:
                workspace[block] = self._allocated(nbytes)
        self.count(results)
        super().raise_peak(workspace_bytes)

    def _allocated(self, nbytes: int) -> int:
        self.sizes.append(nbytes)
        self.calls.append(BlockCall(True, len(self.sizes) - 1, nbytes))
        return len(self.sizes) - 1

    def _freed(self, number: int) -> None:
        self.calls.append(BlockCall(False, number, self.sizes[number]))
