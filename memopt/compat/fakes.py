"""Fake tensors: tensors with shape, dtype and device, but without memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode

from memopt.compat.tensors import holds_tensors, is_of_own_class
from passes.compat import Replacement, private, replaced

PRIVATE_NAMES = private("""
    torch._subclasses.fake_tensor: FakeTensor FakeTensorMode DataDependentOutputException DynamicOutputShapeException
        FakeTensorConverter.from_meta_and_device(self, mode, tensor, device)
        FakeTensorMode.from_tensor(self, tensor, symbolic_context=, source=, trace=) .fake_tensor_converter? .shape_env?
        FakeTensor.__init__(self, mode, meta, device, constant) .fake_device?
    torch._subclasses.fake_impls: op_implementations_dict
    torch._prims_common: suggest_memory_format
    torch._guards: TracingContext.get .fake_mode? .tensor_to_context?
    torch.fx.experimental.symbolic_shapes: ShapeEnv.ignore_fresh_unbacked_symbols .fake_tensor_cache?
""")


DEPENDS_ON_VALUES = DataDependentOutputException, DynamicOutputShapeException
"""The errors that fakes raise at an operator whose results, or their sizes, depend on values."""


def new_fake_mode() -> FakeTensorMode:
    """A fake mode with symbolic shapes of its own."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # it imports sympy

    return FakeTensorMode(shape_env=ShapeEnv())


def forget_dispatches(mode: FakeTensorMode) -> None:
    """Empty the cache in which a fake mode with symbolic shapes keeps results of operators, to free its memory."""
    if mode.shape_env is not None:
        mode.shape_env.fake_tensor_cache.clear()


def broadcast_masks() -> Replacement:
    """A replacement of torch's rule for `masked_select` on fake tensors: the result may have as many elements as the
    shape that its operands broadcast to. Torch asserts the number of elements of the first operand in every step."""
    from torch._subclasses.fake_impls import op_implementations_dict as implementations

    select: Any = torch.ops.aten.masked_select.default
    return implementations, select, _broadcasting(implementations[select])


