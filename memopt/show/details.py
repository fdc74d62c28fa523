"""What the command line shows of a plan's graphs, as plain data that is kept on disk in their place."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from memopt.planning.changes import Change
from memopt.planning.frontier import Recipe
from memopt.planning.plan import Plan
from memopt.show.op_story import told_graph
from memopt.show.step import Step
from memopt.show.step_of_plan import step_of

if TYPE_CHECKING:
    from networkx import DiGraph


@dataclass(frozen=True)
class Details:
    """A plan, and what its tables, its diff and its page need of its graphs."""

    plan: Plan
    step: Step
    changes: tuple[Change, ...]
    """What `Plan.diff` shows."""
    modules: tuple[str, ...]
    """The paths of the model's modules, in the order of the forward."""
    recipes: tuple[Recipe, ...]
    nodes: str
    """The nodes of the `told_graph` with their attributes, and its edges, as JSON."""

    @cached_property
    def graph(self) -> DiGraph:
        """The plan's `told_graph`."""
        from networkx import DiGraph  # slow to import

        graph, (nodes, edges) = DiGraph(), json.loads(self.nodes)
        graph.add_nodes_from(nodes)
        graph.add_edges_from(edges)
        return graph


def details_of(plan: Plan) -> Details:
    """The details of a plan. Raises `ValueError` for one that was loaded from a file."""
    graph, diff = told_graph(plan), plan.diff()
    edges = [(read, name) for name in graph for read in graph.predecessors(name)]  # in the order of the operands
    nodes = json.dumps((list(graph.nodes(data=True)), edges))
    return Details(plan, step_of(plan), diff.changes, diff.modules, plan.recipes(), nodes)
