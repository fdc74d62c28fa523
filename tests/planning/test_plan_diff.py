from __future__ import annotations

import io
import os
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import memopt
from examples.custom_pass import TanhAsSigmoid
from memopt.planning.changes import CHUNKED, FREED, MOVED, RECOMPUTED, REWRITTEN
from memopt.planning.plan import Plan
from tests.marks import slow
from tests.planning.nano_gpt import NanoGPT

GOLDEN = Path(__file__).parent / "golden"
BATCH, LENGTH = 64, 128


def hugging_face(kind: str) -> nn.Module:
    sizes = {"vocab_size": 128, "bos_token_id": 0, "eos_token_id": 0}
    if kind == "llama":
        layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "intermediate_size": 128}
        return LlamaForCausalLM(LlamaConfig(**layers, **sizes))
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=4, n_positions=LENGTH, **sizes))


@cache
def roomy(kind: str, precision: str = "bf16") -> Plan:
    """A plan of a model on the meta device for a card, within a budget that everything fits into."""
    with torch.device("meta"):
        model = NanoGPT(int(kind)) if kind.isdigit() else hugging_face(kind)
        ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    names = ("ids", "labels") if kind.isdigit() else ("input_ids", "labels")
    return memopt.plan(
        model.train(), 100, dict.fromkeys(names, ids), device="h100", precision=precision, backend="aten",
        allow={"recompute", "reinplace"}, effort="fast",
    )  # fmt: skip


@cache
def tight(kind: str, share: float = 0.0, precision: str = "bf16") -> Plan:
    """The plan for a budget between the smallest that works (share 0) and the peak of the plain step (1)."""
    plan = roomy(kind, precision)
    smallest = plan.smallest_gb()
    return plan.at(smallest + share * (plan.plain_peak_gb - smallest))


def recomputed(plan: Plan) -> Counter[str]:
    """By node, how often the schedules run it beyond the first time."""
    times = Counter(name for region in plan.regions for name in region.evaluations)
    return +Counter({name: count - 1 for name, count in times.items()})


