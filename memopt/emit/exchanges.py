"""The collectives of a region's halves, which must be the same in the same order on all ranks."""

from __future__ import annotations

import hashlib

from torch import fx

from memopt.compat.operators import OpOverload
from memopt.device.workspace import COLLECTIVES

_BYTES = 7
"""The bytes of a digest, which is an int64."""


def exchanges_of(*graphs: fx.Graph) -> int:
    """A digest of the collectives in graphs that run one after the other: their operators and shapes, in order. 0 where
    there are none."""
    calls = [node for graph in graphs for node in graph.nodes if node.op == "call_function" and _is_collective(node)]
    if not calls:
        return 0
    text = repr([(str(node.target), tuple(node.meta["val"].shape), str(node.meta["val"].dtype)) for node in calls])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:_BYTES], "big")


def _is_collective(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.namespace in COLLECTIVES
