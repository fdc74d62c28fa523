"""Storages: which one a tensor lives in, and the tensors inside a sparse one.

Private names, in torch 2.11 to 2.15: `UntypedStorage._cdata`, `Tensor._is_view`, `Tensor._indices`, `Tensor._values`.
"""

from __future__ import annotations

import torch

__all__ = ["is_view", "sparse_parts", "storage_key"]


def storage_key(tensor: torch.Tensor) -> int:
    """A number that two live tensors share if and only if they share a storage, fake and meta tensors included."""
    return tensor.untyped_storage()._cdata


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd knows the tensor as a view of another one."""
    return tensor._is_view()


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The indices and values of a sparse COO tensor, coalesced or not, without a copy."""
    return tensor._indices(), tensor._values()
