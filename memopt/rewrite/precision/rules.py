"""The user's rules: dtypes for operators, modules or nodes."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from memopt.rewrite.precision.plan import dtype_of
from passes.graphs.module_path import module_path
from passes.graphs.op_kinds import op_name

DEFAULT = "default"


@dataclass(frozen=True)
class Rules:
    """Dtypes by pattern, in the user's order.

    A pattern is the name of a node, of an operator (`softmax`, `aten.softmax`), or of a module with all that is in it
    (`lm_head`, `layers.0`, `layers.*.mlp`). If several match, the name of the node goes before that of the operator,
    and that before the longest module pattern.
    """

    dtypes: tuple[tuple[str, torch.dtype], ...] = ()

    @staticmethod
    def of(given: Mapping[str, str]) -> Rules:
        """Returns the rules that a user has written, without the default. Raises ValueError for unknown dtypes."""
        return Rules(tuple((pattern, dtype_of(name)) for pattern, name in given.items() if pattern != DEFAULT))

    def choose(self, node: fx.Node) -> tuple[str, torch.dtype] | None:
        """Returns pattern and dtype of the rule for a node, or None."""
        matching = [(_rank(pattern, node), pattern, dtype) for pattern, dtype in self.dtypes]
        rank, pattern, dtype = max(matching, key=lambda rule: rule[0], default=(0, "", torch.float32))
        return (pattern, dtype) if rank else None

    def unmatched(self, nodes: Iterable[fx.Node]) -> tuple[str, ...]:
        """Returns the patterns that match none of the nodes."""
        known = list(nodes)
        return tuple(pattern for pattern, _ in self.dtypes if not any(_rank(pattern, node) for node in known))


def _rank(pattern: str, node: fx.Node) -> int:
    """Returns how closely a pattern matches a node; 0 if it does not match."""
    if pattern == node.name:
        return 1_000_000
    if op_name(node) and pattern.removeprefix("aten.") == op_name(node):
        return 100_000
    path = module_path(node)
    parts = path.split(".")
    prefixes = (".".join(parts[: count + 1]) for count in range(len(parts)))
    return len(pattern) if path and any(fnmatch.fnmatchcase(prefix, pattern) for prefix in prefixes) else 0
