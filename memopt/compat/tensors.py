"""Tensors: the storages that they lie in, subclasses and sparse ones, and which functions on them read no values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch._library.fake_class_registry import FakeScriptObject
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from memopt.compat.operators import plain_tensors
from passes.compat import private

PRIVATE_NAMES = private("""
    torch: Tensor._make_wrapper_subclass ._indices ._values ._nested_tensor_size ._is_view ._use_count _mkldnn
        UntypedStorage._cdata
    torch._C: DisableTorchFunctionSubclass _storage_Use_Count
    torch.utils._python_dispatch: is_traceable_wrapper_subclass
    torch.distributed.tensor: DTensor._local_tensor?
    torch._library.fake_class_registry: FakeScriptObject
""")

Subclass = TypeVar("Subclass", bound=torch.Tensor)

_PROPERTIES = (
    "_backward_hooks", "_base", "_version", "device", "dtype", "grad", "grad_fn", "is_cpu", "is_cuda", "is_leaf",
    "is_meta", "is_mkldnn", "is_mps", "is_nested", "is_quantized", "is_sparse", "is_sparse_csr", "is_xpu", "itemsize",
    "layout", "name", "names", "nbytes", "ndim", "output_nr", "requires_grad", "retains_grad", "shape",
)  # fmt: skip
_METHODS = (
    "__hash__", "__len__", "detach", "dim", "element_size", "get_device", "is_complex", "is_contiguous", "is_conj",
    "is_floating_point", "is_inference", "is_neg", "is_signed", "ndimension", "nelement", "numel", "register_hook",
    "requires_grad_", "retain_grad", "size", "storage_offset", "stride", "untyped_storage",
)  # fmt: skip
_FUNCTIONS = (torch.detach, torch.is_complex, torch.is_conj, torch.is_floating_point, torch.is_neg, torch.numel)
_OF_MEMORY = ("__array__", "__dlpack__", "data_ptr", "numpy", "share_memory_", "storage", "tolist")


def _of(names: Sequence[str]) -> list[Any]:
    return [found for name in names if (found := getattr(torch.Tensor, name, None)) is not None]


READ_NO_VALUES = frozenset((*(found.__get__ for found in _of(_PROPERTIES)), *_of(_METHODS), *_FUNCTIONS))
"""The torch functions, as `__torch_function__` gets them, that read no values of a tensor: only its sizes, dtype,
device and the like."""
NEED_MEMORY = frozenset(_of(_OF_MEMORY))
"""The torch functions that expose a tensor's memory, which torch refuses for subclasses without memory of their own."""


is_wrapper: Callable[[object], bool] = is_traceable_wrapper_subclass
"""Whether a value is a tensor subclass that holds other tensors, which torch.compile traces in place of it."""


