from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import networkx
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import memopt
from memopt.device import hardware
from memopt.planning.plan import Plan
from memopt.planning.priced_step import PricedStep
from memopt.solver import Link
from tests.marks import slow
from tests.planned import ACCOUNT, captured, make_plan, region, two_regions

CARD = replace(hardware("h100"), least_moved_bytes=0)


@cache
def gpt2() -> Plan:
    """Two layers within the smallest budget, where much is recomputed."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=96, n_positions=64, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config).train()
    tokens = torch.randint(0, 96, (4, 64))
    batch = {"input_ids": tokens, "labels": tokens}
    roomy = memopt.plan(
        model, 10, batch, allow={"recompute", "reinplace"}, precision="fp32", backend="aten", effort="fast"
    )
    return roomy.at(roomy.smallest_gb())


def tightest(step: PricedStep) -> Plan:
    """The plan for the smallest budget."""
    roomy = make_plan(step, ACCOUNT, 10**6)
    return roomy.at(roomy.smallest_gb())


def total(graph: networkx.DiGraph, attribute: str) -> float:
    return sum(value for _, value in graph.nodes(data=attribute))


PLANS = {
    "gpt2": gpt2,
    "one region": lambda: tightest(captured(region(4))),
    "two regions": lambda: tightest(two_regions()),
    "offloaded": lambda: tightest(
        captured(region(6, width=64, batch=256)).priced_for(hardware=CARD, link=Link(1e12, 1e-6))
    ),
    "nothing recomputed": lambda: make_plan(captured(region(4)), ACCOUNT, 10**6),
}


@pytest.mark.parametrize("name", [slow(name) if name == "gpt2" else name for name in PLANS])
def test_the_totals_are_the_plan_s(name: str) -> None:
    plan = PLANS[name]()
    graph = plan.networkx()
    assert networkx.is_directed_acyclic_graph(graph)
    assert total(graph, "seconds") == pytest.approx(plan.step_seconds, rel=1e-12)
    assert total(graph, "held_bytes") == plan.held_bytes
    assert total(graph, "recomputed") == plan.diff().recomputed
    assert (total(graph, "recomputed") > 0) == (name not in ("nothing recomputed", "offloaded"))
    again = sum(values["seconds"] * values["recomputed"] for _, values in graph.nodes(data=True))
    assert again + plan.stall_seconds == pytest.approx(plan.added_seconds, rel=1e-12)
    assert total(graph, "offloaded_bytes") == plan.moved_bytes
    assert (plan.moved_bytes > 0) == (name == "offloaded")
    moved = [node for node, fate in graph.nodes(data="fate") if fate == "offloaded"]
    assert len(moved) == plan.diff().offloaded


@pytest.mark.parametrize("name", [slow("gpt2"), "one region"])
def test_nodes_and_edges_are_the_captured_graph_s(name: str) -> None:
    plan = PLANS[name]()
    (joint,) = plan.graphs["captured"]
    graph = plan.networkx()
    nodes = [node for node in joint.graph.nodes if node.op != "output"]
    assert [node for node, kind in graph.nodes(data="kind") if kind != "account"] == [node.name for node in nodes]
    assert set(graph.edges) == {(read.name, node.name) for node in nodes for read in node.all_input_nodes}
    assert all(graph.degree(node) == 0 for node, kind in graph.nodes(data="kind") if kind == "account")


def test_modules_are_those_of_the_table() -> None:
    plan = gpt2()
    graph = plan.networkx()
    recomputed: Counter[str] = Counter()
    for _, values in graph.nodes(data=True):
        recomputed[values["module"]] += values["recomputed"]
    assert {row.path: row.recomputed_ops for row in plan.modules if row.recomputed_ops} == +recomputed
    assert any(path.startswith("transformer.h.1.") for path in recomputed)


def test_fates() -> None:
    plan = PLANS["one region"]()
    graph = plan.networkx()
    fates = dict(graph.nodes(data="fate"))
    assert fates["primals_1"] == fates["tangents_1"] == "input"
    assert (fates["sum_1"], fates["t"]) == ("output", "alias")
    gradients = [name for name, fate in fates.items() if fate == "gradient"]
    assert len(gradients) == 4
    for name, values in graph.nodes(data=True):
        assert (values["fate"] == "recomputed") == (values["recomputed"] > 0)
        assert values["half"] == "backward" or name not in gradients
        assert values["held_bytes"] in (0, values["bytes"])
    assert {values["half"] for name, values in graph.nodes(data=True) if fates[name] in ("saved", "recomputed")} == {
        "forward"
    }
    halves = dict(graph.nodes(data="half"))
    assert (halves["mm"], halves["gelu_backward"], halves["primals_1"]) == ("forward", "backward", "input")


def test_the_source_is_the_model_s_code() -> None:
    sources = [source for _, source in gpt2().networkx().nodes(data="source") if source]
    files = {Path(source.rpartition(":")[0]).name for source in sources}
    assert "modeling_gpt2.py" in files
    assert all(source.rpartition(":")[2].isdigit() for source in sources)


def test_several_regions_have_numbers() -> None:
    graph = PLANS["two regions"]().networkx()
    assert {"0.mm", "1.mm"} <= set(graph)
    assert {values["region"] for _, values in graph.nodes(data=True)} == {0, 1}
    assert all(read.split(".")[0] == node.split(".")[0] for read, node in graph.edges)
