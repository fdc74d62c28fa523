"""Regions that the author compiles on their own, by `torch.compiler.nested_compile_region`: the plan covers what is in
them, so they are inlined.

AOTAutograd cuts the graph of such a region into forward and backward by itself, before the graph that it is called in,
and with the same partition function. Torch 2.13 inlines those that are called once, torch 2.11 none.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from memopt.compat.operators import is_nested_region


def inline_nested_regions(graph_module: fx.GraphModule) -> None:
    """Replace calls of nested regions by the calls in them, here and in the graphs of other higher-order operators.

    Edits the graph.
    """
    for inner in reversed([module for module in graph_module.modules() if isinstance(module, fx.GraphModule)]):
        calls = [node for node in inner.graph.nodes if is_nested_region(node.target)]
        for call in calls:
            _inline(inner, call)
        if calls:
            inner.delete_all_unused_submodules()
            inner.recompile()


def _inline(graph_module: fx.GraphModule, call: fx.Node) -> None:
    """Replace one call by copies of the nodes in its region."""
    graph = graph_module.graph
    source, _, *operands = call.args
    assert isinstance(source, fx.Node)
    region: Any = graph_module.get_submodule(str(source.target))
    copies: dict[fx.Node, Any] = dict(zip(region.graph.find_nodes(op="placeholder"), operands, strict=True))
    with graph.inserting_before(call):
        for node in region.graph.nodes:
            if node.op not in ("placeholder", "output"):
                copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.op == "get_attr":
                copies[node].target = _adopted(graph_module, region, str(node.target))
    (results,) = region.graph.output_node().args
    for user in list(call.users):
        assert user.target is operator.getitem, "Dynamo takes the results of a nested region out of their tuple"
        result = results[user.args[1]]
        user.replace_all_uses_with(copies[result] if isinstance(result, fx.Node) else result)
        graph.erase_node(user)
    graph.erase_node(call)
    if not source.users:
        graph.erase_node(source)


def _adopted(graph_module: fx.GraphModule, region: fx.GraphModule, name: str) -> str:
    """The name under which a graph module has an attribute of one of its regions too."""
    value = getattr(region, name)
    number, free = 0, name
    while getattr(graph_module, free, value) is not value:
        number += 1
        free = f"{name}_{number}"
    setattr(graph_module, free, value)
    return free
