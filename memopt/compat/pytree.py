"""Nested containers of tensors (pytrees)."""

from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["tree_leaves", "tree_map"]
