"""The bytes that a compiled region holds in its forward and backward, found by a dry run: the code that inductor wrote
runs on fake tensors, so that it allocates and frees, but no kernel runs."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from memopt.account.caching_allocator import SMALL_BYTES
from memopt.compat.fakes import FakeTensorMode
from memopt.compat.host import device_among
from memopt.compat.operators import HigherOrderOperator, plain_tensors
from memopt.compat.symbols import largest_value
from memopt.device.devices import DEVICES, device_of
from memopt.device.hardware import LARGE, Chip
from memopt.device.live_bytes import BlockCalls
from memopt.device.op_call import describe, tensors_in
from memopt.device.workspace import call_workspace_bytes, op_dry_run
from memopt.planning.refit import Footprint
from passes.graphs.node_facts import is_tangent
from passes.ops.linear_cross_entropy import IMPLEMENTATIONS
from passes.ops.offload_ops import COPY_OUT


@dataclass(frozen=True)
class Half:
    """The code that inductor generated for a forward or a backward, and the inputs of its graph."""

    source: str = field(repr=False)
    inputs: Sequence[fx.Node] = field(repr=False)


def footprint(
    forward: Half, backward: Half, outputs: int, released: Collection[int] = (), kept: Collection[int] = ()
) -> Footprint:
    """The bytes that the compiled forward and backward hold, found in a dry run on fake tensors. Symbolic sizes have
    the values that the enclosing block `sizes_up_to` gives.

    The first `outputs` results of the forward are its outputs. Of these, by position, `released` are freed when the
    backward begins, and `kept` are held to the end of the step. The caller is assumed to hold the others until the
    backward ends. With a caching allocator and large outputs, the allocator's calls (`Footprint.ways`) are also listed
    for a caller who drops the outputs before the backward."""
    run = partial(_dry_run, forward, backward, outputs, released, kept)
    found, large = run(dropped=False)
    return replace(found, ways=found.ways + run(dropped=True)[0].ways) if large else found


def _dry_run(
    forward: Half, backward: Half, outputs: int, released: Collection[int], kept: Collection[int], *, dropped: bool
) -> tuple[Footprint, bool]:
    """The bytes that forward and backward hold in a dry run; and whether, with a caching allocator, an output that the
    caller may drop is large. With `dropped`, the caller drops such outputs before the backward."""
    mode = FakeTensorMode()
    given = [_fresh(node.meta.get("val"), mode) for node in forward.inputs]
    device = device_among(given)
    kind = device_of(device)
    held_blocks = _HeldBlocks(device.type, kind.chip(device))
    held_blocks.exclude(given)
    results = list(dry_run(forward.source, list(given), mode, held_blocks))
    forward_bytes, held_bytes = held_blocks.peak_bytes, held_blocks.live_bytes
    positions = range(min(outputs, len(results)))
    held = [results[at] for at in positions if at in kept]
    callers = [results[at] for at in positions if at not in kept and at not in released]
    saved = results[outputs:]
    del results
    large = kind.caching and any(tensor.untyped_storage().nbytes() > SMALL_BYTES for tensor in tensors_in(callers))
    if dropped:
        callers.clear()
    tangents = [_fresh(node.meta.get("val"), mode) for node in backward.inputs if is_tangent(node)]
    held_blocks.peak_bytes = 0
    held_blocks.count(tangents)
    arguments = _arguments(backward, saved, tangents)
    del saved
    gradients = dry_run(backward.source, arguments, mode, held_blocks)
    assert len(held) + len(callers) <= outputs
    ways = (tuple(held_blocks.calls),) if kind.caching else ()
    assert gradients is not None
    return Footprint(forward_bytes, held_bytes, held_blocks.peak_bytes, held_blocks.live_bytes, ways), large


def _arguments(backward: Half, saved: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    """The arguments of the backward: the saved values, and the tangents. Symbolic sizes are the last results of the
    forward, and the first arguments of the backward; tensors keep the forward's order."""
    numbers = iter([value for value in saved if not isinstance(value, torch.Tensor)])
    remaining, gradients = iter([value for value in saved if isinstance(value, torch.Tensor)]), iter(tangents)

    def argument(node: fx.Node) -> Any:
        if is_tangent(node):
            return next(gradients)
        return next(remaining if isinstance(node.meta.get("val"), torch.Tensor) else numbers)

    return list(map(argument, backward.inputs))


