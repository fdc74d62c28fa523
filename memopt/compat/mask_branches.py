"""Choices that transformers makes by values in eager mode, and gives up while Dynamo traces.

Both concern attention in which several heads share keys: with a mask the keys are repeated, without one attention
shares them itself, and the gradients of the keys are then summed in another order.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any, TypeGuard

import torch
from torch import fx

from memopt.compat.fakes import FakeTensor
from passes.compat import private

# transformers 4.56 and later.
PRIVATE_NAMES = (
    *private("transformers.masking_utils", "find_packed_sequence_indices", call="position_ids", needed=False),
    *private("transformers.integrations.sdpa_attention", "use_gqa_in_sdpa", needed=False),
    *private("torch._dynamo.comptime", "comptime"),
    *private("torch._dynamo.comptime", "ComptimeContext._i_will_not_complain_if_bc_breaks_InstructionTranslator"),
    *private("torch._dynamo.eval_frame", "skip_code"),
    *private("torch._dynamo.variables", "ConstantVariable.create"),
)

_SAME_VALUES = {"expand", "to", "long", "contiguous"}


@contextmanager
def eager_mask_branches(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Context in which transformers, traced by Dynamo, makes these choices as for the arguments of this call in eager
    mode. Dynamo guards on them: a call for which they differ is captured by itself."""
    names = "transformers.masking_utils", "transformers.integrations.sdpa_attention", "transformers.utils.import_utils"
    masking, attention, asking = map(sys.modules.get, names)
    for loaded in filter(None, (masking, asking)):
        _run_frames_eagerly(loaded)
    changes = [(masking, "find_packed_sequence_indices", _finding_packed)]
    if _mask_is_idle(args, kwargs):
        changes.append((attention, "use_gqa_in_sdpa", _sharing_keys))
    before = []
    for module, name, change in changes:
        if (original := getattr(module, name, None)) is not None:
            before.append((module, name, original))
            setattr(module, name, change(original))
    try:
        yield
    finally:
        for module, name, original in before:
            setattr(module, name, original)


@functools.cache
def _run_frames_eagerly(module: ModuleType) -> None:
    """Have Dynamo trace the functions of a module only as parts of graphs that begin elsewhere. Where a forward with
    graph breaks calls them outside of any graph, they run as in the eager model and choose by values."""
    from torch._dynamo.eval_frame import skip_code

    for function in vars(module).values():
        while isinstance(function, FunctionType) and function.__module__ == module.__name__:
            skip_code(function.__code__)
            function = getattr(function, "__wrapped__", None)


def _mask_is_idle(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call has an attention mask that masks nothing, or positions of one sequence a row: eager mode makes no
    mask of either."""
    for named in (kwargs, *(value for value in args if isinstance(value, Mapping))):
        mask, positions = named.get("attention_mask"), named.get("position_ids")
        if _has_values(mask):
            return bool(mask.all())
        if _has_values(positions):
            return bool((positions.diff(dim=-1) == 1).all())
    return False


def _has_values(value: Any) -> TypeGuard[torch.Tensor]:
    known = isinstance(value, torch.Tensor) and not value.is_meta and type(value) is not FakeTensor
    return known and value.dim() == 2


@functools.lru_cache(maxsize=2)
def _sharing_keys(original: Callable[..., bool]) -> Callable[..., bool]:
    def use_gqa_in_sdpa(attention_mask: Any, *rest: Any) -> bool:
        return original(None, *rest)

    return use_gqa_in_sdpa


@functools.lru_cache(maxsize=2)
def _finding_packed(original: Callable[..., Any]) -> Callable[..., Any]:
    from torch._dynamo.comptime import comptime
    from torch._dynamo.eval_frame import skip_code

    def find_packed_sequence_indices(position_ids: Any) -> Any:
        counts_up = False
        comptime(_note_counting)
        return None if counts_up else original(position_ids)

    skip_code(find_packed_sequence_indices.__code__)
    return find_packed_sequence_indices


def _note_counting(context: Any) -> None:
    """Set the traced function's `counts_up` where its positions are plainly 0, 1, 2 and so on: one sequence a row."""
    from torch._dynamo.variables import ConstantVariable

    if _counts_up(context.get_local("position_ids").as_proxy().node):
        traced = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
        traced.symbolic_locals["counts_up"] = ConstantVariable.create(True)


def _counts_up(node: fx.Node) -> bool:
    """Whether a value of Dynamo's graph is an `arange` of whole steps of one, shifted or repeated in rows."""
    while node.target is not torch.arange:
        tensors = [source for source in node.all_input_nodes if _is_tensor(source)]
        shifts = node.target in (operator.add, torch.add)
        if len(tensors) != 1 or not (shifts or node.target in _SAME_VALUES or _adds_rows(node)):
            return False
        if node.meta["example_value"].dtype != torch.int64:
            return False
        (node,) = tensors
    return len(node.args) < 3 and "step" not in node.kwargs


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.Tensor)


def _adds_rows(node: fx.Node) -> bool:
    """Whether a call adds a dimension in front: `unsqueeze(0)`, `[None]`, `[None, :]`."""
    if node.target == "unsqueeze":
        return node.args[1:] == (0,)
    return node.target is operator.getitem and node.args[1] in (None, (None,), (None, slice(None)))
