"""Runs the code that inductor wrote for a graph on fakes: its allocations and frees happen, its kernels do not."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from memopt.account.caching_allocator import rounded_bytes
from memopt.compat.dispatch import TorchDispatchMode, plain_tensors
from memopt.compat.fakes import FakeTensorMode
from memopt.compat.operators import HigherOrderOperator
from memopt.compat.pytree import tree_leaves
from memopt.device.op_call import describe
from memopt.device.workspace import call_workspace_bytes
from memopt.price.price import GENERATOR_STATE_BYTES
from passes.ops.offload_ops import COPY_OUT

_ALLOCATE = ("empty_strided_cpu", "empty_strided_cuda")


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts, while it is active, the bytes of the storages that are made and still alive.

    `peak_bytes` is the most at any call, the call's own temporaries included; what it is told to `know` is left out.
    """

    supports_higher_order_operators = True

    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.peak_bytes = device, 0
        self._alive: dict[StorageWeakRef, int] = {}
        self._known: set[StorageWeakRef] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return self.draw(func, args, kwargs)
        result = func(*args, **kwargs)
        if func is COPY_OUT:
            self.know(result)  # it lies on the host
        self.count(result)
        self.rise(_workspace(func, args, kwargs, result, self.device))
        return result

    def draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A random operator that saves the generator's state, or draws from a saved one and puts it back."""
        saves = func is torch.ops.higher_order.run_and_save_rng_state
        assert saves or func is torch.ops.higher_order.run_with_rng_state, func
        with self:
            state = torch.empty(GENERATOR_STATE_BYTES[self.device], dtype=torch.uint8)
            operator, operands = (args[0], args[1:]) if saves else (args[1], args[2:])
            drawn = operator(*operands, **kwargs)
        return (state, drawn) if saves else drawn

    def know(self, tensors: Any) -> None:
        """Have what is there anyway left out of the count."""
        self._known.update(reference for reference, _ in _storages(tensors))

    def count(self, tensors: Any) -> None:
        """Count the storages among these that are new."""
        for reference, nbytes in _storages(tensors):
            if reference not in self._known:
                self._known.add(reference)
                self._alive[reference] = nbytes if self.device == "cpu" else rounded_bytes(nbytes)
        self.rise(0)

    def rise(self, extra_bytes: int) -> None:
        """Take note of the bytes alive now, with so many beside them."""
        self.peak_bytes = max(self.peak_bytes, self.live_bytes() + extra_bytes)

    def live_bytes(self) -> int:
        dead = [each for each in self._alive if each.expired()]  # type: ignore[no-untyped-call]
        for each in dead:
            del self._alive[each]
        return sum(self._alive.values())


def dry_run(source: str, inputs: list[Any], mode: FakeTensorMode, ledger: Ledger) -> Sequence[Any]:
    """What inductor's code returns for fake `inputs`, a list that the code empties; `ledger` counts meanwhile."""
    call = _load(source)
    with plain_tensors(), torch.no_grad(), mode, ledger:
        return call(inputs)


def _load(source: str) -> Callable[[list[Any]], Sequence[Any]]:
    """The code's own `call`, with kernels that do nothing."""
    module = ast.parse(source)
    module.body = [each for each in (_without_kernel(statement) for statement in module.body) if each is not None]
    names: dict[str, Any] = {"__name__": "memopt_dry_run", "_no_kernel": _NoKernel()}
    exec(compile(ast.fix_missing_locations(module), "<inductor>", "exec"), names)
    for name in _ALLOCATE:
        names[name] = _allocator(name.rpartition("_")[2])
    names.update(reinterpret_tensor=_reinterpret, assert_size_stride=_nothing, assert_alignment=_nothing)
    return names["call"]


def _without_kernel(statement: ast.stmt) -> ast.stmt | None:
    """A statement of the module with a stand-in for the kernel that it compiles; None for one that only compiles."""
    if "async_compile" not in {each.id for each in ast.walk(statement) if isinstance(each, ast.Name)}:
        return statement
    if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call):
        target = statement.targets[0]
        if isinstance(target, ast.Name) and target.id != "async_compile":
            return ast.Assign([target], ast.Name("_no_kernel", ast.Load()))
    return None


class _NoKernel:
    """Stands in for a compiled kernel, of C++ or Triton."""

    def __call__(self, *_: Any, **__: Any) -> None:
        pass

    def run(self, *_: Any, **__: Any) -> None:
        pass


def _allocator(device: str) -> Callable[..., torch.Tensor]:
    def allocate(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    return allocate


def _reinterpret(tensor: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
    return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _storages(tensors: Any) -> list[tuple[StorageWeakRef, int]]:
    found = []
    for tensor in tree_leaves(tensors):
        if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            found.append((StorageWeakRef(storage), storage.nbytes()))  # type: ignore[no-untyped-call]
    return found


def _workspace(func: Any, args: Any, kwargs: Any, result: Any, device: str) -> int:
    """Bytes of the kernel's own temporaries; views, and tensors that are only made, have none."""
    if func.is_view or "empty" in func.name():
        return 0
    return call_workspace_bytes(describe(func, args, kwargs, result), device)
