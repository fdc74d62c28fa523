"""Files for other tools: read back by torch's own reader of snapshots, and by the rules of their formats."""

from __future__ import annotations

import json
import pickle
import pickletools
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from torch.cuda import _memory_viz

from memopt.planning.plan import Plan
from memopt.show.step import step_of
from tests.planning.test_plan_networkx import PLANS, gpt2

# What the visualiser's reader of pickles knows (torch/utils/viz/MemoryViz.js).
OPCODES = {
    "APPEND", "APPENDS", "BINFLOAT", "BINGET", "BININT", "BININT1", "BININT2", "BINPUT", "BINUNICODE", "DICT",
    "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "FRAME", "LIST", "LONG1", "LONG_BINGET", "LONG_BINPUT", "MARK",
    "MEMOIZE", "NEWFALSE", "NEWTRUE", "NONE", "PROTO", "SETITEM", "SETITEMS", "SHORT_BINUNICODE", "STOP", "TUPLE",
    "TUPLE1", "TUPLE2", "TUPLE3",
}  # fmt: skip


def exported(plan: Plan, path: Path) -> Path:
    plan.export(path)
    return path


@pytest.fixture(scope="module", params=PLANS)
def plan(request: pytest.FixtureRequest) -> Plan:
    return PLANS[request.param]()


def snapshot_of(plan: Plan, folder: Path) -> dict[str, Any]:
    snapshot: dict[str, Any] = pickle.loads(exported(plan, folder / "step.pickle").read_bytes())
    return snapshot


@pytest.mark.slow
def test_a_snapshot_has_only_what_the_visualiser_reads(tmp_path: Path) -> None:
    written = exported(gpt2(), tmp_path / "step.pickle").read_bytes()
    assert {opcode.name for opcode, _, _ in pickletools.genops(written)} <= OPCODES
    snapshot = pickle.loads(written)
    categories = {event["category"] for event in snapshot["device_traces"][0]}
    assert {"unknown", "parameters", "saved activations", "recomputed activations"} <= categories
    largest = max(event["addr"] + event["size"] for event in snapshot["device_traces"][0])
    assert largest < 2**53, "the visualiser reads addresses as floating-point numbers"


def test_torch_reads_a_snapshot(plan: Plan, tmp_path: Path) -> None:
    snapshot = snapshot_of(plan, tmp_path)
    assert "Summary of segments" in _memory_viz.segsum(snapshot)
    assert f"{len(snapshot['device_traces'][0])} entries" in _memory_viz.trace(snapshot)
    assert "add_local_files" in _memory_viz.trace_plot(snapshot)


def test_a_snapshot_s_blocks_are_the_plan_s(plan: Plan, tmp_path: Path) -> None:
    """No two live blocks overlap, each lies in a segment, and at the most they are what the plan counts."""
    snapshot = snapshot_of(plan, tmp_path)
    live: dict[int, int] = {}
    peak = 0
    for event in snapshot["device_traces"][0]:
        begin, end = event["addr"], event["addr"] + event["size"]
        if event["action"] == "alloc":
            assert not [one for one in live if one < end and begin < one + live[one]]
            assert any(
                one["address"] <= begin and end <= one["address"] + one["total_size"] for one in snapshot["segments"]
            )
            live[begin] = event["size"]
            peak = max(peak, sum(live.values()))
        elif event["action"] == "free_completed":
            assert live.pop(begin) == event["size"]
    memory = step_of(plan).planned
    assert peak == max(memory.live_bytes[:-1])
    left = {b["address"]: b["requested_size"] for one in snapshot["segments"] for b in one["blocks"] if b["frames"]}
    assert left == live
    for segment in snapshot["segments"]:
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]


def test_frames_lead_to_the_user_s_lines(tmp_path: Path) -> None:
    events = snapshot_of(gpt2(), tmp_path)["device_traces"][0]
    own, line = next(one["frames"] for one in events if one["frames"][0]["name"].startswith("_safe_softmax_1 "))
    assert own["name"] == "_safe_softmax_1 of transformer.h.1.attn f32[4, 2, 64, 64]"
    assert line["filename"].endswith("sdpa_attention.py")
    assert line["line"] > 0
    assert any(one["frames"][0]["name"] == "parameters of transformer.wte" for one in events)


def test_a_trace_is_nested_and_counts_the_bytes(plan: Plan, tmp_path: Path) -> None:
    trace = json.loads(exported(plan, tmp_path / "step.json").read_text(encoding="utf-8"))
    tracks = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    step = step_of(plan)
    assert len(tracks[1, 1]) == len(step.planned.evaluations)
    assert len(tracks[2, 1]) == len(step.plain.evaluations)
    assert ((1, 3) in tracks) == bool(plan.moved_bytes)
    for spans in tracks.values():
        assert all(end >= begin >= 0 for begin, end in spans)
        opened: list[tuple[float, float]] = []
        for span in sorted(spans, key=lambda span: (span[0], -span[1])):
            while opened and opened[-1][1] <= span[0] + 1e-2:
                opened.pop()
            assert not opened or span[1] <= opened[-1][1] + 1e-2, "slices of a track lie within each other"
            opened.append(span)
    for process, memory in ((1, step.planned), (2, step.plain)):
        counted = [one for one in trace["traceEvents"] if one["ph"] == "C" and one["pid"] == process]
        assert [sum(one["args"].values()) for one in counted] == list(memory.live_bytes)


NODE = re.compile(
    r'^  "((?:[^"\\]|\\.)*)" \[label="((?:[^"\\]|\\.)*)", fillcolor="#[0-9a-f]{6}"(, tooltip="[^"]*")?\];$'
)
EDGE = re.compile(r'^  "((?:[^"\\]|\\.)*)" -> "((?:[^"\\]|\\.)*)";$')


def test_a_graph_has_every_operator_with_its_fate(plan: Plan, tmp_path: Path) -> None:
    first, _, _, *lines, last = exported(plan, tmp_path / "step.dot").read_text(encoding="utf-8").splitlines()
    assert (first, last) == ("digraph plan {", "}")
    nodes = {match[1]: match[2] for line in lines if (match := NODE.match(line))}
    edges = {(match[1], match[2]) for line in lines if (match := EDGE.match(line))}
    assert len(nodes) + len(edges) == len(lines)
    graph = plan.networkx()
    shown = {name: facts for name, facts in graph.nodes(data=True) if facts["fate"] not in ("input", "alias")}
    assert nodes.keys() == shown.keys()
    for name, facts in shown.items():
        assert f"fate: {facts['fate']}\\l" in nodes[name]
        # The form that Netron takes apart: name, kind, then the operator and its attributes.
        assert re.fullmatch(r"\{" + re.escape(name) + r"\|op_code=\w+\\l\|\S+\\l(\w+: .+\\l)+\}", nodes[name])
    direct = {(a, b) for a, b in graph.edges if a in shown and b in shown}
    assert direct <= edges
    assert all(a in shown and b in shown for a, b in edges)


def test_formats_by_name_and_by_wish(tmp_path: Path) -> None:
    plan = gpt2()
    plan.export(tmp_path / "step.trace", "trace")
    assert json.loads((tmp_path / "step.trace").read_text(encoding="utf-8"))["traceEvents"]
    with pytest.raises(ValueError, match=r"no format goes with the name 'step\.txt': end it in \.pickle, "):
        plan.export(tmp_path / "step.txt")
    with pytest.raises(ValueError, match="there is no format 'onnx'; choose one of snapshot, trace, dot"):
        plan.export(tmp_path / "step.json", "onnx")  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["step.trace"]
