"""Counts what operators on fake tensors would hold on a device."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import fx

from memopt.account.caching_allocator import rounded_bytes
from memopt.compat.dispatch import TorchDispatchMode, plain_tensors
from memopt.compat.fakes import FakeTensor
from memopt.compat.operators import schema_of
from memopt.device.op_call import OpCall, describe, tensors_in
from memopt.device.workspace import measure_workspaces
from memopt.device.workspace_rules import SCALARS
from memopt.device.workspace_table import estimate_workspace


class LiveBytes(TorchDispatchMode):
    """Counts the bytes on the device `home` of the storages that ops make, until they die, and the workspace that the
    kernels of `device_type` take.

    For use inside of a fake mode. Single numbers in the host's memory stay real: optimisers count steps in them, and
    choose their way by their values.
    """

    def __init__(self, device_type: str, home: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self.kernels: set[str] = set()
        """The names of the operators that ran."""
        self._device_type, self._home = device_type, home
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.kernels.add(schema_of(func).name)
        given = list(tensors_in((args, list(kwargs.values()))))
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(given[0], FakeTensor):
            return _value(given[0])
        result = self._run(func, args, kwargs, given)
        made = list(tensors_in(result))
        before = {tensor.untyped_storage() for tensor in given if isinstance(tensor, FakeTensor)}
        for tensor in made:
            if tensor.untyped_storage() not in before and tensor.device.type == self._home:
                self._add(tensor.untyped_storage())
        if made:
            self._add_workspace(describe(func, args, kwargs, result))
        return result

    def _run(self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> Any:
        elsewhere = any(isinstance(each, torch.device) and each.type != "cpu" for each in [*args, *kwargs.values()])
        if given and all(map(_is_real_number, given)) and not elsewhere:
            return _run_real(func, args, kwargs)
        result = func(*args, **kwargs)
        made = list(tensors_in(result))
        if not given and made and all(each.numel() == 1 and each.device.type == "cpu" for each in made):
            return _run_real(func, args, kwargs)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        nbytes = storage.nbytes() if self._device_type == "cpu" else rounded_bytes(storage.nbytes())
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, nbytes)

    def _free(self, nbytes: int) -> None:
        self.live -= nbytes

    def _add_workspace(self, call: OpCall) -> None:
        """The rules give upper bounds: on the CPU the kernel is run where such a bound would be the peak."""
        workspace = estimate_workspace(call, self._device_type)
        if workspace > SCALARS and self.live + workspace > self.peak and self._device_type == "cpu":
            node = _node(call)
            workspace = measure_workspaces([node])[node].workspace_bytes
        self.peak = max(self.peak, self.live + workspace)


def _is_real_number(tensor: torch.Tensor) -> bool:
    return tensor.numel() == 1 and tensor.device.type == "cpu" and not isinstance(tensor, FakeTensor)


def _value(fake: torch.Tensor) -> Any:
    """Of a fake tensor there is only the type to go by."""
    return 0.5 if fake.dtype.is_floating_point else fake.dtype == torch.bool or 1


def _run_real(func: Any, args: Any, kwargs: Any) -> Any:
    with plain_tensors():
        return func(*args, **kwargs)


def _node(call: OpCall) -> fx.Node:
    """The call as the node of a graph, which is how kernels are measured."""
    graph = fx.Graph()

    def placed(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(placed, value))
        if not hasattr(value, "make"):
            return value
        node = graph.placeholder("x")
        node.meta["val"] = value.make("meta")
        return node

    kwargs = {name: placed(value) for name, value in call.kwargs}
    node = graph.call_function(call.op, placed(call.args), kwargs)
    node.meta["val"] = call.make_results("meta")
    return node
