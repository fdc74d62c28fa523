"""Writes the part of a graph that treats each row of logits alone (`RowRegion`) as programs of `memopt::linear_rows`.

In a program every value with classes is [rows, classes]. Calls that move rows are made on what the program is given
instead: a layer's input, targets, masks.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from passes.compat import overload_name, statically_known_true
from passes.graphs.node_facts import ancestors, argument_key, arguments_of, is_pure, same_sizes
from passes.graphs.op_kinds import is_cast, mutated_arguments, op_name
from passes.patterns.logits_path import LogitsStep, keeps_order, row_move, takes_all
from passes.patterns.loss_pattern import FINISHES, TOKEN_LOSSES, picked_by_index
from passes.patterns.row_region import CLASS_LOSSES, REDUCTIONS, SAME, RowRegion, reduced
from passes.rewrite_pattern import NoMatch, check_unwritten


@dataclass(frozen=True)
class RowOperand:
    """A value of the graph that a `RowProgram` reads, and the calls that move its rows before the program reads it."""

    node: Node
    steps: tuple[LogitsStep, ...] = ()
    """The calls that move its rows."""
    like: Node | None = None
    """The value of the region whose rows it has, and with whose dimensions it is aligned, before those calls; None for
    an operand that is the same for all rows."""
    class_dim: int | None = None
    """The dimension of the classes, or of what the operand has in their place, in `like`; None if it has one element
    for each row."""


@dataclass
class RowProgram:
    """A program that `memopt::linear_rows` runs for one chunk of rows of logits after another, to compute results of a
    `RowRegion`: its text, which is written line by line, with the nodes of its operands and results."""

    region: RowRegion
    layers: list[RowOperand] = field(default_factory=list)
    """The linear layers; `node` is that of the layer."""
    rows: list[RowOperand] = field(default_factory=list)
    whole: list[RowOperand] = field(default_factory=list)
    results: dict[Node, str] = field(default_factory=dict)
    """Per result of the region: how it is made from the program's. "" only reshapes that; "again" makes the node's own
    call on it, with a class dimension of size 1; "sum" and "mean" reduce it over the rows; "targets" is the mean over
    the targets that are not ignored."""
    returned: list[str] = field(default_factory=list)
    lines: dict[str, str] = field(default_factory=dict)
    """By the expression of each line, the name of its value."""
    names: dict[Any, str] = field(default_factory=dict)
    """By operand, or by value of the region and calls that move its rows, its name in the program."""

    @property
    def text(self) -> str:
        """The program as text, in which each value is deleted after its last use."""
        parameters = [f"{kind}{at}" for kind, of in self._operands() for at in range(len(of))]
        body, kept = [f"return [{', '.join(self.returned)}]"], set(self.returned)
        for expression, name in reversed(self.lines.items()):
            used = set(re.findall(r"\b[a]\d+\b", expression)) - kept
            kept |= used
            body += [f"del {', '.join(sorted(used))}"] if used else []
            body.append(f"{name} = {expression}")
        return f"{', '.join(parameters)}: {'; '.join(reversed(body))}"

    def learned(self) -> frozenset[str]:
        """Returns the names in the program of all values that get gradients from its results, operands among them."""
        by_name: dict[str, frozenset[str]] = {}
        for expression, name in self.lines.items():
            stops = expression.startswith(_STOPS)
            read = frozenset() if stops else frozenset(re.findall(r"\b[xrwa]\d+\b", expression))
            by_name[name] = read.union(*(by_name.get(one, read) for one in read))
        return frozenset().union(*(by_name[name] for name in self.returned))

    def _operands(self) -> list[tuple[str, list[RowOperand]]]:
        return [("x", self.layers), ("r", self.rows), ("w", self.whole)]

    def add(self, node: Node) -> None:
        """Adds lines that compute `node`, a result of the `RowRegion`, to the program. Raises `NoMatch` if one of the
        calls that compute it cannot be written in a program."""
        expression, self.results[node] = self._result(node, self.region.results[node], ())
        self.returned.append(self._line(expression))

    def _line(self, expression: str) -> str:
        return self.lines.setdefault(expression, f"a{len(self.lines)}")

    def _operand(self, kind: str, operand: RowOperand) -> str:
        layout = None if operand.like is None else str(tuple(operand.like.meta["val"].shape))
        key = kind, operand.node, _key(operand.steps), operand.class_dim, layout
        if key not in self.names:
            of = dict(self._operands())[kind]
            self.names[key] = f"{kind}{len(of)}"
            of.append(operand)
        return self.names[key]

    def _value(self, node: Node, steps: tuple[LogitsStep, ...]) -> str:
        """Returns the name of a value with classes, after calls that move its rows."""
        steps, dim = _without_views(steps), self.region.inside[node]
        key = node, _key(steps)
        if key not in self.names:
            self.names[key] = self._written(node, steps, dim)
        return self.names[key]

    def _written(self, node: Node, steps: tuple[LogitsStep, ...], dim: int) -> str:
        name = op_name(node)
        first: Any = node.args[0]
        if node in self.region.layers:
            return self._operand("x", RowOperand(node, steps, node, dim))
        if row_move(node, dim) is not None:
            return self._value(first, steps if takes_all(node, dim) else (LogitsStep(node, dim), *steps))
        if name in SAME - {"detach"}:
            return self._value(first, steps)
        values = [self._argument(argument, node, steps) for argument in node.args]
        if is_cast(node):
            return self._line(f"aten.to.dtype({values[0]}, {node.meta['val'].dtype})")
        if name in ("softmax", "log_softmax"):
            values[1] = "-1"
        kept = {key: given for key, given in node.kwargs.items() if key not in _PLACES}
        values += [f"{key}={self._argument(given, node, steps)}" for key, given in kept.items()]
        packet = name.removesuffix("_") if mutated_arguments(node) else name
        overload = overload_name(node.target)
        if not hasattr(getattr(torch.ops.aten, packet, None), overload):
            raise NoMatch(f"{node.name} writes in place, and its operator has no variant that does not")
        return self._line(f"aten.{packet}.{overload}({', '.join(values)})")

    def _argument(self, argument: Any, like: Node, steps: tuple[LogitsStep, ...]) -> str:
        if isinstance(argument, (list, tuple)):
            return f"[{', '.join(self._argument(one, like, steps) for one in argument)}]"
        if not isinstance(argument, Node):
            return repr(argument)
        if argument in self.region.inside:
            return self._value(argument, steps)
        dim, dims = self.region.inside[like], like.meta["val"].dim()
        if (reduced_value := self._reduced(argument, dim, steps)) is not None:
            return reduced_value
        value = argument.meta["val"]
        shape = (1,) * (dims - value.dim()) + tuple(value.shape)
        if all(statically_known_true(size == 1) for at, size in enumerate(shape) if at != dim):
            return self._operand("w", RowOperand(argument))
        return self._operand("r", RowOperand(argument, steps, like, dim))

    def _reduced(self, node: Node, class_dim: int, steps: tuple[LogitsStep, ...]) -> str | None:
        """Returns the name of a value [rows, 1] for a result that other values of the region read, such as a maximum.
        None for any other node."""
        inner: Any = node.args[0] if op_name(node) == "unsqueeze" else node
        value = self.region.results.get(inner)
        by_row = op_name(inner) in ("gather", "select") or (op_name(inner) in REDUCTIONS and len(reduced(inner)) == 1)
        if value is None or self.region.inside[value] != class_dim or not by_row:
            return None
        shape = [1 if at == class_dim else size for at, size in enumerate(value.meta["val"].shape)]
        if not same_sizes(node.meta["val"].shape, shape):
            return None
        column = self._line(self._result(inner, value, steps)[0])
        return column if op_name(inner) == "gather" else self._line(f"aten.unsqueeze.default({column}, -1)")

    def _result(self, node: Node, value: Node, steps: tuple[LogitsStep, ...]) -> tuple[str, str]:
        """Returns the expression of a result, after calls that move its rows, and its entry in `results`."""
        name, given = op_name(node), arguments_of(node)
        if name in TOKEN_LOSSES:
            return self._token_loss(value, name, given)
        low = value.meta["val"].dtype.itemsize < 4
        if name in CLASS_LOSSES:
            one, other = (self._argument(given.pop(key), value, ()) for key in ("self", "target"))
            finish = FINISHES[given.pop("reduction")]
            options = "".join(f", {key}={option!r}" for key, option in given.items())
            by_class = self._line(f"aten.{name}.default({one}, {other}, reduction=0{options})")
            wide = ", dtype=torch.float32" if low else ""
            return f"aten.{finish}.dim({by_class}, [-1]{wide})".replace("sum.dim", "sum.dim_IntList"), finish
        x = self._value(value, steps)
        if name in REDUCTIONS:
            again = len(reduced(node)) > 1
            dtype = given.get("dtype") or (torch.float32 if again and low and name in ("sum", "mean") else None)
            wide = f", dtype={dtype}" if dtype else ""
            overload = {"sum": "dim_IntList", "mean": "dim"}.get(name, "default")
            return f"aten.{name}.{overload}({x}, [-1]{wide})", "again" if again else ""
        if name in ("argmax", "argmin"):
            return f"aten.{name}.default({x}, -1)", ""
        if name == "select":
            return f"aten.select.int({x}, -1, {given['index']})", ""
        if name == "gather":
            index = RowOperand(given["index"], steps, value, self.region.inside[value])
            return f"aten.gather.default({x}, -1, {self._operand('r', index)})", ""
        targets = picked_by_index(node)
        assert targets is not None
        column = self._line(f"aten.unsqueeze.default({self._operand('r', RowOperand(targets, steps))}, -1)")
        # An index counts from the end where it is negative; `gather` takes no such ones.
        negative = self._line(f"aten.lt.Scalar({column}, 0)")
        from_end = self._line(f"aten.add.Scalar({column}, {value.meta['val'].shape[-1]})")
        column = self._line(f"aten.where.self({negative}, {from_end}, {column})")
        return f"aten.select.int({self._line(f'aten.gather.default({x}, -1, {column})')}, -1, 0)", ""

    def _token_loss(self, value: Node, name: str, given: dict[str, Any]) -> tuple[str, str]:
        x, target = self._argument(given["self"], value, ()), given["target"]
        soft = target.meta["val"].is_floating_point()
        finish = FINISHES.get(given["reduction"], "")
        if finish and given["self"].meta["val"].dtype.itemsize < 4:
            x = self._line(f"aten.to.dtype({x}, torch.float32)")
        targets = self._argument(target, value, ()) if soft else self._operand("r", RowOperand(target))
        weight = given["weight"] and self._operand("w", RowOperand(given["weight"]))
        numbers = f"{given['ignore_index']}"
        if name == "cross_entropy_loss":
            numbers += f", {given['label_smoothing']}"
        packet = "cross_entropy_loss" if name == "cross_entropy_loss" else "nll_loss_nd"
        counts = finish == "mean" and not soft
        return f"aten.{packet}.default({x}, {targets}, {weight}, 0, {numbers})", "targets" if counts else finish


_STOPS = ("aten.detach.", "aten.argmax.", "aten.argmin.")
_PLACES = frozenset({"memory_format", "device", "layout", "pin_memory"})


def _key(steps: Sequence[LogitsStep]) -> tuple[Any, ...]:
    """Returns a key that is equal for calls that move rows alike."""
    return tuple((str(step.node.target), argument_key(step.node.args[1:]), step.class_dim) for step in steps)


def _without_views(steps: tuple[LogitsStep, ...]) -> tuple[LogitsStep, ...]:
    """Returns the calls without those at their end that leave all rows in their order."""
    while steps and keeps_order(steps[-1]):
        steps = steps[:-1]
    return steps


def programs(region: RowRegion) -> list[RowProgram]:
    """Returns the programs that compute the results of a `RowRegion`. Results that are computed from the same rows of
    one layer's logits share a program, unless one of them depends on another.

    Raises `NoMatch` if a call cannot be written in a program, or an operand is not available where the program runs."""
    found: list[tuple[set[Any], RowProgram]] = []
    for node in sorted(region.results):
        alone = RowProgram(region)
        alone.add(node)
        rows = {(layer.node, _key(layer.steps)) for layer in alone.layers}
        for other_rows, program in found:
            if rows & other_rows and not _depends(alone, program):
                program.add(node)
                other_rows |= rows
                break
        else:
            found.append((rows, alone))
    for _, program in found:
        _check_place(program)
    return [program for _, program in found]


def place_of(program: RowProgram) -> Node:
    """Returns the node before which a program is inserted: the first of its results in the graph."""
    return min(program.results)


def late_operands(program: RowProgram) -> list[Node]:
    """Returns the nodes that a program needs and that come after `place_of(program)`, in the graph's order."""
    place, inside = place_of(program), program.region.inside

    def is_late(node: Node) -> bool:
        return node not in inside and not node < place

    return sorted(filter(is_late, ancestors((node for node, _ in _reads(program)), is_late)))


