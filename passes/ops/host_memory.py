"""Memory of the host in which values wait: outside of torch's allocators, and used again from step to step."""

from __future__ import annotations

import mmap
import threading
import warnings
import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor

# A block serves what needs at least this share of it, so that other shapes find the blocks of the last ones.
_LEAST_USED = 0.8


class Block:
    """Whole pages of memory. `pinned`: known to the GPU, so that copies to and from it run beside compute."""

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        self.nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.memory = mmap.mmap(-1, self.nbytes)
        self.address = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()
        self.pinned = pinned and _pin(self.address, self.nbytes)
        self.done: Any = None
        """The event at which the latest transfer from or to the block is over; None on the CPU, where copies wait."""
        self.arriving: Tensor | None = None
        """What is being filled from the block: its memory must not be used for anything else before `done`."""
        self.home: Any = None
        """The stream of the compute that `arriving` is for."""

    def let_go(self) -> None:
        """Give up what was to arrive and that nobody waited for."""
        if self.arriving is not None and self.home is not None:
            self.home.wait_event(self.done)
        self.arriving = self.home = None

    def unpin(self) -> None:
        """Have CUDA forget it, once the last copy is done; the system has it back when nothing refers to it."""
        if self.done is not None:
            self.done.synchronize()
        if self.pinned:
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(self.address)


class HostMemory:
    """A pool of blocks. A lease ends by itself when the last tensor that looks at it dies, wherever that happens: in
    the backward that fetches it, or with an autograd graph that no backward ever came for."""

    def __init__(self, *, pinned: bool) -> None:
        self.pinned = pinned
        self.most_leased_bytes = 0
        """The most that was ever leased at one time; may be set back to 0."""
        self._leased: dict[int, Block] = {}
        self._free: list[Block] = []
        # What ends a lease may run in the midst of anything, where no lock can be waited for.
        self._returned: deque[Block] = deque()
        self._lock = threading.Lock()

    def lease(self, nbytes: int) -> tuple[Tensor, Block]:
        """Uninitialised memory as a tensor, uint8 [nbytes], and the block that it lies in."""
        with self._lock:
            self._collect()
            fitting = [block for block in self._free if nbytes <= block.nbytes <= max(nbytes, 1) / _LEAST_USED]
            block = min(fitting, key=lambda each: each.nbytes, default=None)
            if block is None:
                block = Block(max(nbytes, 1), pinned=self.pinned)
            else:
                self._free.remove(block)
            self._leased[block.address] = block
            self.most_leased_bytes = max(self.most_leased_bytes, sum(each.nbytes for each in self._leased.values()))
            self._trim()
        held = memoryview(block.memory)
        ending = weakref.finalize(held, self._returned.append, block)
        ending.atexit = False
        return torch.frombuffer(held, dtype=torch.uint8)[:nbytes], block

    def block(self, host: Tensor) -> Block:
        """The block that a leased tensor lies in."""
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
        """Bytes taken from the system."""
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
        """Keep no more free than was ever in use."""
        while sum(block.nbytes for block in self._free) > self.most_leased_bytes:
            self._free.pop(0).unpin()


def _pin(address: int, nbytes: int) -> bool:
    """Make pages known to CUDA, for all devices; whether that could be done."""
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
