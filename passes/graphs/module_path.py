"""The module of a model that a node comes from."""

from __future__ import annotations

import re

from torch import fx


def module_path(node: fx.Node) -> str:
    """Returns the path of the module that ran the node, as in `model.named_modules()`; "" if tracing recorded none."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    source = str(next(reversed(stack.values()))[0])
    return _without_root(source)


def _without_root(source: str) -> str:
    """Returns `layers.0` for `L['self'].layers.0`, for `L['self']._modules['layers']._modules['0']`, and for
    `L['self'].__dict__['_modules']['layers'].…`, which modules with a `__getattr__` of their own give (PEFT's)."""
    source = re.sub(r"\.(?:_modules|__dict__\['_modules'\])\['([^']*)'\]", r".\1", source)
    source = re.sub(r"\[(\d+)\]", r".\1", source)
    root = re.match(r"[LG]\['[^']*'\](\.__closure__\.\d+|\.__self__|\.__func__|\.cell_contents)*\.?", source)
    return source[root.end() :] if root else source
