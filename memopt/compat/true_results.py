"""Where kernels differ from fakes, which is found by running operators on small tensors: in the layout and the dtype of
their results, and in the dtypes that they refuse."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import lru_cache
from typing import Any, TypeAlias

import torch

from memopt.compat.fakes import FakeTensor, FakeTensorMode
from memopt.compat.operators import RunningBy, plain_tensors, schema_of, tree_leaves, tree_map, without_torch_functions
from memopt.compat.symbols import is_symbolic
from passes.compat import private, size_seen

PRIVATE_NAMES = private("""
    torch._subclasses.fake_tensor: FakeTensorMode.dispatch(self, func, types, args, kwargs)
    torch._decomp: decomposition_table
""")

_SMALL = 4
"""Sizes up to this one are not replaced by smaller ones."""


def _made_small(
    args: Any, kwargs: Any, make: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call with large sizes replaced by small ones: equal sizes by equal ones, in the same order.
    `make` makes each tensor from one on "meta" that has its shape, strides and dtype. A symbol counts as the value that
    it had when it was made; no size may depend on data."""
    tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
    sizes = {size for tensor in tensors for size in _as_seen(tensor.shape)}
    large = sorted(size for size in sizes if size > _SMALL)
    numbers = {size: _SMALL + 1 + rank for rank, size in enumerate(large)}

    def small(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return make(_small_like(leaf, numbers))
        return size_seen(leaf) if isinstance(leaf, torch.SymInt) else leaf

    positional, named = tree_map(small, (args, kwargs))
    return [_small_sizes(argument, numbers) for argument in positional], named


def _order(tensor: torch.Tensor) -> tuple[int, ...]:
    """The dimensions of a tensor from the outermost to the innermost in memory."""
    strides = _as_seen(tensor.stride())
    return tuple(sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim)))


def _as_seen(sizes: Iterable[int | torch.SymInt]) -> list[Any]:
    """Sizes or strides, where a symbol counts as the value that it had when it was made. None may depend on data."""
    return list(map(size_seen, sizes))


def _small_like(tensor: torch.Tensor, numbers: dict[int, int]) -> torch.Tensor:
    """A tensor on "meta" with its sizes replaced as `numbers` says, and its dimensions in the same order in memory;
    expanded dimensions stay expanded."""
    strides, seen = [0] * tensor.dim(), _as_seen(tensor.stride())
    shape = [numbers.get(size, size) for size in _as_seen(tensor.shape)]
    step = 1
    for dim in reversed(_order(tensor)):
        if seen[dim] > 0:
            strides[dim] = step
            step *= shape[dim]
    return torch.empty_strided(shape, strides, dtype=tensor.dtype, device="meta")


def _small_sizes(argument: Any, numbers: dict[int, int]) -> Any:
    """An argument with sizes replaced as `numbers` says, if it is a list or tuple; any other one as it is."""
    if isinstance(argument, (list, tuple)):
        return type(argument)(numbers.get(entry, entry) if type(entry) is int else entry for entry in argument)
    return argument


_TRUSTED = ("mm", "conv", "empty", "new_", "as_strided", "attention", "set_", "_like", "lift", "rng")
"""Parts of the names of operators that are not tried: their fake results are laid out as their kernels' are, or the
layout depends on the sizes."""


def correct_strides(mode: FakeTensorMode) -> None:
    """From now on, let operators on fake tensors of this mode give results the strides and dtypes that kernels give. An
    operator with an input that is not contiguous, or with operands in two floating dtypes, is run once on small tensors
    of the same layouts, real and fake; where these differ, the real one's dtype and order are used."""
    if "dispatch" not in vars(mode):
        mode.dispatch = _Corrected(mode)  # type: ignore[method-assign]


def may_differ(func: Any, tensors: Iterable[torch.Tensor]) -> bool:
    """Whether the results of an operator on these operands may have other strides than torch's fake tensors show."""
    return _is_decomposed(func) and not all(tensor.is_contiguous() for tensor in tensors)


_Layout: TypeAlias = tuple[tuple[int, ...], torch.dtype]
"""The dimensions of a tensor from the outermost to the innermost in memory, and its dtype."""


