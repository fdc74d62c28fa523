"""Public training programs with one line of memopt, beside the same programs without it.

    python -m benchmarks.public_programs [NAME ...] [--again]

benchmarks/public/ has a driver for each: the statements of the program's loop around the model class of a checkout,
small data of random numbers, a few steps. Checkouts and the packages that they need lie in a folder of their own
(`benchmarks.public.program.CHECKOUTS`); nothing of them is part of this repository. Each program runs in a process of
its own: plain, then within half of its activations with the exact and with the default options, by the runner of
tests/loops. Results are written after each, and the table of all is printed. Without names those run that have no
result yet, and with `--again` also those that are not right.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.public import PROGRAMS
from benchmarks.stamp import stamp, write_result

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "public_programs.json"
LIMIT_SECONDS = 900
SAID = 120
"""Characters of a refusal or an error that are kept."""
RIGHT = ("bitwise", "rounding", "close")
_KEPT = ("options", "verdict", "plain_mb", "held_mb", "budgets_mb", "peak_mb", "loss_off", "way_off", "said")

Record = dict[str, Any]


def record_of(name: str) -> Record:
    """Run a program in a process of its own."""
    environment = {**os.environ, "MEMOPT_CACHE": "0", "OMP_NUM_THREADS": "1"}
    command = ["timeout", str(LIMIT_SECONDS), sys.executable, "-m", "tests.loops", name]
    ran = subprocess.run(
        [*command, "--of", "benchmarks.public", "--shares", "half"],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    runs = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    kept = [{key: run[key] for key in _KEPT} for run in runs]
    for run in kept:
        run["said"] = [text[:SAID] for text in run["said"]]
    if ran.returncode:
        last = ran.stderr.strip().splitlines()[-1:]
        kept.append({"options": "", "verdict": f"the process ended with code {ran.returncode}", "said": last})
    program = PROGRAMS[name]
    return {
        "program": name, "repository": program.repository, "commit": program.commit, "file": program.file, "runs": kept
    }  # fmt: skip


def table(records: list[Record]) -> str:
    """A row for each run, and how many programs are right with all options."""
    lines = ["| program | options | plain | budget | peak | verdict |", "|---|---|---|---|---|---|"]
    for record in records:
        for run in record["runs"]:
            budgets = " → ".join(f"{budget:.2f}" for budget in run.get("budgets_mb", []))
            figures = f"{run.get('plain_mb', 0):.2f} MB | {budgets} MB | {run.get('peak_mb', 0):.2f} MB"
            lines.append(f"| {record['program']} | {run['options']} | {figures} | {run['verdict']} |")
    return "\n".join([*lines, "", f"{sum(map(_right, records))} of {len(records)} programs are right"])


def _right(record: Record) -> bool:
    return all(run["verdict"] in RIGHT for run in record["runs"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="all programs without any")
    parser.add_argument("--again", action="store_true", help="repeat what is not right")
    arguments = parser.parse_args()
    known = json.loads(RESULT.read_text())["records"] if RESULT.exists() else []
    records = {record["program"]: record for record in known}
    for name in arguments.names or PROGRAMS:
        if arguments.names or name not in records or (arguments.again and not _right(records[name])):
            records[name] = record_of(name)
            write_result(RESULT, {**stamp(), "records": [records[name] for name in PROGRAMS if name in records]})
            print(table([records[name]]), flush=True)
    print(table(list(records.values())))


if __name__ == "__main__":
    main()
