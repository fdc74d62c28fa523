"""Example inputs: as the user gives them, as the arguments of a call, and as fake tensors on the planned device; and
which of their sizes the user declares to change from batch to batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from torch import nn

from memopt.compat.dynamo import marked_changing
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


Place: TypeAlias = tuple[int, int]
"""The number of a tensor in `tensors_in(call)`, and one of its dimensions."""


def declared_sizes(dynamic: Any, call: Call, model: nn.Module, *, with_targets: bool) -> dict[Place, int | None]:
    """The dimensions of a call's tensors that the user declares to change, as `(number of the tensor, dimension)`, each
    with its largest size, or None where the declaration has no `max`.

    Args:
        dynamic: nested like the batch (a dict by the forward's argument names, or a tuple), with `{dimension: Dim}` or
            a sequence of one `Dim` per dimension for a tensor, None for what does not change. A `Dim` is
            `torch.export.Dim("length", max=2048)`, `Dim.AUTO` or `Dim.DYNAMIC`; None, `Dim.STATIC` and numbers are
            sizes that do not change.
        with_targets: the call is `(inputs, targets)`, as with a `loss_fn`.

    Raises `ValueError` for a name, a dimension or a value that does not fit the batch."""
    if dynamic is None:
        return {}
    numbers = tensor_numbers(call)
    given: Any = call[0]
    if with_targets and len(given) == 1:
        (given,) = given  # the batch of a loss function that takes the model
    elif not with_targets and isinstance(dynamic, Mapping):
        given = {**dict(zip(inspect.signature(model.forward).parameters, call[0], strict=False)), **call[1]}
    return {
        (numbers[id(tensor)], dimension): most
        for tensor, dimensions in _matched(dynamic, given, "dynamic")
        for dimension, most in dimensions.items()
    }


def all_places(call: Call) -> set[Place]:
    """All dimensions of a call's tensors, each as `(number of the tensor in tensors_in, dimension)`."""
    return {(number, dim) for number, tensor in enumerate(tensors_in(call)) for dim in range(tensor.dim())}


def markable(call: Call, places: Collection[Place]) -> set[Place]:
    """The part of `places`, pairs `(number of the tensor, dimension)`, whose sizes can become symbols: those above 1,
    since torch takes sizes of 0 and 1 as constants."""
    tensors = tensors_in(call)
    return {(number, dimension) for number, dimension in places if tensors[number].shape[dimension] > 1}


def marked(call: Call, places: Collection[Place]) -> AbstractContextManager[None]:
    """A context in which Dynamo, when it captures `call`, makes symbols of the sizes at `places`: dimensions of the
    call's tensors, each as `(number of the tensor, dimension)`."""
    tensors = tensors_in(call)
    return marked_changing([(tensors[number], dimension) for number, dimension in places])


def at_largest(call: Call, places: Mapping[Place, int | None]) -> Call:
    """The call with "meta" tensors in place of its tensors, in which each dimension in `places` has its declared
    largest size, if it has one. The call itself where no largest size is declared."""
    if not any(places.values()):
        return call
    numbers = tensor_numbers(call)

    def largest(tensor: torch.Tensor) -> torch.Tensor:
        shape = list(tensor.shape)
        for (number, dimension), most in places.items():
            if number == numbers[id(tensor)] and most is not None:
                shape[dimension] = most
        return torch.empty(shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)

    return replaced_tensors(call, largest)


def _matched(dynamic: Any, given: Any, path: str) -> Iterator[tuple[torch.Tensor, dict[int, int | None]]]:
    """The tensors in `given` that have changing sizes: their dimensions, and the largest size of each.

    `path` names this part of `dynamic` in errors. Raises `ValueError` where it is not nested as `given` is, or names
    what `given` does not have."""
    if dynamic is None:
        return
    if isinstance(given, torch.Tensor):
        yield given, _dimensions(dynamic, given, path)
    elif isinstance(given, Mapping) and isinstance(dynamic, Mapping):
        for name, inner in dynamic.items():
            if name not in given:
                raise ValueError(
                    f"{path} names {name!r}, which is not in the batch; it has {', '.join(map(repr, given))}"
                )
            yield from _matched(inner, given[name], f"{path}[{name!r}]")
    elif isinstance(given, Sequence) and isinstance(dynamic, Sequence) and len(dynamic) <= len(given):
        for number, inner in enumerate(dynamic):
            yield from _matched(inner, given[number], f"{path}[{number}]")
    else:
        raise ValueError(
            f"{path} must be nested like the batch, such as {{'input_ids': {{1: Dim('length', max=2048)}}}}, "
            f"not {dynamic!r}"
        )


def _dimensions(dynamic: Any, tensor: torch.Tensor, path: str) -> dict[int, int | None]:
    """The changing dimensions of one tensor, with the largest size of each if it has one.

    Raises `ValueError` for what is no such dimensions, for a dimension that the tensor does not have, and for a largest
    size below its own."""
    if isinstance(dynamic, str) or not isinstance(dynamic, (Mapping, Sequence)):
        raise ValueError(f"{path} must name dimensions, such as {{1: Dim('length', max=2048)}}, not {dynamic!r}")
    sizes = dynamic.items() if isinstance(dynamic, Mapping) else enumerate(dynamic)
    found: dict[int, int | None] = {}
    for dimension, dim in sizes:
        if not isinstance(dimension, int) or not -tensor.dim() <= dimension < tensor.dim():
            raise ValueError(
                f"{path} names dimension {dimension!r} of a tensor of shape {tuple(tensor.shape)}; name one it has"
            )
        place = dimension % tensor.dim()
        if dim is None or isinstance(dim, int) or dim == torch.export.Dim.STATIC:
            continue
        if not (isinstance(dim, type(torch.export.Dim.AUTO)) or hasattr(dim, "max")):
            raise ValueError(
                f"{path}[{dimension}] must be a torch.export.Dim, such as Dim('length', max=2048), or None for "
                f"a size that does not change, not {dim!r}"
            )
        most = getattr(dim, "max", None)
        found[place] = int(most) if most is not None and most < 2**60 else None
        if found[place] is not None and tensor.shape[place] > found[place]:  # type: ignore[operator]
            raise ValueError(
                f"{path}[{dimension}] says that dimension {dimension} is at most {found[place]}, but the batch has "
                f"{tensor.shape[place]}; give that Dim a larger max, or a smaller batch"
            )
    return found
