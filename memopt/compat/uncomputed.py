"""Tensors on the CPU whose values nobody may use."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from memopt.compat.host import HOST
from passes.compat import private

# By the first, kernels that would write to a tensor, and code that asks for its address, raise `RuntimeError`; the
# second makes a storage in memory that it does not own.
PRIVATE_NAMES = (*private("torch._C", "_set_throw_on_mutable_data_ptr", "_construct_storage_from_data_pointer"),)

__all__ = ["protected", "reads_raise", "same_memory", "uncomputed"]

_READS = ("tolist", "numpy", "__array__")


def uncomputed(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A `protected` tensor on the CPU, for which nothing is allocated. It has a storage of its own, but all such
    storages lie in the same pages, which can only be read, and are zero."""
    elements = 1 + sum((number - 1) * step for number, step in zip(size, stride, strict=True)) if all(size) else 0
    nbytes = elements * dtype.itemsize
    storage = torch._C._construct_storage_from_data_pointer(_pages(nbytes), HOST, nbytes)
    tensor = torch.empty(0, dtype=dtype, device=HOST)
    return protected(tensor.set_(storage, 0, tuple(size), tuple(stride)))


def protected(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, whose memory can no longer be written to, and whose address cannot be had."""
    torch._C._set_throw_on_mutable_data_ptr(tensor)
    return tensor


def same_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Another leaf in the memory of a tensor: a parameter for a parameter. It has neither its gradient nor its hooks,
    and counts its versions by itself."""
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(tensor.data, requires_grad=tensor.requires_grad)
    return tensor.data.requires_grad_(tensor.requires_grad)


def _pages(nbytes: int) -> int:
    """Returns the address of at least `nbytes` bytes of reserved address space, which take no memory until they are
    read. They are never given back, since nobody knows how long a tensor lives."""
    if not _regions or len(_regions[-1]) < nbytes:
        _regions.append(
            mmap.mmap(
                -1, max(_LEAST_REGION, 2 * nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ
            )
        )
    return int(np.frombuffer(_regions[-1], np.uint8).ctypes.data)


_regions: list[mmap.mmap] = []
_LEAST_REGION = 2**32


@contextmanager
def reads_raise(error: type[Exception]) -> Iterator[None]:
    """A block in which methods of tensors that read memory past the dispatcher raise `error` in this thread."""
    tensors: Any = torch.Tensor
    own = {name: vars(tensors).get(name) for name in _READS}
    thread = threading.get_ident()
    try:
        for name in _READS:
            setattr(tensors, name, _raising(error, thread, getattr(tensors, name)))
        yield
    finally:
        for name, method in own.items():
            if method is None:
                delattr(tensors, name)
            else:
                setattr(tensors, name, method)


def _raising(error: type[Exception], thread: int, read: Any) -> Any:
    def raising(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            raise error
        return read(*args, **kwargs)

    return raising
