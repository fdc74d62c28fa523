"""Finds the operators whose values leave fp16's range on a sample batch; they compute in fp32."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import fx

from memopt.compat.operators import plain_tensors
from memopt.device.devices import device_of
from memopt.rewrite.assign import only_read_by
from memopt.rewrite.policy import PrecisionPlan
from passes.graphs.node_facts import tensors
from passes.graphs.op_kinds import follows_input, is_view, mutated_arguments, op_name

LARGEST = 65504.0
"""The largest number in fp16."""
HEADROOM = 2.0
"""Values above half of fp16's range count as beyond it, since another batch may have larger ones."""
ROUNDED_TO_ZERO = 2.0**-25
"""Half of fp16's smallest number, 2^-24: magnitudes up to this are rounded to zero."""
UNIT = 2.0**-11
"""fp16's unit roundoff: a value smaller than this fraction of another one is lost in a sum with it."""
LOST_SHARE = 0.01
"""The largest share of nonzero values that an operator in fp16 may lose."""
_BLOCK_ON_HOST, _BLOCK = 2**15, 2**22
# The position of the mask among the arguments of scaled_dot_product_attention.
_MASK = 3

KeptOut: TypeAlias = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Range:
    """The range of a value on the sample batch: least and largest finite element, and the share that fp16 loses.

    `lost` is the share of nonzero elements that fp16 rounds to zero although they matter: they are larger than the
    rounding error of the largest element in their row (the last dimension)."""

    low: float = 0.0
    high: float = 0.0
    lost: float = 0.0
    inside: float = 0.0
    """A bound on intermediate values of the kernel: attention's scores, by the norms of queries and keys."""

    def joined(self, other: Range) -> Range:
        """The range that covers both, for several tensors or several runs."""
        return Range(
            min(self.low, other.low),
            max(self.high, other.high),
            max(self.lost, other.lost),
            max(self.inside, other.inside),
        )


Ranges: TypeAlias = Mapping[str, Range]
"""Ranges by name of a node."""


class Screening(fx.Interpreter):
    """Runs an operator graph on real values, unchanged, and records the range of every value.

    It runs without gradients and frees each value after its last use. Writes of the graph to its inputs take effect."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.ranges: dict[str, Range] = {}

    def run_all(self, inputs: Sequence[Any]) -> Any:
        """Run the graph on `inputs` and return its results."""
        with plain_tensors(), torch.no_grad():
            return self.run(*inputs)

    def run_node(self, n: fx.Node) -> Any:
        score = 0.0
        if op_name(n) == "scaled_dot_product_attention":
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            score = _largest_score(args[0], args[1], kwargs.get("scale"))
        result = super().run_node(n)
        source = n.all_input_nodes[0] if is_view(n) else None
        if n.op == "output":
            return result
        if source is not None and source.name in self.ranges and _as_many(n, source):
            self.ranges[n.name] = self.ranges[source.name]
            return result
        for tensor in filter(torch.is_floating_point, tensors(result)):
            found = replace(range_of(tensor), inside=score)
            self.ranges[n.name] = found.joined(self.ranges[n.name]) if n.name in self.ranges else found
        return result


def _as_many(view: fx.Node, source: fx.Node) -> bool:
    """Returns whether a view has all elements of its source."""
    sizes = [pair.meta["val"].numel() for pair in (view, source) if isinstance(pair.meta.get("val"), torch.Tensor)]
    return len(sizes) == 2 and sizes[0] == sizes[1]


def range_of(tensor: torch.Tensor) -> Range:
    """Returns the range of a tensor, found block by block, so that a large tensor is never copied whole."""
    low = high = 0.0
    lost = 0
    for block in _blocks(tensor.detach()):
        least, most, largest = _rows(block)
        if not bool(torch.isfinite(largest).all()):
            block = torch.nan_to_num(block, nan=0.0, posinf=0.0, neginf=0.0)
            least, most, largest = _rows(block)
        low, high = min(low, float(least.min())), max(high, float(most.max()))
        # In rows with anything larger, what becomes zero is below their rounding.
        small = (largest > 0) & (largest < ROUNDED_TO_ZERO / UNIT)
        if bool(small.any()):
            size = block[small].abs()
            beside = largest[small] * UNIT if size.dim() < 2 else largest[small].unsqueeze(-1) * UNIT
            lost += int(((size > beside) & (size <= ROUNDED_TO_ZERO)).sum())
    return Range(low, high, lost / int(torch.count_nonzero(tensor)) if lost else 0.0)


def _rows(block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns for every row the least and the largest element and the largest magnitude; a scalar is one row."""
    least, most = torch.aminmax(block, dim=-1) if block.dim() else (block, block)
    return least, most, torch.maximum(most, -least)