def expect(name: str, text: str) -> None:
    """Compare with a golden file, or write it where EXPECTTEST_ACCEPT is set."""
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("EXPECTTEST_ACCEPT"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    assert text + "\n" == path.read_text(encoding="utf-8")


def test_two_blocks() -> None:
    text = str(tight("2").diff())
    assert len(text.splitlines()) < 60
    expect("diff_of_2_blocks", text)


@pytest.mark.slow  # half a minute of planning
def test_48_blocks() -> None:
    plan = tight("48", 0.1)
    text = str(plan.diff())
    assert len(text.splitlines()) < 80
    expect("diff_of_48_blocks", text)
    check_recomputed(plan, "h.0.")


@pytest.mark.parametrize("kind", ["2", slow("gpt2"), slow("llama")])
@pytest.mark.parametrize("share", [0.0, 0.2])
def test_nothing_recomputed_is_missing(kind: str, share: float) -> None:
    plan = tight(kind, share)
    assert len(str(plan.diff()).splitlines()) < 60
    check_recomputed(plan, {"2": "h.0.", "gpt2": "transformer.h.0.", "llama": "model.layers.0."}[kind])


@pytest.mark.slow
@pytest.mark.parametrize("width", [80, 110])
def test_as_short_in_narrow_columns(width: int) -> None:
    """A terminal often has 80 columns, a file 110."""
    console = Console(width=width, file=io.StringIO())
    console.print(tight("llama", 0.2).diff())
    assert len(console.file.getvalue().splitlines()) < 60


def check_recomputed(plan: Plan, block: str) -> None:
    """Check that the diff has each recomputed op, with its reason, and that its text names each one of a block."""
    diff = plan.diff()
    want = recomputed(plan)
    changes = [change for change in diff.changes if change.kind == RECOMPUTED]
    assert Counter({change.op: change.times for change in changes}) == want
    assert diff.recomputed == want.total()
    assert all(change.seconds > 0 and change.readers for change in changes)
    text = str(diff)
    graph = plan.networkx()
    own = [name for name in want if graph.nodes[name]["module"].startswith(block)]
    assert own, "no operator of the block is recomputed, so that this tests nothing"
    for name in own:
        rows = [row for row in rows_of(text) if re.search(rf"\brecomputed\b.*\b{name}\b.*(?:B|–) for [\d.]+ ms", row)]
        assert rows, f"{name} is not named with its reason"


def rows_of(text: str) -> list[str]:
    """The rows of a diff, with those that go on in further lines on one."""
    kinds = r"(?:\S+ → \S+|cast|fused|chunked|rewritten|removed|saved as \S+|recomputed|offloaded|in place|moved) "
    rows: list[str] = []
    for line in text.splitlines():
        if not rows or re.match(rf" *(?:[\w.()]+ +)?{kinds}", line):
            rows.append(line)
        else:
            rows[-1] += " " + line.strip()
    return rows


def test_source_lines_are_the_users() -> None:
    changes = tight("2").diff().changes
    of_model = [change for change in changes if change.module.startswith("h.")]
    assert {Path(change.source.rpartition(":")[0]).name for change in of_model} == {"nano_gpt.py"}
    assert "mixed = scores.softmax(-1) @ v" in {change.code for change in of_model}


def test_precision_is_said_by_operator_and_not_by_view() -> None:
    changes = [change for change in roomy("2").diff().changes if change.kind == "dtype"]
    assert {change.detail for change in changes} <= {"f32 → bf16", "bf16 → f32"}
    assert not {"view", "permute", "transpose", "reshape", "flatten", "select"} & {
        change.operator for change in changes
    }
    assert all(change.reason for change in changes)
    assert "as under torch.autocast" in {change.reason for change in changes}


def test_order_is_left_out_unless_asked() -> None:
    plan = tight("2")
    assert MOVED not in {change.kind for change in plan.diff().changes}
    moved = {change.op for change in plan.diff(order=True).changes if change.kind == MOVED}
    assert moved == set(plan.diff("scheduled", order=True).regions[0].moved)
    short, long = (str(plan.diff("scheduled", order=order)).splitlines() for order in (False, True))
    assert len(short) < len(long)
    assert not plan.diff("scheduled").regions[0].moved


@pytest.mark.parametrize("stage", ["scheduled", "forward", "backward", "joint", "operators", "precision"])
def test_text_of_each_stage(stage: str) -> None:
    plan = tight("2")
    text = plan.diff().text(stage)
    assert text == str(plan.diff(stage))
    assert text.startswith("# ")
    assert "\n+ " in text or stage == "forward"  # there, recomputed nodes may only be missing
    assert ("addmm_again" in text) == (stage in ("scheduled", "backward"))


def test_halves_make_up_the_whole() -> None:
    plan = tight("2")
    whole, forward, backward = (plan.diff(stage).regions[0] for stage in ("scheduled", "forward", "backward"))
    assert set(whole.added) == {*forward.added, *backward.added}


def test_two_budgets() -> None:
    less, more = tight("2"), tight("2", 0.5)
    diff = less.diff(more)
    assert diff
    assert not less.diff(less)
    assert str(less.diff(less)).endswith("no change")
    signs = {sign: Counter(c.op for c in diff.changes if c.sign == sign and c.kind == RECOMPUTED) for sign in "+-"}
    mine, others = recomputed(less), recomputed(more)
    assert set(signs["+"]) == {name for name in mine if mine[name] != others[name]}
    assert set(signs["-"]) == {name for name in others if mine[name] != others[name]}
    back = more.diff(less)
    assert {(change.op, change.sign) for change in back.changes} == {
        (change.op, "-" if change.sign == "+" else "+") for change in diff.changes
    }
    assert diff.text() == "\n".join(map(str, diff.of_stage("scheduled").regions))
    with pytest.raises(ValueError, match="no stage 'precision' in both plans; give one of 'operators', "):
        diff.text("precision")


def test_two_versions() -> None:
    low, full = roomy("2"), roomy("2", "fp32")
    kinds = Counter((change.sign, change.kind) for change in low.diff(full).changes)
    assert kinds["+", "dtype"] == sum(change.kind == "dtype" for change in low.diff().changes) > 0
    assert not kinds["-", "dtype"]


@pytest.mark.slow
def test_calls_that_a_pass_replaced() -> None:
    model = hugging_face("gpt2")
    ids = torch.zeros(2, 16, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    plan = memopt.plan(model.train(), 1, batch, optimizer=None, precision="fp32", passes=[TanhAsSigmoid()])
    changes = [change for change in plan.diff().changes if change.kind == REWRITTEN]
    assert Counter(change.operator for change in changes) == {"mul": 4, "sigmoid": 2}
    assert {change.detail for change in changes} == {"mul, tanh, add", ""}
    assert {change.reason for change in changes} == {"by TanhAsSigmoid"}
    assert "transformer.h.0 and h.1 (2 blocks; h.1 like h.0)" in str(plan.diff())


def test_a_chunked_loss() -> None:
    with torch.device("meta"):
        model, ids = NanoGPT(1, words=8192).train(), torch.zeros(8, LENGTH, dtype=torch.long)
    batch = {"ids": ids, "labels": ids}
    plan = memopt.plan(model, 0.872, batch, device="h100", precision="fp32", backend="aten", allow={"chunked_loss"})
    (change,) = [change for change in plan.diff().changes if change.kind == CHUNKED]
    assert (change.op, change.detail) == ("linear_cross_entropy", "linear, cross_entropy_loss")


def test_gradients_that_are_freed_early() -> None:
    plan = roomy("2", "fp32")
    stepped = replace(plan, regions=(replace(plan.regions[0], steps=(2, 3)),))
    found = [change for change in stepped.diff().changes if change.kind == FREED]
    assert len(found) == 2
    assert all(change.nbytes and "stepped in the backward" in change.reason for change in found)


def test_in_a_terminal_it_has_colours_and_the_window_s_width() -> None:
    diff = tight("2").diff()
    for width in (80, 120):
        page = io.StringIO()
        diff.show(Console(file=page, width=width, force_terminal=True, color_system="standard", highlight=False))
        text = page.getvalue()
        assert "\x1b[33mrecomputed" in text
        plain = re.sub(r"\x1b\[[\d;]*m", "", text)
        assert max(map(len, plain.splitlines())) <= width
    assert "\x1b" not in str(diff)
    assert repr(diff) == f"<PlanDiff: {diff.summary()}>"
