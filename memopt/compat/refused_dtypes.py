"""Finds operators that have no kernel for a dtype, which torch's fake tensors do not always know."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memopt.compat.dispatch import plain_tensors, without_torch_functions
from memopt.compat.pytree import tree_leaves
from memopt.compat.small_operands import SmallOperands
from memopt.compat.symbols import is_symbolic

_LOW = (torch.bfloat16, torch.float16)


class RaisingForRefusedDtypes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode for calls on fakes which raises the kernel's own error where an operator takes no 16-bit operands.

    Each kind of call with such operands is run once on small real tensors, and where that fails, once more in fp32: an
    operator that fails there, too, may have refused made-up values, and is let through. So are random ones, which would
    advance the generator.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tried: set[Hashable] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        dtypes = tuple(tensor.dtype for tensor in tensors)
        random = torch.Tag.nondeterministic_seeded in func.tags
        if not random and any(dtype in _LOW for dtype in dtypes) and not any(map(is_symbolic, leaves)):
            kind = func, dtypes, *(repr(leaf) for leaf in leaves if not isinstance(leaf, torch.Tensor))
            if kind not in self._tried:
                self._tried.add(kind)
                _try(func, args, kwargs, tensors[0].device)
        return func(*args, **kwargs)


def _try(func: Any, args: Any, kwargs: Any, device: torch.device) -> None:
    """Raise the error of a call on small tensors, unless it fails in fp32 as well."""
    operands = SmallOperands(args, kwargs)

    def run(low: bool) -> None:
        def made(meta: torch.Tensor) -> torch.Tensor:
            dtype = torch.float32 if meta.dtype in _LOW and not low else meta.dtype
            return torch.empty_strided(meta.shape, meta.stride(), dtype=dtype, device=device).fill_(1)

        positional, named = operands.made(made)
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