def looking_bytes(device_type: str) -> int:
    """The most bytes that `range_of` allocates: copies and masks of a block of the tensor, and results for its rows."""
    return 24 * _largest_block(device_type)


def _largest_block(device_type: str) -> int:
    return _BLOCK_ON_HOST if device_of(device_type).is_host else _BLOCK


def _blocks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields a tensor in blocks of whole rows, each with few elements."""
    if tensor.numel() == 0:
        return
    sizes, largest = tensor.shape[:-1], _largest_block(tensor.device.type)
    if tensor.numel() <= largest or not sizes or max(sizes) == 1:
        yield tensor
        return
    widest = max(range(len(sizes)), key=lambda dim: sizes[dim])
    parts = min(sizes[widest], math.ceil(tensor.numel() / largest))
    for part in tensor.chunk(parts, widest):
        yield from _blocks(part)


def _largest_score(query: torch.Tensor, key: torch.Tensor, scale: float | None) -> float:
    """Returns a bound on attention's scores: the largest norm of a query times that of a key."""
    if not query.numel() or not key.numel():
        return 0.0
    longest = [float(operand.detach().norm(dim=-1).max()) for operand in (query, key)]
    return math.prod(longest) * (1 / math.sqrt(query.shape[-1]) if scale is None else abs(scale))


def kept_out(module: fx.GraphModule, ranges: Ranges, decide: Callable[[KeptOut], PrecisionPlan]) -> KeptOut:
    """Returns the operators that must not compute in fp16, each with the reason, since their values leave fp16's range.

    `ranges` has the range of each value on sample data. `decide` returns the plan of dtypes when given operators are
    kept out of fp16; it is called again, with more of them, until no fp16 value of its plan leaves the range."""
    kept: dict[str, str] = {}
    while True:
        choices = decide(tuple(kept.items())).choices
        low = [node for node in module.graph.nodes if node.name in choices]
        low = [node for node in low if choices[node.name].dtype == torch.float16]
        # Results are checked before operands: a reader may be in fp32 without a reason of its own.
        for reason_of in (_because_of_results, _because_of_operands):
            found = {_origin(node): reason for node in low if (reason := reason_of(node, ranges))}
            new = {name: reason for name, reason in found.items() if name not in kept}
            if new:
                kept.update(new)
                break
        else:
            return tuple(kept.items())


def _because_of_results(node: fx.Node, ranges: Ranges) -> str:
    """Returns why a node's results need fp32, or ""."""
    found = ranges.get(node.name, Range())
    largest = max(found.high, 0.0 if _masks(node) else -found.low)
    if largest > LARGEST / HEADROOM:
        return f"its values reached {largest:.3g} on the sample batch, and fp16 ends at {LARGEST:.0f}"
    if found.inside > LARGEST / HEADROOM:
        return f"its attention scores may reach {found.inside:.3g} on the sample batch, and fp16 ends at {LARGEST:.0f}"
    if found.lost > LOST_SHARE:
        return f"{found.lost:.0%} of its nonzero values on the sample batch are too small for fp16"
    return ""


def _because_of_operands(node: fx.Node, ranges: Ranges) -> str:
    """Returns why a node's operands must not be cast to fp16, or ""."""
    mask = node.args[_MASK] if op_name(node) == "scaled_dot_product_attention" and len(node.args) > _MASK else None
    for operand in node.all_input_nodes:
        found = ranges.get(operand.name, Range())
        masked = operand is mask or op_name(node) == "softmax" or _masks(operand)
        largest = max(found.high, 0.0 if masked else -found.low)
        if largest > LARGEST / HEADROOM:
            return (
                f"reads {operand.name}, which reached {largest:.3g} on the sample batch, and fp16 ends at {LARGEST:.0f}"
            )
        if found.lost > LOST_SHARE:
            return f"reads {operand.name}: {found.lost:.0%} of its nonzero values are too small for fp16"
    return ""


def _masks(node: fx.Node) -> bool:
    """Returns whether only softmax reads a value, so that its large negative elements become zeros in any dtype."""
    return only_read_by(node, {"softmax"})


def _origin(node: fx.Node) -> str:
    """Returns the name of the node that decides the dtype: for an in-place call, the one that made the value."""
    while written := mutated_arguments(node):
        node = written[0]
        while follows_input(node) and node.all_input_nodes:
            node = node.all_input_nodes[0]
    return node.name
