"""Where in the model a node comes from."""

from __future__ import annotations

import re

from torch import fx


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