def _reads(program: RowProgram) -> Iterator[tuple[Node, Node]]:
    """Yields what a program reads, each with a call of the region that reads it."""
    region = program.region
    for layer in program.layers:
        linear = region.layers[layer.node]
        yield from ((node, layer.node) for node in (linear.hidden, linear.weight, linear.bias) if node is not None)
    for operand in (*program.layers, *program.rows, *program.whole):
        for step in operand.steps:
            yield from ((node, step.node) for node in step.node.all_input_nodes if node not in region.inside)
    for operand in (*program.rows, *program.whole):
        yield from (
            (operand.node, user) for user in operand.node.users if user in region.inside or user in region.results
        )


def _depends(alone: RowProgram, program: RowProgram) -> bool:
    """Returns whether the operands of `alone`, which has one result, are computed from results of the region that stand
    no earlier than the first of `program`."""
    first = place_of(program)
    before = {node for node in program.region.results if not node < first}
    behind = ancestors((operand.node for operand in (*alone.rows, *alone.whole)), lambda node: first < node)
    return not before.isdisjoint(behind)


def _check_place(program: RowProgram) -> None:
    """Raises `NoMatch` where an operand cannot be computed at the program's place, or may have another value there."""
    place = place_of(program)
    for node in late_operands(program):
        if not is_pure(node) or mutated_arguments(node) or node in program.region.results:
            raise NoMatch(
                f"the chunked loss would run at {place.name} and needs {node.name}, which comes later and cannot be "
                "moved before it"
            )
        check_unwritten(node.all_input_nodes, place, node)
    for node, reader in _reads(program):
        layer = reader in program.region.layers
        what = "an input of the linear layer" if layer else node.name
        first, last = sorted((reader, place))
        check_unwritten([node], first, last, f"{what} before the loss is computed")
