"""A lock of a step's memory: twelve regressions are each named with module and line, and nothing for nothing."""

from __future__ import annotations

import json
import linecache
from dataclasses import replace
from pathlib import Path

import pytest

from memopt.checks.lock import LockCheck, MemoryLock
from memopt.checks.locked_rows import LockedRow
from memopt.cli.locking import _LockFile
from memopt.cli.main import main
from memopt.planning.frontier import load
from tests.marks import slow

TRAIN = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

LENGTH, WIDTH, VOCABULARY = 64, 64, 256

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        query, key, value = self.project(x).unflatten(-1, (3, 4, WIDTH // 4)).movedim(-2, 1).unbind(-2)
        scores = query @ key.transpose(-2, -1) / 4
        weights = scores.softmax(-1)
        return self.out((weights @ value).transpose(1, 2).flatten(-2))

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.norm = Attention(), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(F.relu(self.up(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.h = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for block in self.h:
            x = checkpoint(block, x, use_reentrant=False)
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

def make():
    ids = torch.zeros(16, LENGTH, dtype=torch.long)
    return Net(), (ids, ids)
"""
REGRESSIONS = {
    # name: the text that is replaced, by what, the module that is named, and a part of its line
    "a dropped checkpoint": ("checkpoint(block, x, use_reentrant=False)", "block(x)", "h.0.attention", "self.project"),
    "an upcast": ("scores.softmax(-1)", "scores.double().softmax(-1).float()", "h.0.attention", "double"),
    "kept logits": (
        "return F.cross", "x = x + logits.float().logsumexp(-1, keepdim=True)\n        return x.mean() + F.cross",
        "", "logsumexp",
    ),
    "a longer mask": (
        "weights = scores",
        "scores = scores.masked_fill(torch.ones(16, 4, LENGTH, LENGTH).tril() == 0, -9.0)\n        weights = scores",
        "h.0.attention", "tril",
    ),
    "a wider layer": ("4 * WIDTH", "6 * WIDTH", "h.0", "self.up(x)"),
    "another activation": ("F.relu(", "(lambda y: y * torch.sigmoid(1.7 * y) * 1.1)(", "h.0", "sigmoid"),
    "dropout": ("F.relu(self.up(x))", "F.dropout(F.relu(self.up(x)), 0.1)", "h.0", "dropout"),
    "a copy": ("(weights @ value)", "(weights.clone() @ value.clone().exp())", "h.0.attention", "clone"),
    "heads repeated": (
        "scores = query", "key = key.repeat_interleave(4, dim=1)[:, ::4]\n        scores = query",
        "h.0.attention", "repeat_interleave",
    ),
    "one-hot targets": (
        "F.cross_entropy(logits.flatten(0, 1), targets.flatten())",
        "-(logits.log_softmax(-1) * F.one_hot(targets, VOCABULARY).float()).sum(-1).mean()", "", "one_hot",
    ),
    "a larger vocabulary": ("VOCABULARY = 64, 64, 256", "VOCABULARY = 64, 64, 512", "head", "self.head(x)"),
    "longer inputs": ("VOCABULARY = 64,", "VOCABULARY = 96,", "embed", "self.embed(tokens)"),
}  # fmt: skip
OPTIONS = ("--device", "cpu", "--precision", "fp32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a lock of the step as it is at first."""
    folder = tmp_path_factory.mktemp("locked")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / "train.py").write_text(TRAIN)
        assert main(["lock", "train.py:make", *OPTIONS, "--out", "memory.lock"]) == 0
    return folder


def check(folder: Path, program: str, monkeypatch: pytest.MonkeyPatch, *more: str) -> int:
    """Run `memopt check --lock` where the program is another."""
    monkeypatch.chdir(folder)
    (folder / "train.py").write_text(program)
    linecache.checkcache()
    return main(["check", "--lock", "memory.lock", *more])


QUICK = ("a dropped checkpoint", "dropout")


@pytest.mark.parametrize("name", [name if name in QUICK else slow(name) for name in REGRESSIONS])
def test_a_regression_is_named_with_module_and_line(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new, module, code = REGRESSIONS[name]
    assert old in TRAIN
    assert check(folder, TRAIN.replace(old, new), monkeypatch, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["grown"]
    assert found["changed"] == ["train.py (your code)"]
    named = [one for one in found["culprits"][:3] if code in one["code"]]
    assert named, found["culprits"]
    assert any(f"{path}.".startswith(f"{module}." if module else "") for one in named for path in one["modules"])
    assert named[0]["source"].startswith("train.py:")


def test_nothing_is_named_where_nothing_grew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where lines move, and where the step comes to hold less."""
    assert check(folder, "# one more line\n" + TRAIN, monkeypatch) == 0
    assert check(folder, TRAIN.replace("4 * WIDTH", "3 * WIDTH"), monkeypatch) == 0


def test_what_is_shown(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(folder, TRAIN.replace("4 * WIDTH", "8 * WIDTH"), monkeypatch) == 1
    printed = capsys.readouterr().out
    assert "smallest budget" in printed
    assert "h.0 … h.1 (2 modules), train.py:" in printed
    assert "return x + self.down(F.relu(self.up(x)))" in printed
    assert "changed since: train.py (your code)" in printed


@pytest.mark.slow
def test_a_step_that_no_longer_fits_is_named_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(folder)
    (folder / "train.py").write_text(TRAIN)
    assert main(["lock", "train.py:make", *OPTIONS, "--budget-gb", "0.01", "--out", "small.lock"]) == 0
    (folder / "train.py").write_text(TRAIN.replace("4 * WIDTH", "32 * WIDTH"))
    linecache.checkcache()
    capsys.readouterr()
    assert main(["check", "--lock", "small.lock"]) == 1
    assert "self.up(x)" in capsys.readouterr().out


def test_the_rows_add_up_to_the_peaks(folder: Path) -> None:
    memory = load(folder / "memory.lock", _LockFile, "lock", "").memory
    assert sum(row.planned * len(row.modules) for row in memory.rows) == memory.planned
    assert sum(row.smallest * len(row.modules) for row in memory.rows) == memory.smallest
    assert not LockCheck(memory, memory).grown
    assert not LockCheck(memory, memory).changed
    more = replace(memory, versions={**memory.versions, "peft": "1.0"}, files={**memory.files, "old.py": "0"})
    assert LockCheck(more, memory).changed == ("peft 1.0 → none", "old.py (your code, no longer in the step)")


def test_what_kernels_compute_counts_for_the_plain_step_and_fewer_calls_are_no_dropped_checkpoint() -> None:
    """As seen for one-hot targets and for an upcast at a card's sizes, through inductor."""
    casts = LockedRow(("h.0",), "convert_element_type", "train.py:9", "out(x)", made=2**26, calls=4, checkpointed=4)
    old = MemoryLock("Net", "rtx-4090", 2**30, 2**30, 2**30, 0.0, 1.0, {}, {}, (casts,))
    line = LockedRow(("",), "_to_copy", "train.py:41", "one_hot(targets)", made=1024, fused=2**29, calls=1)
    fewer = replace(casts, source="train.py:10", calls=3, checkpointed=3)
    new = replace(old, plain=2**31, rows=(fewer, line))
    (culprit,) = LockCheck(old, new).culprits
    assert (culprit.source, culprit.grown) == ("train.py:41", "512 MB more")
    (culprit,) = LockCheck(old, replace(new, plain=2**30, planned=2**31)).culprits
    assert culprit.grown == "1 kB more"
    gaps = LockedRow(("",), "fragmentation", smallest=2**25)  # a mask that is fused away moves blocks
    (culprit,) = LockCheck(old, replace(old, smallest=2**31, rows=(casts, gaps, replace(line, made=0)))).culprits
    assert (culprit.source, culprit.grown) == ("train.py:41", "512 MB more within kernels")
    dropped = replace(casts, checkpointed=0)
    (culprit,) = LockCheck(old, replace(old, plain=2**31, rows=(dropped,))).culprits
    assert culprit.grown == "64 MB no longer checkpointed"


@pytest.mark.slow
def test_rows_of_calls_that_torchs_patterns_make(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through inductor, its pattern matcher replaces the softmax of the attention."""
    monkeypatch.chdir(folder)
    (folder / "train.py").write_text(TRAIN)
    linecache.checkcache()
    assert main(["lock", "train.py:make", "--device", "rtx-4090", "--out", "card.lock"]) == 0
    rows = load(folder / "card.lock", _LockFile, "lock", "").memory.rows
    largest = {row.source: row.modules for row in rows if row.operator == "amax" and row.calls}
    assert ("h.0.attention", "h.1.attention") in largest.values()
    assert "" not in largest


@pytest.mark.slow
def test_a_forward_that_breaks_into_regions(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    breaks = TRAIN.replace("logits = self.head(x)", "torch._dynamo.graph_break()\n        logits = self.head(x)")
    (folder / "train.py").write_text(breaks)
    linecache.checkcache()
    assert main(["lock", "train.py:make", *OPTIONS, "--out", "regions.lock"]) == 0
    assert main(["check", "--lock", "regions.lock"]) == 0
    (folder / "train.py").write_text(breaks.replace("4 * WIDTH", "6 * WIDTH"))
    linecache.checkcache()
    capsys.readouterr()
    assert main(["check", "--lock", "regions.lock"]) == 1
    assert "self.up(x)" in capsys.readouterr().out


@pytest.mark.slow
def test_what_changed_of_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = [text for one in ("n_layer=2", "n_embd=64", "n_head=2", "vocab_size=128") for text in ("--set", one)]
    assert main(["lock", "gpt2", *settings, "--shape", "input_ids=2x64", *OPTIONS]) == 0
    memory = load(tmp_path / "memory.lock", _LockFile, "lock", "").memory
    assert set(memory.versions) == {"memopt", "torch", "transformers"}
    assert not memory.files
    assert any(row.source.startswith("transformers/models/gpt2/modeling_gpt2.py:") for row in memory.rows)
    now = memory.versions["transformers"]
    older = replace(memory, versions={**memory.versions, "transformers": "5.0.0"}, plain=memory.plain // 2)
    assert LockCheck(older, memory).changed == (f"transformers 5.0.0 → {now}",)
    assert LockCheck(older, memory).grown == ("plain",)
    assert f"changed since: transformers 5.0.0 → {now}" in str(LockCheck(older, memory))


def test_wrong_use(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(folder)
    assert main(["check", "gpt2", "--lock", "memory.lock"]) == 2
    assert "memory.lock names the model and its options" in capsys.readouterr().err
    (folder / "other.lock").write_text("{}")
    assert main(["check", "--lock", "other.lock"]) == 2
    assert "other.lock is not a memopt lock of format 1; make it with memopt lock" in capsys.readouterr().err
    assert main(["check", "--lock", "nowhere.lock"]) == 2
    assert main(["lock", "train.py:make", "--out", "nowhere/memory.lock"]) == 2
    assert main(["check"]) == 2
    assert "Missing argument 'MODEL'" in capsys.readouterr().err
