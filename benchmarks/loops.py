"""Training loops in their authors' manner with one line of memopt, beside the plain loops.

    python -m benchmarks.loops [--only NAME ...] [--again] [--limit-minutes 60]

Runs the loops of tests/loops, each in a process of its own, and writes results after each, so that a run goes on where
the last one stopped; `--again` repeats those that are not right. docs/loops.md is made from the result file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.stamp import stamp, write_result

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "loops.json"
PAGE = ROOT / "docs" / "loops.md"
LIMIT_SECONDS = 900
SAID = 240
"""Characters of a refusal or an error that are kept."""
RIGHT = ("bitwise", "rounding", "close")

INTRODUCTION = """# Loops

Training loops as their authors write them, with one line of memopt in each: `memopt.optimize(model, budget_gb,
optimizer=optimizer)`, or the callback where a library has the loop. They are in `tests/loops/`, with partial batches,
validation, accumulation, schedulers, clipping and resumes. Each runs plain, and then within a half and a third of its
activations: of what it holds at its peak beyond what it holds at the end of a step, and with no less than other code
holds in a step before the model is called, as a teacher does. *Exact* is `precision="fp32", allow={"recompute",
"reinplace"}`, *default* no options. Where the first try is refused, the loop starts again with the budget that the
refusal names; once more, in a later step, only where later steps need what no earlier one shows (`unforeseen` in
`tests/loops/all_loops.py`: larger graphs, a second forward). Then all losses, the last weights and buffers, and the
peak of each step are compared.

| verdict | meaning |
|---|---|
| bitwise | losses and weights have the plain loop's bits |
| rounding | exact but for rounding, for a reason that `tests/loops/all_loops.py` or a note of the plan gives |
| close | default options: losses differ by less than 5% of the largest, the weights by less than half of their way |

Anything else is a fault of memopt. *Off* is how far the last weights are from the plain loop's, as a share of the way
that they went. Times are CPU time on one core, medians of the later two thirds of the steps; *added* is what the
slowest plan adds by the time model, in percent of the plain step.
"""

Record = dict[str, Any]


def names() -> list[str]:
    """The names of the loops, from the command that runs them."""
    command = [sys.executable, "-m", "tests.loops"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return listed.stdout.split()


def records_of(name: str) -> list[Record]:
    """Run a loop with all options and budgets in a process of its own."""
    environment = {**os.environ, "MEMOPT_CACHE": "0", "OMP_NUM_THREADS": "1"}
    command = ["timeout", str(LIMIT_SECONDS), sys.executable, "-m", "tests.loops", name, "--timed"]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    failure = f"the process ended with code {ran.returncode}" * bool(ran.returncode)
    lines = [line for line in ran.stdout.splitlines() if line.startswith('{"')]  # trainers print dicts of their own
    records = [json.loads(line) for line in lines]
    for record in records:
        record["said"] = [text[:SAID] for text in record["said"]]
        record.pop("states")
    if failure:
        records.append({"loop": name, "options": "", "share": "", "verdict": failure, "said": []})
    return records


def known() -> list[Record]:
    """The records of the result file, which has those of one loop with the same options on a line."""
    return [record for some in json.loads(RESULT.read_text())["records"] for record in some] if RESULT.exists() else []


def write(records: dict[str, list[Record]]) -> None:
    flat = [record for name in sorted(records) for record in records[name]]
    told = [(one, flat[number - 1]["loop"] == one["loop"] if number else False) for number, one in enumerate(flat)]
    short = [{key: value for key, value in one.items() if key != "title" or not again} for one, again in told]
    lines = [list(some) for _, some in groupby(short, lambda record: (record["loop"], record["options"]))]
    write_result(RESULT, {**stamp(), "records": lines})
    PAGE.write_text(page(flat), encoding="utf-8")


def page(records: list[Record]) -> str:
    """Return docs/loops.md: how many of each verdict, a row for each loop, and what was said where it is not right."""
    counts = Counter(record["verdict"] for record in records)
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    lines = [INTRODUCTION, f"Of {len(records)} runs: {told}.", ""]
    lines += ["| loop | options | share | plain | budget | peak | verdict | off | plain ms | planned | added |"]
    lines += ["|---|---|---|---|---|---|---|---|---|---|---|"]
    for record in records:
        if record["options"]:
            lines.append("| " + " | ".join(_cells(record)) + " |")
    lines += ["", "## The loops", ""]
    titles = {record["loop"]: record["title"] for record in records if "title" in record}
    lines += [f"- `{name}`: {title}." for name, title in titles.items()]
    wrong = [record for record in records if record["verdict"] not in RIGHT]
    if wrong:
        lines += ["", "## Not right", "", "| loop | case | what it said |", "|---|---|---|"]
    for record in wrong:
        said = " … ".join(record["said"]).replace("|", "\\|").replace("\n", " ") or record["verdict"]
        lines.append(f"| {record['loop']} | {record['options']} {record['share']} | {said} |")
    return "\n".join([*lines, ""])


def _cells(record: Record) -> list[str]:
    budgets = " → ".join(f"{budget:.1f}" for budget in record["budgets_mb"])
    slower = f"{record['planned_ms'] / record['plain_ms'] - 1:+.0%}" if record["plain_ms"] else ""
    ran = record["peak_mb"]
    return [
        record["loop"], record["options"], record["share"], f"{record['plain_mb']:.1f} MB", f"{budgets} MB",
        f"{ran:.1f} MB" if ran else "", record["verdict"], f"{record['way_off']:.1g}" if ran else "",
        f"{record['plain_ms']:.0f}" if slower else "", slower, f"{record['added']:+.0%}" if slower else "",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--again", action="store_true", help="repeat what is not right")
    parser.add_argument("--limit-minutes", type=float, default=float("inf"))
    arguments = parser.parse_args()
    before, every, start = known(), names(), time.time()
    records = {name: [record for record in before if record["loop"] == name] for name in every}
    for name in arguments.only or every:
        right = records[name] and all(record["verdict"] in RIGHT for record in records[name])
        if arguments.only or not records[name] or (arguments.again and not right):
            records[name] = records_of(name)
            write(records)
            for record in records[name]:
                print(name, record["options"], record["share"], record["verdict"], flush=True)
        if time.time() - start > 60 * arguments.limit_minutes:
            break


if __name__ == "__main__":
    main()
