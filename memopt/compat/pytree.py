"""Pytrees: nested containers of tensors.

Private names, in torch 2.11 to 2.15: `torch.utils._pytree.tree_flatten`, `tree_leaves` and `tree_map`.
"""

from __future__ import annotations

from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

__all__ = ["tree_flatten", "tree_leaves", "tree_map"]
