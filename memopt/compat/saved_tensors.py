"""What autograd saves for the backward: read, replaced and freed, and whether it was changed since."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from memopt.compat.tensors import WeakStorage, weak_storages
from passes.compat import private

PRIVATE_NAMES = private("""
    torch._C._autograd: _unsafe_set_version_counter _top_saved_tensors_default_hooks(False)
        _pop_saved_tensors_default_hooks _push_saved_tensors_default_hooks
    torch._C: _FunctionBase._raw_saved_tensors
""")


def saved_by(node: Any) -> list[torch.Tensor]:
    """The tensors that an autograd node holds for its backward; none once they are freed, and where `note_packed` has
    recorded hooks. For a value that a saved-tensor hook has packed, those in what the hook returned; the node of an
    `autograd.Function` is read through the hooks, as in its backward, unless a saved tensor was changed in place."""
    saved: list[torch.Tensor] = []
    if _PACKED in node.metadata:
        return saved
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        try:  # reading _raw_saved_tensors of a node that is freed keeps what it depends on alive for good
            saved += [one for one in node.saved_tensors if isinstance(one, torch.Tensor)]
            return saved
        except RuntimeError as error:
            if "inplace" not in str(error):  # freed
                return saved
    for raw in _raw_saved(node):
        try:
            part = raw.data
        except RuntimeError:  # freed
            continue
        saved += [one for one in (part if isinstance(part, tuple) else (part,)) if isinstance(one, torch.Tensor)]
    return saved


def _raw_saved(node: Any) -> Iterator[Any]:
    """Yields the `SavedTensor`s of an autograd node, in the same order for every node of a class; none once freed."""
    kind = type(node)
    if kind not in _SAVED:
        _SAVED[kind] = tuple(name for name in dir(node) if name.startswith("_raw_saved_"))
    for name in _SAVED[kind]:
        try:
            found = getattr(node, name)
        except RuntimeError:  # freed
            continue
        yield from (one for one in (found if isinstance(found, (tuple, list)) else (found,)) if one is not None)


_SAVED: dict[type, tuple[str, ...]] = {}
"""For the class of an autograd node, the names of the attributes in which it saves tensors."""


def replace_saved(
    nodes: Iterable[Any], kept: Collection[int], device: torch.device, values: Callable[[], Sequence[torch.Tensor]]
) -> int:
    """Free the tensors on a device that autograd nodes have saved, except those at the addresses `kept`. A backward
    that reads a freed tensor calls `values` and reads the tensor in the same place of its result: what `all_saved`
    returns for the nodes of a second run of the same forward, in the same order. Returns the bytes freed, without those
    that other code still holds."""
    later, freed = _Later(values), dict[int, tuple[WeakStorage, int]]()
    number = -1
    for node in nodes:
        for raw, held in [(raw, tuple(weak_storages((value,)))) for raw, value in _with_values(node)]:
            number += 1
            memory = {one.address: (one, one.nbytes) for one in held if one.device == device}
            if any(nbytes for _, nbytes in memory.values()) and memory.keys().isdisjoint(kept):
                with suppress(RuntimeError):  # the user's own hooks have packed it
                    raw.register_hooks(partial(later.packed, number), later.take)
                    node.metadata[_REPLACED] = True
                    freed |= memory
    return sum(nbytes for storage, nbytes in freed.values() if not storage.nbytes)


def all_saved(nodes: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors that the autograd nodes of a forward hold for its backward, in the order of `replace_saved`."""
    return [value for node in nodes for _, value in _with_values(node)]


