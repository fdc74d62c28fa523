"""Pytrees: nested containers of tensors."""

from __future__ import annotations

from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from passes.private import private

PRIVATE_NAMES = (*private("torch.utils._pytree", "tree_flatten", "tree_leaves", "tree_map", "tree_unflatten"),)

__all__ = ["tree_flatten", "tree_leaves", "tree_map", "tree_unflatten"]
