"""Tensors on the CPU whose values nobody may use.

Private names, in torch 2.11 to 2.15: `torch._C._set_throw_on_mutable_data_ptr`, by which kernels that would write to a
tensor, and code that asks for its address, raise `RuntimeError`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["protected", "reads_raise", "same_memory", "uncomputed"]

_READS = ("tolist", "numpy", "__array__")


def uncomputed(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor in the host's memory, which is not written to, that is `protected`. Integers are zero, so that code
    outside of torch which takes them as indices does no harm."""
    tensor = torch.empty_strided(size, stride, dtype=dtype, device="cpu")
    return protected(tensor if dtype.is_floating_point or dtype.is_complex else tensor.zero_())


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
