"""Storages: which ones a tensor lives in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from memopt.compat.dispatch import plain_tensors
from memopt.compat.subclasses import has_no_storage, special_kind, with_memory
from passes.private import private

PRIVATE_NAMES = (
    *private("torch", "UntypedStorage._cdata", "Tensor._is_view", "Tensor._use_count"),
    *private("torch._C", "_storage_Use_Count"),
)

__all__ = ["WeakStorage", "bytes_by_address", "is_view", "storage_key", "storages_of", "users_of", "weak_storages"]


def storage_key(tensor: torch.Tensor) -> int:
    """A number that two live tensors share if and only if they share a storage, fake and meta tensors included."""
    return tensor.untyped_storage()._cdata


def users_of(tensor: torch.Tensor) -> int:
    """A number that grows with every further tensor in the tensor's storage, and with everything in C++ that refers to
    the tensor itself."""
    sharing: int = torch._C._storage_Use_Count(storage_key(tensor))
    referring: int = tensor._use_count()  # type: ignore[attr-defined]
    return sharing + referring


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd knows the tensor as a view of another one."""
    return tensor._is_view()


def storages_of(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """The storages in which a tensor lies: those of its indices and values where it is sparse, those of the tensors
    inside a wrapper, and else its own; none where it has none that torch hands out (oneDNN's)."""
    if type(tensor) in _PLAIN and not special_kind(tensor):
        return [tensor.untyped_storage()]
    with plain_tensors(), torch.no_grad():
        return [part.untyped_storage() for part in with_memory([tensor]) if not has_no_storage(part)]


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def bytes_by_address(values: Iterable[object], device: torch.device) -> dict[int, int]:
    """The bytes of the storages on a device in which the tensors among some values lie, by their address.

    A step asks this for all that its model has and saves, so that it makes no call for a plain tensor.
    """
    found: dict[int, int] = {}
    for value in values:
        if not isinstance(value, torch.Tensor) or value.device != device:
            continue
        plain = type(value) in _PLAIN and value.layout is torch.strided and not (value.is_nested or value.is_quantized)
        try:
            for storage in (value.untyped_storage(),) if plain else storages_of(value):
                found[storage.data_ptr()] = storage.nbytes()
        except (NotImplementedError, RuntimeError):  # it has no memory of its own
            continue
    return found


class WeakStorage:
    """The device, the address and the bytes of a storage, for as long as some tensor lives in it; it does not keep it
    alive."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._address, self._reference = storage.data_ptr(), StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._nbytes, self.device = storage.nbytes(), storage.device

    @property
    def address(self) -> int:
        """The address of the memory, 0 once the storage is gone."""
        return 0 if self._reference.expired() else self._address  # type: ignore[no-untyped-call]

    @property
    def nbytes(self) -> int:
        """The bytes of the memory, 0 once the storage is gone."""
        return self._nbytes if self.address else 0


def weak_storages(values: Iterable[object]) -> Iterator[WeakStorage]:
    """The storages of the tensors among some values; tensors without memory of their own are left out."""
    for value in values:
        if isinstance(value, torch.Tensor):
            try:
                yield from map(WeakStorage, storages_of(value))
            except (NotImplementedError, RuntimeError):
                continue
