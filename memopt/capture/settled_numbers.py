"""Numbers of the model's that differ between calls, such as a dropout probability that a schedule sets.

Dynamo makes an input of an attribute or argument that is a float and has changed, and a node of the graph reads it.
Where the forward compares the number while it is traced, Dynamo guards on its value and captures the call again for
another one, but leaves that node in the graph.
"""

from __future__ import annotations

from functools import partial

from torch import fx

from memopt.compat.symbols import fixed_float


def settle_numbers(graph_module: fx.GraphModule) -> None:
    """Replace the nodes that read a number on whose value Dynamo guards by that value.

    Edits the graph. The tracer that follows does not know the value, and would fail at the comparison.
    """
    for inner in [module for module in graph_module.modules() if isinstance(module, fx.GraphModule)]:
        settled = False
        for node in inner.graph.find_nodes(op="call_method", target="item"):
            number = fixed_float(node.meta.get("example_value"))
            if number is None or node.args[0].op != "placeholder":
                continue
            for user in list(node.users):
                user.args = fx.map_arg(user.args, partial(_replaced, node, number))
                user.kwargs = fx.map_arg(user.kwargs, partial(_replaced, node, number))
            inner.graph.erase_node(node)
            settled = True
        if settled:
            inner.recompile()


def _replaced(node: fx.Node, number: float, used: fx.Node) -> fx.Node | float:
    return number if used is node else used
