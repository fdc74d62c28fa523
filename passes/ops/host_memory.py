"""Host memory for offloaded values: outside of torch's allocators, and reused from step to step."""

from __future__ import annotations

import mmap
import threading
import warnings
import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor

# A free block is leased for a value of at least this share of its size, so that other shapes can reuse it.
_LEAST_USED = 0.8


class Block:
    """Whole pages of host memory. `pinned`: page-locked for the GPU, so that copies run beside compute."""

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        self.nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.memory = mmap.mmap(-1, self.nbytes)
        self.address = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()
        self.pinned = pinned and _pin(self.address, self.nbytes)
        self.done: Any = None
        """The event that ends the latest copy from or to the block; None on the CPU, where copies are synchronous."""
        self.arriving: Tensor | None = None
        """The tensor that is being filled from the block: its memory must not be reused before `done`."""
        self.home: Any = None
        """The compute stream that reads `arriving`."""

    def let_go(self) -> None:
        """Forgets a copy back to the device that nothing has waited for."""
        if self.arriving is not None and self.home is not None:
            self.home.wait_event(self.done)
        self.arriving = self.home = None

    def unpin(self) -> None:
        """Unregisters the pages with CUDA after the last copy; they go back to the system with the last reference."""
        if self.done is not None:
            self.done.synchronize()
        if self.pinned:
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(self.address)


class HostMemory:
    """A pool of blocks.

    A lease ends when the last tensor in the block is freed: in the backward that fetches it, or with an autograd graph
    whose backward never ran.
    """

    def __init__(self, *, pinned: bool) -> None:
        self.pinned = pinned
        self.most_leased_bytes = 0
        """The most bytes that were leased at one time; may be reset to 0."""
        self._leased: dict[int, Block] = {}
        self._free: list[Block] = []
        # A finalizer may run at any point of the program, so that it must not wait for the lock.
        self._returned: deque[Block] = deque()
        self._lock = threading.Lock()

    def lease(self, nbytes: int) -> tuple[Tensor, Block]:
        """Returns uninitialised memory as a tensor, uint8 [nbytes], and the block that it lies in."""
        with self._lock:
            self._collect()
            fitting = [block for block in self._free if nbytes <= block.nbytes <= max(nbytes, 1) / _LEAST_USED]
            block = min(fitting, key=lambda candidate: candidate.nbytes, default=None)
            if block is None:
                block = Block(max(nbytes, 1), pinned=self.pinned)
            else:
                self._free.remove(block)
            self._leased[block.address] = block
            self.most_leased_bytes = max(self.most_leased_bytes, sum(leased.nbytes for leased in self._leased.values()))
            self._trim()
        held = memoryview(block.memory)
        ending = weakref.finalize(held, self._returned.append, block)
        ending.atexit = False
        return torch.frombuffer(held, dtype=torch.uint8)[:nbytes], block

    def block(self, host: Tensor) -> Block:
        """Returns the block that a leased tensor lies in. Raises RuntimeError for a tensor that is not leased."""
        block = self._leased.get(host.untyped_storage().data_ptr())
        if block is None:
            raise RuntimeError(
                "a value that was offloaded did not come back as it was saved: hooks on saved tensors "
                "(torch.autograd.graph.saved_tensors_hooks, save_on_cpu) do not go together with offload_activations"
            )
        return block

    @property
    def leased_bytes(self) -> int:
        """Bytes of the blocks in use now."""
        with self._lock:
            self._collect()
            return sum(block.nbytes for block in self._leased.values())

    @property
    def mapped_bytes(self) -> int:
        """Bytes of all blocks, leased or free."""
        with self._lock:
            self._collect()
            return sum(block.nbytes for block in [*self._leased.values(), *self._free])

    def _collect(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            block.let_go()
            del self._leased[block.address]
            self._free.append(block)

    def _trim(self) -> None:
        """Unpins free blocks until these hold no more bytes than were ever leased."""
        while sum(block.nbytes for block in self._free) > self.most_leased_bytes:
            self._free.pop(0).unpin()


def _pin(address: int, nbytes: int) -> bool:
    """Pins pages for all CUDA devices; returns whether that succeeded, and warns if not."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    portable = 1
    failure = int(runtime.cudaHostRegister(address, nbytes, portable))
    if failure:
        warnings.warn(
            f"the host's memory cannot be pinned (cudaHostRegister: error {failure}): offloaded activations are copied "
            "through unpinned memory, during which compute waits; raise the limit of locked memory (ulimit -l)",
            stacklevel=2,
        )
    return not failure
