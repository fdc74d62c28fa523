"""Puts `memopt::linear_rows` in the place of what a graph computes from each row of logits: a part of `ChunkLoss`."""

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Graph, Node

from passes.compat import size_seen
from passes.graphs.edit import erase_unread, new_call, restride
from passes.graphs.node_facts import arguments_of
from passes.ops.linear_rows import LINEAR_ROWS
from passes.patterns.logits_path import as_rows, moved, other_size_readers
from passes.patterns.row_program import RowOperand, RowProgram, late_operands, place_of
from passes.patterns.row_region import RowRegion

aten = torch.ops.aten


def rewrite_rows(region: RowRegion, programs: Collection[RowProgram], rows: int) -> None:
    """Replaces the results of a `RowRegion`, the calls of a graph that compute from each row of logits alone, by calls
    of `memopt::linear_rows`: one for each program, run on chunks of `rows` rows (0: a number chosen for the layer).
    Calls that nothing reads any more are erased."""
    for node, class_dim in region.inside.items():
        for reader in other_size_readers(node, class_dim):
            with reader.graph.inserting_before(reader):
                reader.replace_input_with(node, _like(region, node))
    made: dict[Node, Node] = {}
    for program in programs:
        _Rewrite(program, made).apply(rows)
    gone = sorted({*region.inside, *region.results}, reverse=True)
    sources = [source for node in gone for source in node.all_input_nodes if source not in region.inside]
    for node in gone:
        node.graph.erase_node(node)
    erase_unread(source for source in sources if source not in region.results)


def _like(region: RowRegion, node: Node) -> Node:
    """Returns the input of a layer with its rows moved as those of a value of the region, at the insertion point."""
    layer, steps = region.path(node)
    source = region.layers[layer].hidden
    for step in steps:
        source = moved(step, source, region.layers[layer].width)
    return source