def with_memory(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The tensors that hold the memory of `tensors`, without copies: those inside a wrapper (a quantised weight, a
    sharded parameter), indices and values of a sparse one, values of a nested one, a plain tensor itself, with the
    scales in the attributes of a parameter that is of a class of its own (a 4-bit weight of bitsandbytes)."""
    tensor: Any
    for tensor in tensors:
        if is_wrapper(tensor):
            parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
            yield from with_memory(part for part in parts if isinstance(part, torch.Tensor))
        elif tensor.layout is torch.sparse_coo:
            yield from (tensor._indices(), tensor._values())
        elif tensor.layout in _COMPRESSED:
            by_rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
            yield tensor.crow_indices() if by_rows else tensor.ccol_indices()
            yield from (tensor.col_indices() if by_rows else tensor.row_indices(), tensor.values())
        elif tensor.is_nested:
            yield tensor.values()
        else:
            yield tensor
            if is_of_own_class(tensor):
                yield from _in_attributes(tensor)


def is_of_own_class(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a subclass of `nn.Parameter`. Parameters that are fake tensors or wrappers are of none."""
    return type(tensor) is not torch.nn.Parameter and issubclass(type(tensor), torch.nn.Parameter)


def _in_attributes(value: object, seen: frozenset[int] = frozenset()) -> Iterator[torch.Tensor]:
    """The tensors among the attributes of an object, and of the objects that have tensors among theirs."""
    for held in vars(value).values():
        if isinstance(held, torch.Tensor):
            yield held
        elif id(held) not in seen and holds_tensors(held):
            yield from _in_attributes(held, seen | {id(held)})


def holds_tensors(value: object) -> bool:
    """Whether an attribute of an object, which is no module, class or function, is a tensor."""
    attributes = {} if callable(value) else getattr(value, "__dict__", {})
    return any(isinstance(held, torch.Tensor) for held in attributes.values())


_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_MKLDNN: torch.layout = torch._mkldnn  # type: ignore[attr-defined]
_LAYOUTS = {
    torch.sparse_coo: "sparse COO",
    torch.sparse_csr: "sparse CSR",
    torch.sparse_csc: "sparse CSC",
    torch.sparse_bsr: "sparse BSR",
    torch.sparse_bsc: "sparse BSC",
    torch.jagged: "jagged nested",
    _MKLDNN: "mkldnn",
}


def special_kind(tensor: torch.Tensor) -> str:
    """The kind of a tensor that is no plain array of numbers in memory, such as "sparse CSR" or "jagged nested"; "" for
    plain ones, and for all other wrappers (`is_wrapper`)."""
    if tensor.is_nested and tensor.layout is torch.strided:
        return "strided nested"
    return "quantized" if tensor.is_quantized else _LAYOUTS.get(tensor.layout, "")


def sizes_within(tensor: Any) -> Sequence[int]:
    """The sizes of a tensor. For a nested one, those of the tensors inside; for one of another special kind
    (`special_kind`), its own, then those of the tensors that hold its memory."""
    if not special_kind(tensor):
        return tensor.shape
    if tensor.is_nested and tensor.layout is torch.strided:
        return [size for row in tensor._nested_tensor_size().tolist() for size in row]
    own = [] if tensor.is_nested else [*tensor.shape]
    return [*own, *(size for part in with_memory([tensor]) for size in part.shape)]


def has_no_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no storage that torch can access: the case for tensors in oneDNN's layout."""
    return tensor.layout is _MKLDNN


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors on one device have the same dtype, shape and bits: a NaN is equal to itself, -0.0 is not 0.0.
    Sparse ones and wrappers are compared by their values, as `torch.equal` does."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    has_numbers = one.is_floating_point() or one.is_complex()
    if not has_numbers or one.layout is not torch.strided or is_wrapper(one):
        return torch.equal(one, other)
    plain = (tensor.detach().resolve_conj().resolve_neg().contiguous() for tensor in (one, other))
    # A tensor of one element is contiguous with any stride; only one of 1 can be viewed as bytes.
    return torch.equal(*(tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8) for tensor in plain))


