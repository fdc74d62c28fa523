"""Example inputs: as the user gives them, as the arguments of a call, and as fakes on the planned device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from memopt.compat.fakes import FakeTensor, FakeTensorMode, to_fake
from memopt.compat.pytree import tree_leaves, tree_map

Call = tuple[tuple[Any, ...], dict[str, Any]]


def as_call(example_inputs: Any, *, with_targets: bool) -> Call:
    """Positional and keyword arguments from a batch: a dict is keywords, a tuple positional, a tensor the only one.

    With a loss function (`with_targets`) a batch is the pair `(inputs, targets)` and becomes two positional arguments.
    """
    if with_targets:
        if not isinstance(example_inputs, (tuple, list)) or len(example_inputs) != 2:
            raise TypeError(
                f"with a loss_fn a batch must be a pair (inputs, targets), not {_kind(example_inputs)}; "
                "put the inputs of the model into one tuple or dict"
            )
        return tuple(example_inputs), {}
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    if isinstance(example_inputs, torch.Tensor):
        return (example_inputs,), {}
    raise TypeError(
        f"example_inputs must be a tuple (positional) or a dict (keywords) of what the model takes, "
        f"not {_kind(example_inputs)}"
    )


def tensors_in(call: Call) -> Iterator[torch.Tensor]:
    """The tensors among the arguments, however nested."""
    return (leaf for leaf in tree_leaves(call) if isinstance(leaf, torch.Tensor))


def call_signature(call: Call) -> str:
    """What captures of two calls can differ by: shapes, types and devices of tensors, and all other arguments."""

    def describe(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return (tuple(leaf.shape), leaf.stride(), str(leaf.dtype), str(leaf.device), leaf.requires_grad)
        return leaf

    return repr(tree_map(describe, call))


def in_dtype(inputs: Any, dtype: torch.dtype | None) -> Any:
    """The same inputs, however nested, with those in fp32 turned to `dtype`; as they are without one."""

    def turned(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.dtype is torch.float32 else leaf

    return inputs if dtype is None else tree_map(turned, inputs)


def check_device(call: Call, model: nn.Module, *, meta_allowed: bool = False) -> None:
    """Raise `ValueError` where an input lies on another device than the model's parameters.

    Scalars may lie anywhere, as in torch. `meta_allowed`: nothing is run, so inputs or model may be on "meta".
    """
    home = next(model.parameters()).device
    for tensor in tensors_in(call):
        planned_only = meta_allowed and "meta" in (home.type, tensor.device.type)
        if tensor.device != home and tensor.dim() > 0 and not planned_only:
            raise ValueError(
                f"an input of shape {tuple(tensor.shape)} is on {tensor.device}, but the model is on {home}; "
                f"move one of them with .to(…)"
            )


def on_meta(call: Call) -> Call:
    """The same arguments with tensors that hold nothing; one for a tensor given twice."""
    return _with_stand_ins(
        call, lambda each: torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="meta")
    )


def with_zeros(call: Call, device: torch.device) -> Call:
    """The same arguments with zeros on `device` for tensors that have no values; one for a tensor given twice."""

    def values(tensor: torch.Tensor) -> torch.Tensor:
        if not (tensor.is_meta or isinstance(tensor, FakeTensor)):
            return tensor
        zeros = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device).zero_()
        return zeros.requires_grad_(tensor.requires_grad)

    return _with_stand_ins(call, values)


def fake_call(call: Call, mode: FakeTensorMode, device: torch.device) -> Call:
    """The same arguments with fakes for tensors; one fake for a tensor given twice."""
    return _with_stand_ins(
        call, lambda each: to_fake(mode, each, device if each.device.type == "meta" else each.device)
    )


def same_tensors(call: Call) -> list[int]:
    """For each tensor of a call the place where it stands first."""
    places: dict[int, int] = {}
    return [places.setdefault(id(each), len(places)) for each in tensors_in(call)]


def _with_stand_ins(call: Call, make: Callable[[torch.Tensor], torch.Tensor]) -> Call:
    made: dict[int, torch.Tensor] = {}

    def stand_in(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in made:
            made[id(leaf)] = make(leaf)
        return made[id(leaf)]

    return tree_map(stand_in, call)


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, (tuple, list)) else "")
