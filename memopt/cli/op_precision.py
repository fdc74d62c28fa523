"""Why an op of a plan computes in its dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import fx

from memopt.planning.graph_facts import operator_name
from memopt.planning.plan_networkx import source_line
from passes.graphs.node_facts import module_path

if TYPE_CHECKING:
    from memopt.planning.plan import Plan

_CASTS = ("_to_copy", "convert_element_type", "to")


def why_dtype(plan: Plan, facts: Mapping[str, Any], readers: Sequence[str]) -> str:
    """The reason for the dtype of an op, of which `facts` are those of `Plan.networkx`: the choice that was made for
    the operator it comes from, by the precision that was asked for. `readers` are the names of ops that read it."""
    captured = plan.captured
    assert captured is not None
    region = captured.regions[facts["region"]]
    operators = region.operators
    if captured.rewriting.autocast is None or operators is None or "precision" not in operators.names:
        return "as the model's code has it: this plan chooses no dtypes"
    name = _base_name(facts["operator"])
    if name in _CASTS:
        return f"a cast for {', '.join(readers[:3]) or 'its readers'}, which are computed in that dtype"
    reasons = operators.reasons("precision")
    found = [node for node in operators.stages[-1].graph.nodes if node.name in reasons and _is_of(node, facts)]
    named = [node for node in found if operator_name(node) == name]
    named = named or [node for node in found if operator_name(node) in name]  # layer_norm in native_layer_norm
    by_reason: dict[str, list[str]] = {}
    for node in named or found:
        by_reason.setdefault(reasons[node.name], []).append(operator_name(node))
    if not by_reason:
        return "that of its operands: no dtype was chosen for it"
    half = "the gradient of " if facts["half"] == "backward" else ""
    return half + "; ".join(f"{', '.join(dict.fromkeys(names))} in {why}" for why, names in by_reason.items())


def _is_of(node: fx.Node, facts: Mapping[str, Any]) -> bool:
    """Whether an op of the joint graph comes from a node of the operator graph: same module, same line of code."""
    return module_path(node) == facts["module"] and source_line(node) == facts["source"]


def _base_name(operator: str) -> str:
    """`addmm` for `aten.addmm.default`."""
    parts = operator.split(".")
    return parts[1] if len(parts) > 1 else operator
