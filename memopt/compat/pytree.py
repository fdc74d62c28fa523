"""Pytrees: nested containers of tensors, those of `collections.UserDict` among them, which torch takes for leaves
(`BatchEncoding` and `BatchFeature` of transformers)."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable
from typing import Any

from torch.utils import _pytree
from torch.utils._pytree import tree_flatten, tree_unflatten

from passes.compat import private

PRIVATE_NAMES = (*private("torch.utils._pytree", "tree_flatten", "tree_leaves", "tree_map", "tree_unflatten"),)

__all__ = ["tree_flatten", "tree_leaves", "tree_map", "tree_unflatten"]


def tree_leaves(tree: Any) -> list[Any]:
    """The leaves of a tree, in order."""
    leaves = _pytree.tree_leaves(tree)
    if not any(isinstance(leaf, UserDict) for leaf in leaves):
        return leaves
    return [one for leaf in leaves for one in (tree_leaves(leaf.data) if isinstance(leaf, UserDict) else (leaf,))]


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same tree with `function` of each leaf."""

    def mapped(leaf: Any) -> Any:
        if not isinstance(leaf, UserDict):
            return function(leaf)
        same = copy.copy(leaf)
        same.data = tree_map(function, leaf.data)
        return same

    return _pytree.tree_map(mapped, tree)
