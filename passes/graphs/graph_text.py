"""Graphs as text, one line a node. Our own, so that goldens do not change with torch's printer."""

import operator
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from passes.graphs.module_path import module_path
from passes.graphs.node_facts import OPERATOR_OVERLOAD

_KINDS = (("bfloat", "bf"), ("float", "f"), ("complex", "c"), ("uint", "u"), ("int", "i"), ("bool", "b8"))


def format_graph(graph: Graph | GraphModule, *, module_paths: bool = False) -> str:
    """The graph as text, one line a node, without a final newline.

    With `module_paths`, a comment names the module wherever it changes.
    """
    graph = graph.graph if isinstance(graph, GraphModule) else graph
    return "\n".join(_lines(graph, module_paths))


def _lines(graph: Graph, module_paths: bool) -> Iterator[str]:
    path = ""
    for node in graph.nodes:
        if module_paths and node.op not in ("placeholder", "output") and (here := _place(node)) != path:
            path = here
            yield f"# {path or 'no module'}"
        yield format_node(node)


def format_node(node: Node, name_of: Callable[[Node], str] = lambda node: node.name) -> str:
    """One line: `add: f32[2, 64] = aten.add.Tensor(view, primals_3, alpha=2)`.

    `name_of` gives each node's name, so that a diff can print one graph in the names of another.
    """
    if node.op == "output":
        return f"return {format_argument(node.args[0], name_of)}"
    head = f"{name_of(node)}: {format_value(node.meta['val'])}" if "val" in node.meta else name_of(node)
    if node.op == "placeholder":
        return f"input {head}"
    return f"{head} = {_format_call(node, name_of)}"


def _format_call(node: Node, name_of: Callable[[Node], str]) -> str:
    if node.op == "get_attr":
        return f"self.{node.target}"
    arguments = [format_argument(argument, name_of) for argument in node.args]
    if node.target is operator.getitem and len(arguments) == 2:
        return f"{arguments[0]}[{arguments[1]}]"
    arguments += [f"{name}={format_argument(keyword, name_of)}" for name, keyword in node.kwargs.items()]
    called = format_target(node.target) if node.op == "call_function" else f"{node.op}.{node.target}"
    return f"{called}({', '.join(arguments)})"


def format_target(target: Any) -> str:
    """`aten.addmm`, `aten.add.Tensor`, `operator.mul`, `run_and_save_rng_state`."""
    if isinstance(target, OPERATOR_OVERLOAD):
        return str(target).removesuffix(".default")
    name = str(getattr(target, "__name__", target))
    return f"operator.{name}" if target is getattr(operator, name, None) else name


def format_value(value: object) -> str:
    """A value's type: `f32[2, 64]`, `Sym(s0)`, `(f32[2], None)`."""
    if isinstance(value, torch.Tensor):
        return f"{format_dtype(value.dtype)}[{', '.join(str(size) for size in value.shape)}]"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(format_value(element) for element in value)})"
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return f"Sym({value})"
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    return type(value).__name__


def format_dtype(dtype: torch.dtype) -> str:
    """`f32`, `bf16`, `i64`, `b8`, `u8`, `f8_e4m3fn`."""
    name = str(dtype).removeprefix("torch.")
    for long, short in _KINDS:
        if name.startswith(long):
            return re.sub(r"^(f\d)(e\d)", r"\1_\2", short + name.removeprefix(long).replace("_", ""))
    return name


def format_argument(argument: Any, name_of: Callable[[Node], str] = lambda node: node.name) -> str:
    """An argument as it stands in a call: nodes by name, dtypes short, nests in their own brackets."""
    if isinstance(argument, Node):
        return name_of(argument)
    if isinstance(argument, (tuple, list)):
        inner = ", ".join(format_argument(element, name_of) for element in argument)
        return f"[{inner}]" if isinstance(argument, list) else f"({inner}{',' if len(argument) == 1 else ''})"
    if isinstance(argument, dict):
        return "{" + ", ".join(f"{name}: {format_argument(entry, name_of)}" for name, entry in argument.items()) + "}"
    if isinstance(argument, slice):
        return ":".join(
            "" if bound is None else format_argument(bound, name_of)
            for bound in ((argument.start, argument.stop) + ((argument.step,) if argument.step is not None else ()))
        )
    if isinstance(argument, torch.dtype):
        return format_dtype(argument)
    if isinstance(argument, torch.Tensor):
        return format_value(argument)
    if isinstance(argument, (torch.device, torch.layout, torch.memory_format)):
        return str(argument).removeprefix("torch.")
    if callable(argument):
        return format_target(argument)
    return repr(argument)


def _place(node: Node) -> str:
    """The module that a node was traced from, or whose forward it differentiates, or an empty string."""
    path = module_path(node)
    return f"backward of {path}" if path and not node.meta.get("nn_module_stack") else path