@cache
def _broadcasting(own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def masked_select(mode: Any, func: Any, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        shape = torch.broadcast_shapes(value.shape, mask.shape)  # type: ignore[no-untyped-call]
        return own(mode, func, value.expand(shape), mask)

    return masked_select


@cache
def know_resizing_gradients() -> None:
    """Register rules by which the backwards of those `upsample_*` operators run on fake tensors with symbolic sizes
    whose own rules in torch take fixed sizes only."""
    from torch._subclasses.fake_impls import op_implementations_dict as implementations

    linear, nearest = "linear1d bilinear2d trilinear3d bicubic2d", "nearest1d nearest3d"
    names = [f"upsample_{kind}" for kind in f"{linear} {nearest}".split()]
    for name in (*names, "_upsample_nearest_exact1d", "_upsample_nearest_exact3d"):
        operator = getattr(torch.ops.aten, f"{name}_backward").default
        implementations.setdefault(operator, _resizing_gradient)


def _resizing_gradient(
    _mode: Any, func: Any, gradient: torch.Tensor, _sizes: Any, input_sizes: Any, *_settings: Any, **_named: Any
) -> Any:
    """A fake gradient with respect to the value that was resized, for symbolic sizes. For bilinear and trilinear
    resizing it has the memory format of the incoming gradient."""
    if not any(isinstance(size, torch.SymInt) for size in (*gradient.shape, *input_sizes)):
        return NotImplemented
    made = gradient.new_empty(input_sizes)
    if func.__name__.startswith(("upsample_bilinear2d", "upsample_trilinear3d")):
        return made.to(memory_format=suggest_memory_format(gradient))
    return made


def to_fake(
    mode: FakeTensorMode, tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A fake of `tensor` (real, meta or fake) on `device`, in `dtype` if given; a parameter's fake is a parameter. That
    of a parameter of a class of its own has its attributes, and fakes of the tensors in them: the scales of a 4-bit
    weight of bitsandbytes are there."""
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device="meta")
    fake = mode.fake_tensor_converter.from_meta_and_device(mode, meta, device)
    if isinstance(tensor, torch.nn.Parameter):
        parameter = torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
        if is_of_own_class(tensor):
            vars(parameter).update(vars(tensor))
            _fake_attributes(parameter, lambda held: to_fake(mode, held.detach(), device), {})
        return parameter
    return fake.requires_grad_(tensor.requires_grad) if tensor.requires_grad else fake


def _fake_attributes(value: object, fake: Callable[[torch.Tensor], torch.Tensor], twins: dict[int, Any]) -> None:
    """Replace the tensors among an object's attributes by fakes, and the objects that hold tensors by copies."""
    for name, held in vars(value).items():
        if id(held) in twins:
            vars(value)[name] = twins[id(held)]
        elif isinstance(held, torch.Tensor):
            vars(value)[name] = fake(held)
        elif holds_tensors(held):
            twin = vars(value)[name] = twins[id(held)] = object.__new__(type(held))
            vars(twin).update(vars(held))
            _fake_attributes(twin, fake, twins)


def fake_within(storage: torch.UntypedStorage, like: torch.Tensor) -> FakeTensor:
    """A fake tensor in this storage, with the shape, dtype and device of the fake `like`."""
    assert isinstance(like, FakeTensor)
    meta = torch.empty(0, dtype=like.dtype, device="meta")
    meta.set_(storage, like.storage_offset(), like.shape, like.stride())
    return FakeTensor(like.fake_mode, meta, like.fake_device, like.constant)


def device_asked_for(func: Any, args: Sequence[Any]) -> torch.device | None:
    """The device of a fake tensor, if the operator call only queries it; None for any other call. Autograd queries it
    several times for each operator, and the fake mode would take longer to answer."""
    if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
        return args[0].fake_device
    return None


def device_type_of(tensor: torch.Tensor) -> str:
    """The type of a tensor's device; of a fake it is read without an operator call."""
    return tensor.fake_device.type if isinstance(tensor, FakeTensor) else tensor.device.type


def fresh_fakes(inputs: Sequence[Any]) -> tuple[FakeTensorMode, list[Any]]:
    """A new fake mode, and fakes in it for a region's inputs, so that tracing may write to them without changing those
    of Dynamo and AOTAutograd. To be called inside a Dynamo backend."""
    context: Any = torch._guards.TracingContext.get()
    mode = FakeTensorMode(shape_env=context.fake_mode.shape_env)

    def fake(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if isinstance(value, FakeTensor):
            return mode.from_tensor(value)
        symbolic = context.tensor_to_context.get(value)
        source = symbolic.tensor_source if symbolic is not None else None
        return mode.from_tensor(value, symbolic_context=symbolic, source=source, trace=False)

    return mode, [fake(value) for value in inputs]


@contextmanager
def unknown_numbers(inputs: Sequence[Any]) -> Iterator[list[Any]]:
    """Context that gives fake tensors for a region's inputs, to run the region on. `item()` of one that is a number
    (0-dimensional, without gradient) returns a symbol of unknown value, as while the region is traced: such fakes are
    clones, without the symbol with the input's value (`item_memo`). To be called inside a Dynamo backend."""
    mode, fakes = fresh_fakes(inputs)
    shapes: Any = mode.shape_env
    with mode, shapes.ignore_fresh_unbacked_symbols(), failing_on_fakes():
        yield [
            fake.clone() if isinstance(fake, torch.Tensor) and not (fake.dim() or fake.requires_grad) else fake
            for fake in fakes
        ]


def failing_on_fakes() -> AbstractContextManager[None]:
    """Context for calls on fakes that may fail, in which torch does not log each failure with its stack."""
    return replaced(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)
