"""What `Plan.explain` and `memopt explain` say: the largest values that the backward needs, and all that is known of
one operator."""

from __future__ import annotations

import linecache
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from memopt.planning.changes import source_line
from memopt.planning.plan import Plan
from memopt.planning.plan_graphs import named_nodes
from memopt.planning.priced_step import TracedStep
from memopt.planning.schedule_parts import operator_name
from memopt.show.report import as_text, bytes_table, headline, new_table
from memopt.show.step import WHY
from memopt.terminal import Column, Table
from memopt.units import duration, size
from passes.graphs.node_facts import module_path, tensors

if TYPE_CHECKING:
    from networkx import DiGraph

Facts: TypeAlias = dict[str, Any]
"""The attributes of a node of `Plan.networkx`."""
_Reasons: TypeAlias = dict[tuple[str, "str | None"], list[tuple[str, str]]]
"""The operators that have a reason for their dtype, with the reason, by their module and line of code."""

_ROWS = 15
_NEEDED = ("saved", "recomputed", "offloaded", "output")
_TOLD_OF_ONE = ("value", "why_dtype")
_CASTS = ("_to_copy", "convert_element_type", "to")


def explain(plan: Plan, op: str | None) -> str:
    """The text of `Plan.explain`: about the largest values that the backward needs, or about the op named `op`."""
    if op is None:
        return as_text(headline(plan), bytes_table(plan), values_table(plan.networkx()), width=110)
    return as_text(*story_of(told_graph(plan), op, plan.hardware)[1], width=110)


def told_graph(plan: Plan) -> DiGraph:
    """The graph of `Plan.networkx`, whose nodes also have "value", the dtype and sizes of each tensor, and "why_dtype",
    the reason for that dtype ("" if there is none)."""
    assert plan.captured is not None
    graph, reasons = plan.networkx(), _reasons(plan.captured)
    nodes = {name: node for name, _, node in named_nodes(plan.captured)}
    for name, facts in graph.nodes(data=True):
        values = tensors(nodes[name].meta.get("val")) if name in nodes else []
        texts = (f"{one.dtype} {'x'.join(map(str, one.shape)) or 'scalar'}".removeprefix("torch.") for one in values)
        facts["value"] = ", ".join(texts)
        facts["why_dtype"] = why_dtype(reasons[facts["region"]], facts, list(graph.successors(name)))
    return graph


def values_table(graph: DiGraph) -> Table:
    """A table of the forward's largest values among those that the backward or the caller needs, by the graph of
    `Plan.networkx`. Equal values of a model's blocks share a row."""
    groups: dict[tuple[Any, ...], list[tuple[str, Facts]]] = defaultdict(list)
    for name, facts in graph.nodes(data=True):
        if facts["half"] == "forward" and facts["bytes"] and facts["fate"] in _NEEDED:
            module = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", facts["module"])
            groups[facts["operator"], module, facts["source"], facts["fate"]].append((name, facts))
    rows = f"{min(_ROWS, len(groups))} of {len(groups)} rows"
    title = f"The largest values that the backward needs, and their fate ({rows})"
    fold = Column("op", overflow="fold", max_width=24), Column("module", overflow="fold", min_width=20)
    numbers = (Column(header, justify="right", no_wrap=True) for header in ("values", "bytes"))
    table = new_table(title, *fold, *numbers, Column("fate", no_wrap=True))
    by_size = sorted(groups.items(), key=lambda entry: -sum(facts["bytes"] for _, facts in entry[1]))
    for (_, module, _, fate), nodes in by_size[:_ROWS]:
        total = size(sum(facts["bytes"] for _, facts in nodes))
        table.add_row(nodes[0][0], module or "(model)", str(len(nodes)), total, fate)
    return table


def story_of(graph: DiGraph, wanted: str, hardware: str) -> tuple[Any, list[Table]]:
    """All that is known of the op named `wanted` in a `told_graph`, as a dict for JSON and as tables. If several ops
    fit, they are listed, before that whose forward takes longest. Raises `ValueError` if none does."""
    found = [wanted] if wanted in graph else [name for name, facts in graph.nodes(data=True) if _meant(facts, wanted)]
    if not found:
        known = ", ".join(sorted({facts["module"] for _, facts in graph.nodes(data=True) if facts["module"]})[:8])
        raise ValueError(
            f"no op is named {wanted!r}, and no operator or module has that in its name; modules are {known}, …"
        )
    computed = [name for name in found if graph.nodes[name]["fate"] not in ("input", "alias", "fused")] or found
    main = max(computed, key=lambda name: (graph.nodes[name]["half"] == "forward", graph.nodes[name]["seconds"]))
    figures, story = _one(graph, main, hardware)
    if len(computed) == 1:
        return figures, [story]
    listed, table = _several(wanted, [(name, graph.nodes[name]) for name in computed])
    return listed, [table, story]