class _Rewrite:
    """The rewriting of one program, ahead of its first result. `made`: the new nodes of results rewritten so far."""

    def __init__(self, program: RowProgram, made: dict[Node, Node]) -> None:
        self.made = made
        self.program, self.region, self.place = program, program.region, place_of(program)
        self.graph: Graph = self.place.graph

    def apply(self, rows: int) -> None:
        for node in late_operands(self.program):
            self.place.prepend(node)
        with self.graph.inserting_before(self.place):
            found = self._call(LINEAR_ROWS, *self._operands(), self.program.text, rows)
            for at, (result, finish) in enumerate(self.program.results.items()):
                node = self._finished(result, finish, self._call(operator.getitem, found, at))
                self.made[result] = node = self._laid_out(result, node)
                result.replace_all_uses_with(node)

    def _operands(self) -> tuple[list[Any], ...]:
        """Returns hidden, weight, bias, rows, whole and biased, the operands of `memopt::linear_rows`. Those by which
        the results have no derivatives are detached."""
        learned, program = self.program.learned(), self.program
        hidden, weight, bias, biased = list[Node](), list[Node](), list[Node](), list[int]()
        for at, layer in enumerate(program.layers):
            linear, stops = self.region.layers[layer.node], f"x{at}" not in learned
            turned = self._call(aten.t.default, linear.weight) if linear.transposed else linear.weight
            hidden.append(self._detached(self._flat(layer, linear.hidden, linear.width), stops))
            weight.append(self._detached(turned, stops))
            if linear.bias is not None:
                bias.append(self._detached(linear.bias, stops))
                biased.append(at)
        rows = [self._detached(self._rows(one), f"r{at}" not in learned) for at, one in enumerate(program.rows)]
        whole = [self._detached(self._whole(one.node), f"w{at}" not in learned) for at, one in enumerate(program.whole)]
        return hidden, weight, bias, rows, whole, biased

    def _detached(self, node: Node, stops: bool) -> Node:
        stops = stops and node.meta["val"].is_floating_point()
        return self._call(aten.detach.default, node) if stops else node

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        return new_call(self.place, target, *args, **kwargs)

    def _flat(self, operand: RowOperand, source: Node, width: int) -> Node:
        """Returns the value of an operand as [rows, width], with its rows moved as the operand's steps say."""
        for step in operand.steps:
            source = moved(step, source, width)
        class_dim = operand.steps[-1].class_dim if operand.steps else operand.class_dim
        return as_rows(source, class_dim, width, self.place)

    def _rows(self, operand: RowOperand) -> Node:
        node = self.made.get(operand.node, operand.node)
        value = node.meta["val"]
        if operand.class_dim is None or operand.like is None:
            return node if value.dim() == 1 else self._call(aten.reshape.default, node, [-1])
        at = operand.class_dim - operand.like.meta["val"].dim() + value.dim()
        width = value.shape[at] if at >= 0 else 1
        return self._flat(operand, self._spread(node, operand, width), width)

    def _spread(self, node: Node, operand: RowOperand, width: int) -> Node:
        """Returns an operand with as many rows as the value that it is aligned with."""
        assert operand.like is not None
        like, value = operand.like.meta["val"], node.meta["val"]
        wanted = [width if at == operand.class_dim else size for at, size in enumerate(like.shape)]
        if [str(size) for size in value.shape] == [str(size) for size in wanted]:
            return node
        rows = None if all(isinstance(size, int) for size in wanted) else _like(self.region, operand.like)
        sizes = [size if rows is None else self._size(rows, at, size) for at, size in enumerate(wanted)]
        return self._call(aten.expand.default, node, sizes)

    def _size(self, source: Node, dim: int, size: Any) -> Any:
        return size if isinstance(size, int) else self._call(aten.sym_size.int, source, dim)

    def _whole(self, node: Node) -> Node:
        node = self.made.get(node, node)
        return node if node.meta["val"].dim() < 2 else self._call(aten.reshape.default, node, [-1])

    def _laid_out(self, node: Node, found: Node) -> Node:
        """Returns `found` for the readers of `node`; with the strides of `node` where the readers depend on these."""
        if restride({node: found.meta["val"]}):
            return found
        strides = node.meta["val"].stride()
        order = sorted(range(len(strides)), key=lambda dim: (-(size_seen(strides[dim]) or 0), dim))
        turned = self._call(aten.permute.default, found, order)
        dense = self._call(aten.clone.default, turned, memory_format=torch.contiguous_format)
        return self._call(aten.permute.default, dense, [order.index(dim) for dim in range(len(order))])

    def _finished(self, node: Node, finish: str, found: Node) -> Node:
        """Returns the value of a result of the graph, made from the program's result `found`."""
        dtype = node.meta["val"].dtype
        if finish == "targets":
            found = self._mean_of_targets(node, found)
        elif finish in ("sum", "mean"):
            found = self._call(getattr(aten, finish).default, found)
        else:
            found = self._shaped(node, found, again=finish == "again")
        return found if found.meta["val"].dtype == dtype else self._call(aten.to.dtype, found, dtype)

    def _shaped(self, node: Node, found: Node, *, again: bool) -> Node:
        """Returns a program's result in the shape of the graph's result. A result that is reduced over rows as well
        (`again`) is reduced by the graph's own call."""
        value = self.region.results[node]
        class_dim, shape, width = self.region.inside[value], value.meta["val"].shape, found.meta["val"].shape[1:]
        rows = [at for at in range(len(shape)) if at != class_dim]
        # A reshape infers one size (-1).
        several = sum(not isinstance(shape[at], int) for at in rows) > 1
        source = _like(self.region, value) if several else None
        sizes = [
            self._size(source, at, shape[at]) if source else shape[at] if isinstance(shape[at], int) else -1
            for at in rows
        ]
        if width:
            shaped = self._call(aten.reshape.default, found, [*sizes, *width])
            return shaped if class_dim == len(shape) - 1 else self._call(aten.movedim.int, shaped, -1, class_dim)
        if again or node.meta["val"].dim() == len(shape):
            sizes.insert(class_dim, 1)
        shaped = found if len(sizes) == 1 else self._call(aten.reshape.default, found, sizes)
        options = {name: given for name, given in node.kwargs.items() if name != "dtype"}
        return self._call(node.target, shaped, *node.args[1:], **options) if again else shaped

    def _mean_of_targets(self, node: Node, found: Node) -> Node:
        """Returns the mean of a loss over the targets that are not ignored, weighted by class."""
        given = arguments_of(node)
        target, weight = given["target"], given["weight"]
        counts = self._call(aten.ne.Scalar, target, given["ignore_index"])
        if weight is not None:
            weight = self._call(aten.detach.default, self.made.get(weight, weight))
            ignored = self._call(aten.eq.Scalar, target, given["ignore_index"])
            classes = self._call(aten.masked_fill.Scalar, target, ignored, 0)
            counts = self._call(aten.mul.Tensor, self._call(aten.index.Tensor, weight, [classes]), counts)
        total = self._call(aten.sum.default, counts)
        return self._call(aten.div.Tensor, self._call(aten.sum.default, found), total)
