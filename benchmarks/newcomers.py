"""Ten people's first tasks, from a shell in an empty folder, and the minutes that each takes.

    python -m benchmarks.newcomers [--only NAME ...]

Each task is what somebody would type after reading one page of docs: commands, or a program of the documentation. It
runs with one thread, an empty folder for kept plans, and models that are small enough for a laptop. Reported are the
minutes that pass, the processor's minutes, which other work does not change, and which commands ended otherwise than
they should. The last task runs a check of a lock ten times, unchanged: it may find no growth.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "newcomers.json"
TRAIN = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(256), nn.Linear(256, 4 * 256), nn.Linear(4 * 256, 256)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def make():
    return Model(), (torch.randn(32, 128, 256),)
"""
REGRESS = """
text = open("train.py").read()
open("train.py", "w").write(text.replace("4 * 256", "8 * 256"))
"""
FAST = "--effort fast"
GPT2 = "gpt2 --set n_layer=2 --shape input_ids=4x256"


@dataclass(frozen=True)
class Task:
    """Somebody's task: commands of `memopt`, or of Python, each with the exit code that it should end with."""

    who: str
    wants: str
    commands: tuple[tuple[str, int], ...]
    files: tuple[tuple[str, str], ...] = ()
    """Files that are there before: names and texts."""


def program(page: str) -> str:
    """The first Python program of a page."""
    found = re.search(r"^```python\n(.*?)^```$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert found
    return found[1]


TASKS = {
    "readme": Task(
        "a student with one GPU", "README's ten lines, as they stand", (("python readme.py", 0),),
        (("readme.py", program("README.md")),),
    ),
    "will-it-fit": Task(
        "somebody before a run", "does a GPT-2 fit an RTX 4090 within 4 GB, and where do the bytes go",
        ((f"memopt plan {GPT2} --device rtx-4090 --budget-gb 4", 0),),
    ),
    "refused": Task(
        "somebody whose budget is too small", "what would help",
        ((f"memopt plan {GPT2} --device rtx-4090 --budget-gb 0.7", 3),),
    ),
    "out-of-memory": Task(
        "an engineer whose run died", "what filled the card, from a snapshot of torch's memory history",
        (
            (f"memopt export {GPT2} --device rtx-4090 --budget-gb 4 --to died.pickle", 0),
            ("memopt explain died.pickle", 0),
        ),
    ),
    "lora": Task(
        "a fine-tuner with PEFT", "LoRA on a Llama within a budget", (("python lora.py --small", 0),),
        (("lora.py", (ROOT / "examples" / "lora.py").read_text(encoding="utf-8")),),
    ),
    "trainer": Task(
        "a user of transformers' Trainer", "one callback", (("python trainer.py", 0),),
        (("trainer.py", program("docs/integrations/transformers.md")),),
    ),
    "largest": Task(
        "somebody with a card and a data set", "the largest batch and the longest sequence that fit",
        (
            (f"memopt max-batch vit --set num_hidden_layers=2 --device t4 --budget-gb 4 --multiple-of 32 {FAST}", 0),
            (f"memopt max-length gpt2 --set n_layer=1 --device h100 --budget-gb 2 --multiple-of 512 {FAST}", 0),
        ),
    ),
    "another-card": Task(
        "somebody who wants to buy", "one page with what other budgets and cards would do",
        ((f"memopt report {GPT2} --device rtx-4090 --budget-gb 2 --frontier 6 --cards --to page.html", 0),),
    ),
    "is-it-right": Task(
        "a reviewer", "memory and gradients of real steps beside the plan and the plain model",
        (("memopt check gpt2 --set n_layer=1 --set n_embd=128 --set n_head=2 --shape input_ids=2x64 --device cpu "
          "--budget-gb 0.25 --precision fp32", 0),),
    ),
    "lock": Task(
        "a team with CI", "a lock for memory, ten unchanged checks, and one that must fail",
        (
            ("memopt lock train.py:make --device rtx-4090 --out memory.lock", 0),
            *((("memopt check --lock memory.lock"), 0),) * 10,
            ("python regress.py", 0),
            ("memopt check --lock memory.lock", 1),
        ),
        (
            ("train.py", TRAIN),
            ("regress.py", REGRESS),
        ),
    ),
}  # fmt: skip


def run(task: Task) -> dict[str, Any]:
    """The minutes of a task, and its commands that ended otherwise than they should."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as kept:
        for name, text in task.files:
            Path(folder, name).write_text(text, encoding="utf-8")
        surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "MEMOPT_CACHE_DIR": kept}
        before, begin, wrong = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter(), []
        for written, expected in task.commands:
            first, *rest = shlex.split(written)
            command = [sys.executable, *(["-m", "memopt"] if first == "memopt" else []), *rest]
            done = subprocess.run(command, cwd=folder, env=surroundings, capture_output=True, text=True)
            if done.returncode != expected:
                wrong.append(f"{written}: {done.returncode}, not {expected}: {(done.stdout + done.stderr)[-600:]}")
        after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - begin
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"who": task.who, "wants": task.wants, "minutes": wall / 60, "cpu_minutes": used / 60, "wrong": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=TASKS, default=list(TASKS), help="run these, and keep the others")
    parser.add_argument("--to", type=Path, default=RESULT)
    chosen = parser.parse_args()
    import json

    from benchmarks.stamp import stamp, write_result

    known = json.loads(chosen.to.read_text()).get("tasks", {}) if chosen.to.exists() else {}
    for name in chosen.only:
        known[name] = run(TASKS[name])
        row = known[name]
        print(
            f"{name}: {row['minutes']:.1f} min, {row['cpu_minutes']:.1f} of CPU", *row["wrong"], sep="\n  ", flush=True
        )
        made = {**stamp(), "command": "python -m benchmarks.newcomers"}
        write_result(chosen.to, {**made, "tasks": {one: known[one] for one in TASKS if one in known}})


if __name__ == "__main__":
    main()
