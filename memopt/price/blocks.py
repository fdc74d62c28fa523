"""Finds, by module paths, the repeated block that a node lies in, and whether it belongs to an attention core."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

_PROJECTIONS = ("aten.mm.", "aten.addmm.")


def number_blocks(paths: Iterable[str]) -> dict[str, int]:
    """The number of the repeated block of each path: its outermost list element, as `layers.3` of `layers.3.mlp`. Paths
    outside of blocks are left out."""
    numbers: dict[str, int] = {}
    blocks: dict[str, int] = {}
    for path in paths:
        parts = path.split(".")
        element = next((position for position, part in enumerate(parts) if part.isdigit()), None)
        if element is not None:
            block = ".".join(parts[: element + 1])
            blocks[path] = numbers.setdefault(block, len(numbers))
    return blocks


def is_attention_core(node: fx.Node, path: str) -> bool:
    """Whether the node computes attention scores, their softmax or the weighted sum, rather than a projection."""
    target = str(node.target)
    return "attention" in target or ("att" in path.lower() and not target.startswith(_PROJECTIONS))
