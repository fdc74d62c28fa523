"""What memopt costs on a fresh machine: its import beside torch's, and the first and second plan of GPT-2.

    python -m benchmarks.first_use [--tree PATH] [--repeats 3]

Imports: processor seconds of `import torch`, `import memopt` and `import memopt.solver`, each in processes of its own
with one thread, the median of `--repeats`, after one round that writes the bytecode. Plans: GPT-2 of 12 layers on the
meta device, 8 sequences of 1,024 tokens, in two processes that share folders for kept plans and for numba's machine
code which are empty at the start; seconds of `memopt.plan` alone, and of the whole process.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "first_use.json"
IMPORTS = ("torch", "memopt", "memopt.solver")
PLAN = """
import json, resource, time
import torch, transformers, memopt

def cpu_seconds():
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(item.ru_utime + item.ru_stime for item in usage)

with torch.device("meta"):
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False)).train()
    tokens = torch.zeros(8, 1024, dtype=torch.long)
model.loss_type = "ForCausalLM"
cpu, wall = cpu_seconds(), time.perf_counter()
plan = memopt.plan(model, 12, {"input_ids": tokens, "labels": tokens}, device="rtx-4090")
cpu, wall = cpu_seconds() - cpu, time.perf_counter() - wall
print(json.dumps({"plan_cpu": cpu, "plan_wall": wall, "peak_gb": plan.predicted_peak_gb, "added": plan.added_time}))
"""


def run(code: str, tree: Path, **variables: str) -> tuple[float, float, str]:
    """Run `code` in a new process; return its processor seconds, its wall seconds and what it printed."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree), **variables}
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True, env=surroundings, cwd=tree
    )
    after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - begin
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall, done.stdout


def imports(tree: Path, repeats: int) -> list[dict[str, Any]]:
    """Processor seconds of a process that imports one package, and whether torch was loaded by it."""
    rows = []
    for name in IMPORTS:
        code = f"import sys, {name}; print('torch' in sys.modules)"
        run(code, tree)
        runs = [run(code, tree) for _ in range(repeats)]
        seconds = statistics.median(cpu for cpu, _, _ in runs)
        rows.append({"import": name, "cpu_seconds": seconds, "loads_torch": runs[0][2].strip() == "True"})
    return rows


def plans(tree: Path) -> list[dict[str, Any]]:
    """Seconds of the first and of the second plan of GPT-2 with caches that are empty at the start."""
    rows = []
    with tempfile.TemporaryDirectory() as machine_code, tempfile.TemporaryDirectory() as kept_plans:
        for number in ("first", "second"):
            variables = {"NUMBA_CACHE_DIR": machine_code, "MEMOPT_CACHE_DIR": kept_plans}
            cpu, wall, printed = run(PLAN, tree, **variables)
            rows.append({"plan": number, **json.loads(printed), "process_cpu": cpu, "process_wall": wall})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=ROOT, help="the folder that memopt is imported from")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each import; the median is reported")
    parser.add_argument("--to", type=Path, default=RESULT, help="the result file; runs under other labels are kept")
    parser.add_argument("--label", default="now", help="the name of this run in the result file, such as 'before'")
    chosen = parser.parse_args()
    from benchmarks.stamp import stamp, write_result

    tree = chosen.tree.resolve()
    found = {"imports": imports(tree, chosen.repeats), "plans": plans(tree)}
    known = json.loads(chosen.to.read_text()) if chosen.to.exists() else {}
    write_result(chosen.to, {**known, chosen.label: {**stamp(), **found}})
    by_name = {row["import"]: row["cpu_seconds"] for row in found["imports"]}
    for name, seconds in by_name.items():
        added = f", {seconds - by_name['torch']:+.2f} s beside torch" if name != "torch" else ""
        print(f"import {name}: {seconds:.2f} s of CPU{added}")
    for row in found["plans"]:
        print(f"{row['plan']} plan of GPT-2: {row['plan_wall']:.1f} s, {row['plan_cpu']:.1f} s of CPU")


if __name__ == "__main__":
    main()