def set_values(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Write `values` to a tensor, and resize it to their shape if it has another: a forward may have resized it, as the
    observers of quantisation-aware training resize their buffers."""
    with torch.no_grad():
        if tensor.shape != values.shape:
            tensor.resize_(values.shape)
        tensor.copy_(values)


def shard_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local shard on this rank of a sharded tensor (`DTensor`); any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether a tensor is distributed over ranks (`DTensor`)."""
    return hasattr(tensor, "_local_tensor")


def is_replicated(tensor: Any) -> bool:
    """Whether a tensor is distributed over ranks (`DTensor`) so that each of them has all of it."""
    return is_sharded(tensor) and all(placement.is_replicate() for placement in tensor.placements)


def spread_of(tensor: Any) -> tuple[str, ...]:
    """How a tensor is distributed over ranks, as texts: the shape of the mesh, and the placement on each mesh
    dimension; empty for a tensor that is not distributed."""
    return (str(tuple(tensor.device_mesh.shape)), str(tensor.placements)) if is_sharded(tensor) else ()


def is_opaque(value: object) -> bool:
    """Whether a value of a traced graph stands for an object that torch does not trace into, such as a device mesh."""
    return isinstance(value, FakeScriptObject)


def ranks_of(sharded: Any) -> list[int]:
    """The ranks over which a sharded tensor is distributed."""
    return sharded.device_mesh.mesh.flatten().tolist()


as_implemented: Callable[[], AbstractContextManager[Any]] = torch._C.DisableTorchFunctionSubclass
"""Context in which torch functions run their own implementation, past the `__torch_function__` of subclasses."""


def wrapper_tensor(
    kind: type[Subclass], sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Subclass:
    """A tensor of the subclass `kind` with an empty storage, whose operators go to `kind.__torch_dispatch__`."""
    make: Callable[..., Subclass] = torch.Tensor._make_wrapper_subclass
    return make(kind, sizes, strides=strides, dtype=dtype, device=device, storage_size=0)


def storage_key(tensor: torch.Tensor) -> int:
    """A number that two live tensors share if and only if they share a storage, fake and meta tensors included."""
    return tensor.untyped_storage()._cdata


def users_of(tensor: Any) -> int:
    """A count of the tensors that share the tensor's storage and of the C++ references to the tensor, added up."""
    return torch._C._storage_Use_Count(storage_key(tensor)) + tensor._use_count()


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd records the tensor as a view of another one."""
    return tensor._is_view()


def storages_of(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """The storages that hold a tensor: those of its indices and values if it is sparse, those of the tensors inside a
    wrapper, else its own. Empty for tensors in oneDNN's layout, whose storage torch cannot access."""
    if _is_plain(tensor):
        return [tensor.untyped_storage()]
    with plain_tensors(), torch.no_grad():
        return [part.untyped_storage() for part in with_memory([tensor]) if not has_no_storage(part)]


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of torch's own classes and has one storage, its own."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)


def bytes_of_storages(tensors: Iterable[torch.Tensor]) -> list[int]:
    """The bytes of the storages of `tensors`, each once; of a tensor whose storage torch cannot access, its own."""
    found: dict[int, int] = {}
    for tensor in tensors:
        for part in (tensor,) if _is_plain(tensor) else with_memory((tensor,)):
            if part.layout is _MKLDNN:
                found[id(part)] = part.nbytes
            else:
                storage = part.untyped_storage()
                # A parameter that lies on the host now has an empty storage; it counts as if on the device.
                found[storage._cdata] = storage.nbytes() or part.nbytes
    return list(found.values())


def bytes_by_address(values: Iterable[object], device: torch.device) -> dict[int, int]:
    """Address → bytes of each storage on a device that holds a tensor among some values. Each step calls it for all
    that its model has and saves, so plain tensors are looked up inline."""
    found: dict[int, int] = {}
    for value in values:
        if not isinstance(value, torch.Tensor):
            continue
        try:
            if value.device != device:
                continue
            strided = type(value) in _PLAIN and value.layout is torch.strided
            plain = strided and not (value.is_nested or value.is_quantized)
            storages = [value.untyped_storage()] if plain else storages_of(value)
            for storage in storages:
                if plain or storage.device == device:  # the scales of a weight may lie elsewhere than it does
                    found[storage.data_ptr()] = storage.nbytes()
        except (NotImplementedError, RuntimeError):  # it has no memory of its own, or a tracer has left it behind
            continue
    return found


class WeakStorage:
    """The device, the address and the bytes of a storage, without keeping it alive."""

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
        return 0 if self._reference.expired() else self._nbytes  # type: ignore[no-untyped-call]


def bytes_still_there(storages: Iterable[WeakStorage]) -> dict[int, int]:
    """Address → bytes of each of the storages that is not gone."""
    found: dict[int, int] = {}
    for one in storages:
        if not one._reference.expired():  # type: ignore[no-untyped-call]
            found[one._address] = one._nbytes
    return found


def memory_of(value: object) -> int | None:
    """A number that strided tensors, also fakes, share if and only if they share a storage; None for other values."""
    return storage_key(value) if isinstance(value, torch.Tensor) and value.layout == torch.strided else None


def weak_storages(values: Iterable[object]) -> list[WeakStorage]:
    """The storages of the tensors among some values; tensors whose storage torch cannot access are skipped."""
    found: list[WeakStorage] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            try:
                found += map(WeakStorage, storages_of(value))
            except (NotImplementedError, RuntimeError):
                continue
    return found