class _Corrected:
    """Replaces a fake mode's dispatch: results have the strides and dtypes of real kernels."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode, self.fake = mode, mode.dispatch
        self._layouts: dict[Hashable, list[_Layout | None]] = {}
        """For each kind of call the layout of each result, or None where the fake result's is right. It grows with one
        region's calls at most, since a mode belongs to one region."""

    def __call__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self.fake(func, types, args, kwargs)
        if not _is_decomposed(func):
            return result
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not _is_doubtful(inputs, result):
            return result
        key = func, *map(_key, tree_leaves((args, kwargs)))
        if key not in self._layouts:
            self._layouts[key] = []  # for the calls made meanwhile
            self._layouts[key] = self._tried(func, types, args, kwargs or {})
        if not self._layouts[key]:
            return result
        layouts = iter(self._layouts[key])
        return tree_map(lambda leaf: self._laid(leaf, next(layouts, None)), result)

    def _tried(self, func: Any, types: Any, args: Any, kwargs: Any) -> list[_Layout | None]:
        """The layout of each result of a call on small real tensors, None where a fake result has the same. Empty if
        all have, or the call fails."""

        def real(meta: torch.Tensor) -> torch.Tensor:
            made = torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device=device)
            return made.fill_(1)

        def fake(meta: torch.Tensor) -> torch.Tensor:
            with self.mode:
                return torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device=device)

        device = next(leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        try:
            with plain_tensors(), without_torch_functions(), torch.no_grad():
                positional, named = _made_small(args, kwargs, real)
                true = tree_leaves(func(*positional, **named))
                positional, named = _made_small(args, kwargs, fake)
                guessed = tree_leaves(self.fake(func, types, tuple(positional), named))
        except Exception:  # an operator may refuse made-up values and sizes with any error
            return []
        layouts = [
            None if _same(*pair) else (_order(pair[0]), pair[0].dtype) for pair in zip(true, guessed, strict=True)
        ]
        return layouts if any(layouts) else []

    def _laid(self, result: Any, layout: _Layout | None) -> Any:
        """A fake result with the dtype and the order of dimensions in memory that `layout` says; unchanged for None."""
        if layout is None or not isinstance(result, FakeTensor):
            return result
        dimensions, dtype = layout
        with self.mode:
            laid = torch.empty([result.shape[dim] for dim in dimensions], dtype=dtype, device=result.device)
            return laid.permute([dimensions.index(dim) for dim in range(len(dimensions))])


@lru_cache(maxsize=4096)
def _is_decomposed(func: Any) -> bool:
    """Whether fakes of an operator come from a decomposition, so that they may be laid out otherwise than its kernel's
    results."""
    from torch._decomp import decomposition_table

    if func not in decomposition_table:
        return False
    schema = schema_of(func)
    if any(part in schema.name for part in _TRUSTED) or torch.Tag.nondeterministic_seeded in func.tags:
        return False
    return all(argument.alias_info is None for argument in (*schema.arguments, *schema.returns))


def _is_doubtful(inputs: list[torch.Tensor], result: Any) -> bool:
    """Whether an operator has to be tried on small tensors, judging by these operands and the fake result."""
    if not all(_is_number(tensor.dtype) for tensor in inputs):
        return False
    if any(size_seen(number) is None for tensor in inputs for number in (*tensor.shape, *tensor.stride())):
        return False
    in_order = all(map(_is_contiguous, inputs))
    floats = {tensor.dtype for tensor in inputs} - {torch.bool}
    results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, FakeTensor)]
    return (not in_order and any(leaf.dim() > 1 for leaf in results)) or (len(floats) > 1 and bool(results))


def _is_contiguous(tensor: torch.Tensor) -> bool:
    """Whether a tensor is contiguous, with symbols at the values that they had when made, without adding a guard."""
    step = 1
    for size, stride in zip(reversed(_as_seen(tensor.shape)), reversed(_as_seen(tensor.stride())), strict=True):
        if size != 1 and stride != step:
            return False
        step *= max(size, 1)
    return True


def _is_number(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype == torch.bool


def _key(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return tuple(_as_seen(leaf.shape)), tuple(_as_seen(leaf.stride())), leaf.dtype, leaf.device
    return type(leaf), repr(leaf)


def _same(real: Any, fake: Any) -> bool:
    if not isinstance(real, torch.Tensor) or real.shape != fake.shape:
        return True
    moves = [dim for dim, size in enumerate(real.shape) if size > 1]
    return real.dtype == fake.dtype and all(real.stride(dim) == fake.stride(dim) for dim in moves)


_LOW = (torch.bfloat16, torch.float16)


def raising_for_refused_dtypes() -> RunningBy:
    """A context for calls on fakes that raises a kernel's own error where an operator takes no 16-bit operands. Each
    kind of call with such operands is run once on small real tensors, and if that fails, once more in fp32, to know
    whether it only refuses the made-up values; random operators, which would advance the generator, are not."""
    tried: set[Hashable] = set()

    def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        dtypes = tuple(tensor.dtype for tensor in tensors)
        random = torch.Tag.nondeterministic_seeded in func.tags
        if not random and any(dtype in _LOW for dtype in dtypes) and not any(map(is_symbolic, leaves)):
            kind = func, dtypes, *(repr(leaf) for leaf in leaves if not isinstance(leaf, torch.Tensor))
            if kind not in tried:
                tried.add(kind)
                _try(func, args, kwargs, tensors[0].device)
        return func(*args, **kwargs)

    return RunningBy(run)


def _try(func: Any, args: Any, kwargs: Any, device: torch.device) -> None:
    """Run a call on small tensors. Raises the error of that run, unless the call fails in fp32 as well."""

    def run(low: bool) -> None:
        def made(meta: torch.Tensor) -> torch.Tensor:
            dtype = torch.float32 if meta.dtype in _LOW and not low else meta.dtype
            return torch.empty_strided(meta.shape, meta.stride(), dtype=dtype, device=device).fill_(1)

        positional, named = _made_small(args, kwargs, made)
        func(*positional, **named)

    with plain_tensors(), without_torch_functions(), torch.no_grad():
        try:
            run(low=True)
        except RuntimeError:
            try:
                run(low=False)
            except Exception:  # an operator may refuse made-up values and sizes with any error
                return
            raise
