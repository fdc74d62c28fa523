"""Pytrees: nested containers of tensors.

Private names, in torch 2.11 to 2.15: `torch.utils._pytree.tree_flatten`, `tree_leaves`, `tree_map` and
`tree_unflatten`.
"""

from __future__ import annotations

from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = ["tree_flatten", "tree_leaves", "tree_map", "tree_unflatten"]
