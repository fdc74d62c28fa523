"""Runs an optimizer's own code on one tensor at a time, and divides large tensors into pieces."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import optim

from memopt.device.op_call import fills

# Elements of a piece: kernels on them take longer than their launch, and a float32 copy is 8 MB.
PIECE_ELEMENTS = 2**21

# torch's optimizers that treat each element by itself, so that a tensor may be stepped in pieces.
_ELEMENTWISE = (
    optim.Adadelta, optim.Adagrad, optim.Adam, optim.Adamax, optim.AdamW, optim.ASGD, optim.NAdam, optim.RAdam,
    optim.RMSprop, optim.Rprop, optim.SGD,
)  # fmt: skip


def step_one(
    optimizer: optim.Optimizer, options: Mapping[str, Any], tensor: torch.Tensor, state: dict[str, Any]
) -> dict[str, Any]:
    """Step `tensor`, which has a gradient, by the code of `optimizer` with a group's `options` and the tensor's
    `state`, whose tensors may be written to. Returns the state after the step; groups and state of the optimizer are
    not changed. Raises `ValueError` for an optimizer whose step changes its group's options, since all parameters share
    these."""
    groups, states = optimizer.param_groups, optimizer.state
    own = {key: value for key, value in options.items() if key not in ("params", "param_names")}
    alone = {**own, "params": [tensor]}
    optimizer.param_groups = [alone]
    optimizer.state = defaultdict(dict, {tensor: state})
    try:
        optimizer.step()
        found: dict[str, Any] = optimizer.state[tensor]
    finally:
        optimizer.param_groups, optimizer.state = groups, states
    changed = [key for key, value in alone.items() if key != "params" and _differs(value, own.get(key))]
    if changed:
        raise ValueError(
            f"{type(optimizer).__name__} changes the option {changed[0]!r} of its parameter group in each step, so "
            "that its parameters cannot be stepped one by one; use an optimizer that keeps such values in the state of "
            "each parameter"
        )
    return found


def _differs(value: Any, before: Any) -> bool:
    if value is before or isinstance(value, torch.Tensor):
        return value is not before
    return bool(value != before)


def is_elementwise(optimizer: optim.Optimizer) -> bool:
    """Whether the optimizer is one of torch's that treat each element by itself; False for subclasses of these."""
    return type(optimizer) in _ELEMENTWISE


@dataclass(frozen=True)
class Slice:
    """A part of a parameter and of all tensors of its shape: elements `start` to `stop` in memory order, or the whole
    tensor in its shape (`flat=False`), for optimizers that use the shape."""

    start: int
    stop: int
    flat: bool
    first: bool
    last: bool

    @property
    def whole(self) -> bool:
        """Whether this is the only piece of its parameter."""
        return self.first and self.last

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view of this piece of `tensor`."""
        return flat(tensor)[self.start : self.stop] if self.flat else tensor.detach()


def pieces_of(parameter: torch.Tensor, *, elementwise: bool) -> Iterator[Slice]:
    """The pieces of a parameter, to be stepped one after the other; one piece unless `elementwise`."""
    elements = parameter.numel()
    if not (elementwise and parameter.dim() and is_dense(parameter)):
        yield Slice(0, elements, flat=False, first=True, last=True)
        return
    starts = range(0, max(elements - PIECE_ELEMENTS, 0) + 1, PIECE_ELEMENTS)  # the last takes the rest: none is small
    for start in starts:
        stop = elements if start == starts[-1] else start + PIECE_ELEMENTS
        yield Slice(start, stop, flat=True, first=start == 0, last=stop == elements)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A view of all elements of a dense tensor, in memory order."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a contiguous range of memory without gaps or overlaps, in any order of dimensions."""
    return fills(sorted(zip(tensor.stride(), tensor.shape, strict=True)))


def like(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """`tensor` with the strides of `parameter`: itself where it has them, else a copy."""
    if tensor.stride() == parameter.stride():
        return tensor
    return torch.empty_like(parameter, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