def _with_values(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yields, for each tensor that an autograd node holds for its backward, torch's `SavedTensor` and the tensor. The
    backward must not have freed them."""
    if isinstance(node, torch.autograd.function.BackwardCFunction):  # `data` of theirs keeps a leaf alive for good
        yield from zip(node._raw_saved_tensors, node.saved_tensors, strict=True)
    else:
        yield from ((raw, raw.data) for raw in _raw_saved(node))


class _Later:
    """Saved tensors that are computed all at once, when the first of them is read. Each is returned only once."""

    def __init__(self, values: Callable[[], Sequence[torch.Tensor]]) -> None:
        self.values, self._numbers = values, set[int]()
        self._found: dict[int, torch.Tensor] = {}

    def packed(self, number: int, _: torch.Tensor) -> int:
        """Records the number of a saved tensor, and returns it: autograd keeps it in the tensor's place."""
        self._numbers.add(number)
        return number

    def take(self, number: int) -> torch.Tensor:
        if number not in self._found:
            values = self.values()
            self._found = {one: values[one].detach() for one in self._numbers}
        return self._found.pop(number)


_REPLACED = "memopt replaced what it saved"
_PACKED = "the user's hooks packed what it saved"


def unseen_by_hooks() -> AbstractContextManager[None]:
    """A context in which the tensors that autograd saves do not go to saved-tensor hooks that were set outside of it,
    such as those of a checkpoint, which counts what the forward saves. Hooks that are set within the context work."""
    return _set_aside(lambda: True)


def unseen_by_checkpoints() -> AbstractContextManager[None]:
    """A context in which the tensors that autograd saves do not go to a `torch.utils.checkpoint` around it. A planned
    forward saves what its plan says; a second run of it in the backward would take its time and memory again."""
    return _set_aside(lambda: checkpoint_around() is not None)


@contextmanager
def _set_aside(is_innermost: Callable[[], bool]) -> Iterator[None]:
    """A context without the hooks on saved tensors around it, from the innermost on for as long as that is one of those
    to be set aside."""
    around = []
    try:
        while (hooks := torch._C._autograd._top_saved_tensors_default_hooks(False)) is not None and is_innermost():
            around.append(hooks)
            torch._C._autograd._pop_saved_tensors_default_hooks()
        yield
    finally:
        for hooks in reversed(around):
            torch._C._autograd._push_saved_tensors_default_hooks(*hooks)


def checkpoint_around() -> tuple[Any, bool] | None:
    """The innermost `torch.utils.checkpoint` around this code, as an object that is the same in its first and second
    run, and whether this is the second run. None outside of checkpoints, and with `use_reentrant=True`."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    pack = inspect.unwrap(hooks[0]) if hooks else None
    if getattr(pack, "__module__", None) != checkpoint.__module__:
        return None
    found = inspect.getclosurevars(pack).nonlocals
    return (found["frame"], False) if "frame" in found else (found["target_frame_ref"](), True)


def note_packed(node: Any) -> bool:
    """Whether the user's saved-tensor hooks (a checkpoint, `save_on_cpu`) have packed what an `autograd.Function`'s new
    node has saved, also recorded in the node: reading would call the hooks, and run a checkpoint's function again."""
    packed = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
    if packed:
        node.metadata[_PACKED] = True
    return packed


def hooks_of_the_user() -> bool:
    """Whether the innermost saved-tensor hooks that are set come from code other than torch's: False for those of
    `save_on_cpu` and of checkpoints, which are torch's own."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and not str(getattr(hooks[0], "__module__", "")).startswith("torch.")


def changed_since_saved(node: Any) -> str:
    """Class and shape of a tensor that an `autograd.Function`'s node has saved and that was changed in place since, a
    later error of torch; "" for none, or where `replace_saved` or `note_packed` have marked the node."""
    if node is None or _REPLACED in node.metadata or _PACKED in node.metadata:
        return ""
    try:
        node.saved_tensors  # noqa: B018
    except RuntimeError as error:
        found = re.search(r"inplace operation: \[(.*?\])", str(error))
        return found[1] if found else ""
    return ""


def set_versions(tensors: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
    """Set the version counters (`Tensor._version`) of tensors back, so that autograd treats them as unchanged."""
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


def free_saved_tensors(node: Any) -> None:
    """Free the tensors that an `autograd.Function`'s node has saved. To be called inside a backward pass that does not
    retain its graph, whose end would free them."""
    node.maybe_clear_saved_tensors()