def _meant(facts: Facts, wanted: str) -> bool:
    within = f".{facts['module']}."
    return bool(facts["operator"]) and (wanted in facts["operator"] or f".{wanted.strip('.')}." in within)


def _several(wanted: str, nodes: list[tuple[str, Facts]]) -> tuple[Any, Table]:
    fold = (Column(header, overflow="fold") for header in ("op", "operator", "module"))
    title = f"{len(nodes)} ops of {wanted!r}; below is the one whose forward takes longest; ask for another by its name"
    table = new_table(title, *fold, right=("bytes", "time"))
    table.add_column("fate")
    for name, facts in nodes:
        row = (_short(facts["operator"]), facts["module"], size(facts["bytes"]), duration(facts["seconds"]))
        table.add_row(name, *row, facts["fate"])
    told = [(name, {key: facts[key] for key in facts if key not in _TOLD_OF_ONE}) for name, facts in nodes]
    return [{"op": name, **facts} for name, facts in told], table


def _one(graph: DiGraph, name: str, hardware: str) -> tuple[Any, Table]:
    facts: Facts = graph.nodes[name]
    reads, readers = list(graph.predecessors(name)), list(graph.successors(name))
    value, why = facts["value"], facts["why_dtype"]
    file, _, line = (facts["source"] or "").rpartition(":")
    held = f"{size(facts['held_bytes'])} of them" if facts["held_bytes"] else "none"
    rows = {
        "operator": _short(facts["operator"]) or facts["kind"],
        "half": facts["half"],
        "module": facts["module"] or "(model)",
        "source": f"{Path(file).name}:{line}  {linecache.getline(file, int(line)).strip()}".rstrip() if line else "",
        "value": value,
        "dtype": f"{value.partition(' ')[0]}: {why}" if value and why else "",
        "bytes": f"{size(facts['bytes'])}, {held} held until the backward".replace("–, none", "none"),
        "time": f"{duration(facts['seconds'])} for one run"
        + (f"; runs {facts['recomputed']} more time{'s' * (facts['recomputed'] > 1)}, in the backward, which adds "
           f"{duration(facts['seconds'] * facts['recomputed'])}" if facts["recomputed"] else ""),
        "host": f"{size(facts['offloaded_bytes'])} copied there and back" if facts["offloaded_bytes"] else "",
        "fate": f"{facts['fate']}: {WHY[facts['fate']]}",
        "reads": ", ".join(reads),
        "read by": ", ".join(f"{one} ({graph.nodes[one]['half']})" for one in readers),
    }  # fmt: skip
    table = Table(title=f"{name}, planned for {hardware}", title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for title, text in rows.items():
        if text:
            table.add_row(title, text)
    return {"op": name, **facts, "why": WHY[facts["fate"]], "reads": reads, "read_by": readers}, table


def _short(operator: str) -> str:
    return operator.removeprefix("aten.").removesuffix(".default")


def _reasons(captured: TracedStep) -> list[_Reasons | None]:
    """For each region, the reasons for the dtypes of its operators; None where the plan chooses none in it."""
    found: list[_Reasons | None] = []
    for region in captured.regions:
        operators, reasons = region.operators, None
        if captured.rewriting.autocast is not None and operators and (span := operators.span("precision")):
            reasons = defaultdict(list)
            _, _, why = span
            for node in operators.stages[-1].graph.nodes:
                if node.name in why:
                    place = module_path(node), source_line(node) or None
                    reasons[place].append((operator_name(node), why[node.name]))
        found.append(reasons)
    return found


def why_dtype(reasons: _Reasons | None, facts: Mapping[str, Any], readers: Sequence[str]) -> str:
    """Why an op has its dtype, in words; "" for a node that is no operator. `reasons` has those of the operators in its
    region (see `_reasons`); `facts` are its attributes in `Plan.networkx`, `readers` the ops that read it."""
    if not facts["operator"]:
        return ""
    if reasons is None:
        return "the dtype of the model's code: this plan chooses no dtypes"
    namespace, *rest = facts["operator"].split(".")
    name = rest[0] if rest else namespace  # `addmm` for `aten.addmm.default`
    if name in _CASTS:
        return f"a cast for {', '.join(readers[:3]) or 'its readers'}, which are computed in that dtype"
    # An op of the joint graph comes from those of the operator graph that the same line in the same module calls.
    found = reasons.get((facts["module"], facts["source"]), ())
    named = [(operator, why) for operator, why in found if operator == name]
    named = named or [(operator, why) for operator, why in found if operator in name]  # layer_norm in native_layer_norm
    by_reason: dict[str, list[str]] = {}
    for operator, why in named or found:
        by_reason.setdefault(why, []).append(operator)
    if not by_reason:
        return "the dtype of its operands: the plan chose none for this op"
    half = "the gradient of " if facts["half"] == "backward" else ""
    return half + "; ".join(f"{', '.join(dict.fromkeys(names))} in {why}" for why, names in by_reason.items())
