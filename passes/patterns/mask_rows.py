"""Whether a mask that is added to attention's scores may mask every score of a row.

It matters where the mask is a large negative number rather than -inf: softmax gives all values of such a row the same
weight, and fused kernels do too, but their backward recomputes the weights from the row's logarithm of sums, in which
the number of keys is lost to rounding: the gradients of that row are too large by that factor (torch 2.13, CPU).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from passes.compat import in_own_thread
from passes.graphs.node_facts import ancestors, attribute_of, is_pure
from passes.graphs.op_kinds import is_cast, is_view, op_name

MASKS_BELOW = -1e4
"""A score this low gets no weight beside one that is not masked."""
_LEARNED = frozenset({"embedding", "linear", "matmul", "bmm"})
_SAME_ROWS = frozenset({"alias", "clone", "contiguous", "expand"})


@dataclass(frozen=True)
class _Rows:
    """Facts about the elements of a mask: bools, or for numbers whether they are below `MASKS_BELOW`."""

    some: bool
    """Whether any element is true."""
    whole: bool
    """Whether all elements of some row are true."""
    empty: bool
    """Whether no element of some row is true."""


class MaskRows:
    """Answers, with a cache, whether attention masks of one graph may mask every score of a query."""

    def __init__(self) -> None:
        self.masking: dict[Node, int | None] = {}

    def masking_terms(self, mask: Node) -> int | None:
        """Returns how many terms of `mask`, which is added to scores, may mask some score by a finite number (not
        -inf); None if a term may mask every score of a row. Terms are the operands of sums, and each fill by `where` or
        `masked_fill`.

        Terms that depend on no input of the graph are evaluated. A term that is looked up in a table, or is a product
        of matrices, is a learned bias and masks nothing."""
        if mask not in self.masking:
            self.masking[mask] = self._terms(mask)
        return self.masking[mask]

    def _terms(self, mask: Node) -> int | None:
        known = self._constant(mask)
        if known is not None:
            return None if known.whole else int(known.some)
        first: Any = mask.args[0] if mask.args else None
        name = op_name(mask).removesuffix("_")
        if name == "add" and not mask.kwargs and all(isinstance(argument, Node) for argument in mask.args[:2]):
            parts = [self.masking_terms(source) for source in mask.all_input_nodes]
            return None if None in parts else sum(part or 0 for part in parts)
        if name in _SAME_ROWS or is_cast(mask):
            return self.masking_terms(first)
        if name in ("where", "masked_fill"):
            return self._filled(mask)
        while is_view(mask) or op_name(mask) in _SAME_ROWS:
            (mask, *_) = mask.all_input_nodes
        return 0 if op_name(mask) in _LEARNED else None

    def _filled(self, mask: Node) -> int | None:
        """As `masking_terms`, for `where(seen, values, number)` and `masked_fill(values, masked, number)`."""
        seen = op_name(mask) == "where"
        condition, values = mask.args[:2] if seen else mask.args[1::-1]
        number: Any = mask.args[2]
        if not isinstance(condition, Node) or type(number) not in (int, float):
            return None
        below = self.masking_terms(values) if isinstance(values, Node) else 0 if values == 0.0 else None
        if below is None or number == float("-inf") or number > MASKS_BELOW:
            return below
        return below + 1 if self.masks_no_row_whole(condition, not seen) else None

    def masks_no_row_whole(self, mask: Node, where: bool) -> bool:
        """Returns whether every row of the bool `mask` is known to have an element that is not `where`."""
        known = self._constant(mask)
        return known is not None and not (known.whole if where else known.empty)

    def _constant(self, node: Node) -> _Rows | None:
        """Returns the facts on a node that depends on no input, from its value computed on the CPU; None for others."""
        found: list[Node] = []
        for source in ancestors([node]):
            if source.op == "placeholder" or not is_pure(source):
                return None
            found.append(source)
        return in_own_thread(_evaluate, sorted(found))


def _evaluate(order: list[Node]) -> _Rows | None:
    values: dict[Node, Any] = {}
    try:
        with torch.no_grad():
            for node in order:
                values[node] = _run(node, values)
            value = values[order[-1]]
            masked = value if value.dtype == torch.bool else value <= MASKS_BELOW
            whole, empty = (bool(rows.all(-1).any()) for rows in (masked, ~masked))
            return _Rows(bool(masked.any()), whole, empty)
    except (RuntimeError, TypeError, AttributeError):  # what cannot be computed here is not known
        return None


def _run(node: Node, values: Mapping[Node, Any]) -> Any:
    if node.op == "get_attr":
        return attribute_of(node).cpu()
    args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
    kwargs = {name: torch.device("cpu") if name == "device" else value for name, value in kwargs.items()}
    target: Any = node.target
    return target(*args, **kwargs)
