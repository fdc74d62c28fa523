"""Where in the model a node comes from: its module's path, its repeated block, whether it is an attention core."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import fx

_PROJECTIONS = ("aten.mm.", "aten.addmm.")


def module_path(node: fx.Node) -> str:
    """The path of the module that ran the node, as in `model.named_modules()`; "" where tracing left none."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    source = str(next(reversed(stack.values()))[0])
    return _without_root(source)


def _without_root(source: str) -> str:
    """`L['self'].layers.0` and `L['self']._modules['layers']._modules['0']` are both `layers.0`."""
    source = re.sub(r"\._modules\['([^']*)'\]", r".\1", source)
    source = re.sub(r"\[(\d+)\]", r".\1", source)
    root = re.match(r"[LG]\['[^']*'\](\.__closure__\.\d+|\.__self__|\.__func__|\.cell_contents)*\.?", source)
    return source[root.end() :] if root else source


def number_blocks(paths: Iterable[str]) -> dict[str, int]:
    """Number the repeated blocks: the outermost list element (`layers.3` of `layers.3.mlp`) that a path lies in."""
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
    """Whether the node computes scores, weights or their weighted sum, rather than a projection."""
    target = str(node.target)
    return "attention" in target or ("att" in path.lower() and not target.startswith(_PROJECTIONS))