def _fresh(value: Any, mode: FakeTensorMode) -> Any:
    """A fake tensor like the given one, in the mode of the dry run, with storage of its own. Symbolic sizes become the
    largest that they may be (`upper_bound`)."""
    if isinstance(value, torch.SymInt):
        return largest_value(value)
    if not isinstance(value, torch.Tensor):
        return value
    shape, stride = (tuple(map(largest_value, sizes)) for sizes in (value.shape, value.stride()))
    with mode:
        return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)


class _HeldBlocks(BlockCalls):  # type: ignore[no-untyped-call]
    """Counts and lists the storages that inductor's code allocates, rounded up to blocks of the allocator of `device`,
    and the workspaces of the operators that it calls, on a card with that `chip`."""

    supports_higher_order_operators = True

    def __init__(self, device: str, chip: Chip = LARGE) -> None:
        super().__init__(block_bytes=device_of(device).block_bytes)
        self.device, self.chip = device_of(device), chip

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, HigherOrderOperator):
            return self.draw(func, args, kwargs or {})
        if func in IMPLEMENTATIONS and not self.device.is_host:
            return self.follow(func, args, kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The operator's result. The result of a copy to the host is not counted."""
        result = super().run(func, args, kwargs)
        if func is COPY_OUT:
            self.exclude(result)
        return result

    def workspace_bytes(self, func: Any, args: Any, kwargs: Any, result: Any) -> int:
        """Bytes of the kernel's own temporaries; 0 for views and for allocations."""
        if func.is_view or "empty" in func.name():
            return 0
        call = describe(func, args, kwargs, result)
        seen = self.device.library_run(call, self.chip)
        return call_workspace_bytes(call, self.device.type, self.chip) if seen is None else seen.workspace_bytes

    def follow(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator that is written in Python, and list the allocator's calls that a dry run of it makes."""
        result = func(*args, **kwargs)
        self.exclude((args, list(kwargs.values())))
        dry_run = op_dry_run(describe(func, args, kwargs, result), self.device.type, self.chip)
        assert dry_run is not None
        self.list_within(dry_run.calls, dry_run.workspace_bytes, list(tensors_in(result)))
        return result

    def draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a random operator that saves the generator's state, or one that draws from a saved state."""
        saves = func is torch.ops.higher_order.run_and_save_rng_state
        assert saves or func is torch.ops.higher_order.run_with_rng_state, func
        with self:
            state = torch.empty(self.device.generator_state_bytes, dtype=torch.uint8)
            operator, operands = (args[0], args[1:]) if saves else (args[1], args[2:])
            drawn = operator(*operands, **kwargs)
        return (state, drawn) if saves else drawn


def dry_run(source: str, inputs: list[Any], mode: FakeTensorMode, held_blocks: _HeldBlocks) -> Sequence[Any]:
    """Run inductor's code on fake `inputs`, a list that the code empties, while `held_blocks` counts the bytes that are
    held; return the code's results."""
    call = _load(source)
    with plain_tensors(), torch.no_grad(), mode, held_blocks:
        return call(inputs)


def _load(source: str) -> Callable[[list[Any]], Sequence[Any]]:
    """The function `call` that the source defines, with kernels that do nothing."""
    module = ast.parse(source)
    module.body = [kept for statement in module.body if (kept := _without_kernel(statement)) is not None]
    nothing = _Nothing()
    names: dict[str, Any] = {"__name__": "memopt_dry_run", "_no_kernel": nothing}
    exec(compile(ast.fix_missing_locations(module), "<inductor>", "exec"), names)
    names |= {f"empty_strided_{device}": partial(_allocate, device) for device in DEVICES}
    names.update(reinterpret_tensor=_reinterpret, assert_size_stride=nothing, assert_alignment=nothing)
    return names["call"]


def _without_kernel(statement: ast.stmt) -> ast.stmt | None:
    """The statement; if it compiles a kernel into a name, one that assigns a stand-in; None if it only compiles."""
    if "async_compile" not in {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}:
        return statement
    if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call):
        target = statement.targets[0]
        if isinstance(target, ast.Name) and target.id != "async_compile":
            return ast.Assign([target], ast.Name("_no_kernel", ast.Load()))
    return None


class _Nothing:
    """Stands in for a compiled C++ or Triton kernel, or an assertion: does nothing."""

    def __call__(self, *_: Any, **__: Any) -> None:
        pass

    run = __call__


def _allocate(device: str, size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def _reinterpret(tensor: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
    return tensor.as_strided(size, stride, tensor.storage_offset() + offset)
