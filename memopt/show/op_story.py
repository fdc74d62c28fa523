"""What `Plan.explain` and `memopt explain` say: the largest values that the backward needs, and all that is known of
one operator."""

from __future__ import annotations

import linecache
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from memopt.planning.changes import operator_name, source_line
from memopt.planning.plan import Plan
from memopt.show.report import as_text, bytes_table, headline, new_table
from memopt.show.step import WHY
from memopt.terminal import Column, Table
from memopt.units import duration, size
from passes.graphs.node_facts import module_path, tensors

Facts = dict[str, Any]
"""The attributes of a node of `Plan.networkx`."""

ROWS = 15
_NEEDED = ("saved", "recomputed", "offloaded", "output")
_CASTS = ("_to_copy", "convert_element_type", "to")


def explain(plan: Plan, op: str | None) -> str:
    """The text that `Plan.explain` returns."""
    tables = [headline(plan), bytes_table(plan), values_table(plan)] if op is None else story_of(plan, op)[1]
    return as_text(*tables, width=110)


def values_table(plan: Plan) -> Table:
    """A table of the forward's largest values among those that the backward or the caller needs. Equal values of a
    model's blocks share a row."""
    groups: dict[tuple[Any, ...], list[tuple[str, Facts]]] = defaultdict(list)
    for name, facts in plan.networkx().nodes(data=True):
        if facts["half"] == "forward" and facts["bytes"] and facts["fate"] in _NEEDED:
            module = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", facts["module"])
            groups[facts["operator"], module, facts["source"], facts["fate"]].append((name, facts))
    title = (
        f"The largest values that the backward needs, and their fate ({min(ROWS, len(groups))} of {len(groups)} rows)"
    )
    fold = Column("op", overflow="fold", max_width=24), Column("module", overflow="fold", min_width=20)
    numbers = (Column(header, justify="right", no_wrap=True) for header in ("values", "bytes"))
    table = new_table(title, *fold, *numbers, Column("fate", no_wrap=True))
    by_size = sorted(groups.items(), key=lambda entry: -sum(facts["bytes"] for _, facts in entry[1]))
    for (_, module, _, fate), nodes in by_size[:ROWS]:
        total = size(sum(facts["bytes"] for _, facts in nodes))
        table.add_row(nodes[0][0], module or "(model)", str(len(nodes)), total, fate)
    return table


def story_of(plan: Plan, wanted: str) -> tuple[Any, list[Table]]:
    """All that is known of the op named `wanted`, as a dict for JSON and as tables. If the name fits several, such as
    the ops of a module, the first is a list of dicts, and the tables show that list and the op whose forward takes
    longest. Raises `ValueError` if the name fits none."""
    graph = plan.networkx()
    found = [wanted] if wanted in graph else [name for name, facts in graph.nodes(data=True) if _meant(facts, wanted)]
    if not found:
        known = ", ".join(sorted({facts["module"] for _, facts in graph.nodes(data=True) if facts["module"]})[:8])
        raise ValueError(
            f"no op is named {wanted!r}, and no operator or module has that in its name; modules are {known}, …"
        )
    computed = [name for name in found if graph.nodes[name]["fate"] not in ("input", "alias", "fused")] or found
    main = max(computed, key=lambda name: (graph.nodes[name]["half"] == "forward", graph.nodes[name]["seconds"]))
    reads, readers = list(graph.predecessors(main)), list(graph.successors(main))
    figures, story = _one(plan, main, graph.nodes[main], reads, [(one, graph.nodes[one]["half"]) for one in readers])
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
    return [{"op": name, **facts} for name, facts in nodes], table


def _one(plan: Plan, name: str, facts: Facts, reads: list[str], readers: list[tuple[str, str]]) -> tuple[Any, Table]:
    value = _value(plan, name, facts["region"])
    why = why_dtype(plan, facts, [one for one, _ in readers]) if facts["operator"] else ""
    held = f"{size(facts['held_bytes'])} of them" if facts["held_bytes"] else "none"
    rows = {
        "operator": _short(facts["operator"]) or facts["kind"],
        "half": facts["half"],
        "module": facts["module"] or "(model)",
        "source": _source(facts["source"]),
        "value": value,
        "dtype": f"{value.partition(' ')[0]}: {why}" if value and why else "",
        "bytes": f"{size(facts['bytes'])}, {held} held until the backward".replace("–, none", "none"),
        "time": f"{duration(facts['seconds'])} for one run"
        + (f"; runs {facts['recomputed']} more time{'s' * (facts['recomputed'] > 1)}, in the backward, which adds "
           f"{duration(facts['seconds'] * facts['recomputed'])}" if facts["recomputed"] else ""),
        "host": f"{size(facts['offloaded_bytes'])} copied there and back" if facts["offloaded_bytes"] else "",
        "fate": f"{facts['fate']}: {WHY[facts['fate']]}",
        "reads": ", ".join(reads),
        "read by": ", ".join(f"{one} ({half})" for one, half in readers),
    }  # fmt: skip
    table = Table(title=f"{name}, planned for {plan.hardware}", title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for title, text in rows.items():
        if text:
            table.add_row(title, text)
    figures = {"op": name, **facts, "value": value, "why": WHY[facts["fate"]], "why_dtype": why, "reads": reads}
    return {**figures, "read_by": [one for one, _ in readers]}, table


def _value(plan: Plan, name: str, region: int) -> str:
    """The dtype and sizes of a node's value in the captured graph of this region, or of each tensor in it; "" if it has
    none."""
    graphs = plan.graphs["captured"]
    local = name.removeprefix(f"{region}.") if len(graphs) > 1 else name
    node = next((node for node in graphs[region].graph.nodes if node.name == local), None)
    values = tensors(node.meta.get("val")) if node is not None else []
    return ", ".join(f"{_dtype_name(one)} {'x'.join(map(str, one.shape)) or 'scalar'}" for one in values)


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _source(source: str | None) -> str:
    """File name, line number and code of a source line given as "file:line"; "" for None."""
    if source is None:
        return ""
    file, _, line = source.rpartition(":")
    return f"{Path(file).name}:{line}  {linecache.getline(file, int(line)).strip()}".rstrip()


def _short(operator: str) -> str:
    return operator.removeprefix("aten.").removesuffix(".default")


def why_dtype(plan: Plan, facts: Mapping[str, Any], readers: Sequence[str]) -> str:
    """Why an op has its dtype: the reason that the plan has for the operator it comes from. `facts` are the op's
    attributes in `Plan.networkx`, `readers` the names of the ops that read it."""
    captured = plan.captured
    assert captured is not None
    region = captured.regions[facts["region"]]
    operators = region.operators
    if captured.rewriting.autocast is None or operators is None or "precision" not in operators.names:
        return "as the model's code has it: this plan chooses no dtypes"
    namespace, *rest = facts["operator"].split(".")
    name = rest[0] if rest else namespace  # `addmm` for `aten.addmm.default`
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
    return module_path(node) == facts["module"] and (source_line(node) or None) == facts["source"]
