"""Example inputs: as the user gives them, as the arguments of a call, and as fake tensors on the planned device."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from memopt.compat.fakes import FakeTensor, FakeTensorMode, to_fake
from memopt.compat.modules import Parts
from memopt.compat.operators import tree_leaves, tree_map
from memopt.compat.tensors import special_kind
from memopt.errors import CaptureError

Call = tuple[tuple[Any, ...], dict[str, Any]]

_NO_CONTAINERS = frozenset((bool, int, float, complex, str, type(None)))


def as_call(example_inputs: Any, *, with_targets: bool) -> Call:
    """The positional and keyword arguments for a batch: a dict becomes keywords, a tuple or list positional arguments,
    a tensor the only argument.

    With a loss function (`with_targets`) a batch is the pair `(inputs, targets)` and becomes two positional arguments.
    Raises `TypeError` for anything else."""
    if with_targets:
        if not isinstance(example_inputs, (tuple, list)) or len(example_inputs) != 2:
            raise TypeError(
                f"with a loss_fn a batch must be a pair (inputs, targets), not {_kind(example_inputs)}; put the "
                "inputs of the model into one tuple or dict, or, if the loss_fn takes the model and the batch, name "
                "its first parameter `model`"
            )
        return tuple(example_inputs), {}
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    if isinstance(example_inputs, torch.Tensor):
        return (example_inputs,), {}
    raise TypeError(
        f"example_inputs must be a tuple (positional) or a dict (keywords) of the model's arguments, "
        f"not {_kind(example_inputs)}"
    )


def with_batches(call: Call, times: int) -> Call:
    """The call with a batch that is `times` as large, as tensors on "meta". The batch's size is that of the first
    dimension of the first tensor that has dimensions; every tensor whose first dimension has that size grows."""
    sizes = [one.shape[0] for one in tree_leaves(call) if isinstance(one, torch.Tensor) and one.dim()]

    def larger(one: Any) -> Any:
        if not isinstance(one, torch.Tensor) or not one.dim() or one.shape[0] != sizes[0]:
            return one
        shape = times * one.shape[0], *one.shape[1:]
        return torch.empty(shape, dtype=one.dtype, device="meta", requires_grad=one.requires_grad)

    return tree_map(larger, call)


def takes_model(loss_fn: Callable[..., Any] | None) -> bool:
    """Whether a loss function takes the model and the batch rather than output and target: its first parameter is named
    `model`, or annotated as a module."""
    first = next(iter(_parameters(loss_fn)), None)
    if first is None:
        return False
    kind = first.annotation
    named = isinstance(kind, str) and kind.split(".")[-1] == "Module"
    return first.name == "model" or named or (isinstance(kind, type) and issubclass(kind, nn.Module))


def spreads_batch(loss_fn: Callable[..., Any]) -> bool:
    """Whether a loss function that takes the model takes the elements of a batch as separate arguments."""
    _, *rest = _parameters(loss_fn)
    needed = [one for one in rest if one.default is one.empty]
    return len(needed) > 1 or any(one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in rest)


def _parameters(function: Any) -> list[inspect.Parameter]:
    """The parameters of a function; none for a module, and where `inspect` finds no signature."""
    if function is None or isinstance(function, nn.Module):
        return []
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []


def batch_call(batch: Any, loss_fn: Callable[..., Any] | None) -> Call:
    """The arguments of a training call for a batch: as `as_call` makes them; or, where the loss function takes the
    model, the batch as the only argument."""
    return ((batch,), {}) if takes_model(loss_fn) else as_call(batch, with_targets=loss_fn is not None)


def tensors_in(call: Call) -> list[torch.Tensor]:
    """The tensors among the arguments, those in nested containers included, in order."""
    found = []
    for value in (*call[0], *call[1].values()):
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif type(value) not in _NO_CONTAINERS:
            found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return found


def tensor_numbers(call: Call) -> dict[int, int]:
    """For the `id` of each tensor its number in `tensors_in`; the first one for a tensor passed twice."""
    numbers: dict[int, int] = {}
    for number, tensor in enumerate(tensors_in(call)):
        numbers.setdefault(id(tensor), number)
    return numbers


def leaf_name(call: Call, number: int) -> str:
    """The name of tensor `number` (in `tensors_in`) of the call, for messages: its keyword, else as in "input 0"."""
    wanted = tensors_in(call)[number]
    return next((name for name, value in call[1].items() if value is wanted), f"input {number}")


def call_signature(call: Call) -> str:
    """A text that is equal for two calls only if one capture serves both: it has the shapes, strides, dtypes and
    devices of tensors, and all other arguments."""

    return _described(call, lambda tensor: (tuple(tensor.shape), tensor.stride()))


def call_kind(call: Call) -> str:
    """A text that is equal for calls that differ in the sizes of their tensors only."""
    return _described(call, lambda tensor: (tensor.dim(),))


def _described(call: Call, form: Callable[[torch.Tensor], tuple[Any, ...]]) -> str:
    """The arguments of a call as text; of tensors their `form`, dtype, device, and whether they require gradients."""

    def describe(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return (*form(leaf), str(leaf.dtype), str(leaf.device), leaf.requires_grad)
        return leaf

    return repr(tree_map(describe, call))


def in_dtype(inputs: Any, dtype: torch.dtype | None) -> Any:
    """The same inputs, nested as they are, with fp32 tensors cast to `dtype`; unchanged where `dtype` is None."""

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.dtype is torch.float32 else leaf

    return inputs if dtype is None else tree_map(cast, inputs)


def check_device(call: Call, model: nn.Module, *, meta_allowed: bool = False) -> None:
    """Raise `ValueError` where an input is on another device than the model's parameters.

    Scalar tensors may be on any device, as in torch. With `meta_allowed`, for calls that are planned and not run,
    inputs or model may be on "meta"."""
    home = next(model.parameters()).device
    for tensor in tensors_in(call):
        only_planned = meta_allowed and "meta" in (home.type, tensor.device.type)
        if tensor.device != home and tensor.dim() > 0 and not only_planned:
            raise ValueError(
                f"an input of shape {tuple(tensor.shape)} is on {tensor.device}, but the model is on {home}; "
                f"move one of them with .to(…)"
            )


def special_tensors(call: Call, parts: Parts) -> dict[str, str]:
    """The tensors among the arguments of `call`, and among the parameters and buffers in `parts`, that torch.compile
    cannot capture: a dict from the name of each, for messages, to its kind, such as "sparse CSR"."""
    given = [(number, special_kind(tensor)) for number, tensor in enumerate(tensors_in(call))]
    return parts.special | {leaf_name(call, number): kind for number, kind in given if kind}


def check_kinds(call: Call, parts: Parts) -> None:
    """Raise `CaptureError` where an argument, a parameter or a buffer is a sparse, quantised, mkldnn or nested tensor,
    which torch.compile does not capture."""
    for name, kind in special_tensors(call, parts).items():
        raise CaptureError(
            f"{name} is a {kind} tensor, whose operators cannot be captured, so that steps can only run as the "
            "plain model does: leave out example_inputs and give a budget in which the plain step fits, or compute "
            "with a dense tensor (to_dense(), dequantize(), padding)"
        )


def on_meta(call: Call) -> Call:
    """The same arguments with "meta" tensors in place of its tensors; they require gradients where the originals
    do, and a tensor given twice gets one replacement."""

    def hollow(tensor: torch.Tensor) -> torch.Tensor:
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return empty.requires_grad_(tensor.requires_grad)

    return replaced_tensors(call, hollow)


def with_zeros(call: Call, device: torch.device) -> Call:
    """The same arguments with zeros on `device` in place of fake and "meta" tensors, one for each distinct tensor."""

    def values(tensor: torch.Tensor) -> torch.Tensor:
        if not (tensor.is_meta or isinstance(tensor, FakeTensor)):
            return tensor
        zeros = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device).zero_()
        return zeros.requires_grad_(tensor.requires_grad)

    return replaced_tensors(call, values)


def fake_call(call: Call, mode: FakeTensorMode, device: torch.device) -> Call:
    """The same arguments with fake tensors in place of tensors. "meta" tensors become fake tensors on `device`, others
    stay on their device; a tensor given twice gets one fake."""
    return replaced_tensors(
        call, lambda tensor: to_fake(mode, tensor, device if tensor.device.type == "meta" else tensor.device)
    )


def replaced_tensors(call: Call, make: Callable[[torch.Tensor], torch.Tensor]) -> Call:
    """The call with `make(tensor)` in place of each tensor, made once per distinct tensor."""
    made: dict[int, torch.Tensor] = {}

    def replaced(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in made:
            made[id(leaf)] = make(leaf)
        return made[id(leaf)]

    return tree_map(replaced, call)


def copied(call: Call) -> Call:
    """The call with copies of its tensors, so that writes and gradients do not reach the originals."""
    return replaced_tensors(call, lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad))


def _kind(value: Any) -> str:
    """A value's type for an error message, with the length of a tuple or list."""
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, (tuple, list)) else "")
