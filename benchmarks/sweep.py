"""Every architecture of transformers from a small configuration, trained plain and planned side by side; some small
models of timm and torchvision, too, where these are installed (`pip install -e .[sweep]`).

    python -m benchmarks.sweep [--stages mid smallest default] [--only bert gpt2] [--again] [--limit-minutes 60]

Each has a process of its own with a time limit, on one thread of the CPU. The first run of what was planned is compared
as well as later ones. Results are written after each, so that a run
goes on where the last one stopped; `--again` repeats what is not right. docs/sweep.md is made from the result file.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import time
import warnings
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.update({"MEMOPT_PLAN": "always", "MEMOPT_CACHE": "0"})

import torch
import torch._inductor.compile_fx

from benchmarks.small_architectures import class_name, names, source_of, task_of
from benchmarks.stamp import stamp, write_result
from benchmarks.sweep_trial import STAGES, trial
from examples.models.random_reference import CONDITIONED
from examples.models.twins import ROUNDING

RESULT = Path(__file__).parent / "results" / "sweep.json"
PAGE = Path(__file__).parent.parent / "docs" / "sweep.md"
LIMIT_SECONDS = {"mid": 240, "smallest": 240, "default": 480, "inductor": 1200}
"""The time limit for each stage of one architecture: inductor calls a C++ compiler."""
ORDER = ("not built", "error not ours", "wrong", "over budget", "refused", "rounding", "right")
"""Verdicts, the worst first."""


def verdict(record: dict[str, Any]) -> str:
    """Return the worst verdict among the stages of a record."""
    found = [record["verdict"]] if "verdict" in record else []
    found += [record[stage]["verdict"] for stage in STAGES if stage in record]
    return min(found, key=ORDER.index)


def isolated(name: str, stages: list[str]) -> dict[str, Any]:
    """Return the record of `trial`, run in a process of its own that is ended at the time limit."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, name, stages))
    process.start()
    sender.close()
    limit = sum(LIMIT_SECONDS[stage] for stage in stages)
    record: dict[str, Any] = {"verdict": "error not ours", "message": f"no result within {limit} s"}
    try:
        if receiver.poll(limit):
            record = receiver.recv()
    except EOFError:
        process.join(10)
        record = {"verdict": "error not ours", "message": f"the process ended with code {process.exitcode}"}
    process.kill()
    process.join()
    return record


def _send(sender: Connection, name: str, stages: list[str]) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    sender.send(trial(name, stages))


def known() -> dict[str, Any]:
    return json.loads(RESULT.read_text())["architectures"] if RESULT.exists() else {}


def to_do(records: dict[str, Any], only: list[str], stages: list[str], again: list[str]) -> list[tuple[str, list[str]]]:
    """Return what is left to run: names with the stages that have no result, or one of the verdicts in `again`."""
    left = []
    for name in only or names():
        record = records.get(name, {})
        whole = record.get("verdict", "")
        if whole and not only and whole not in again:
            continue
        found = {stage: record.get(stage, {}).get("verdict") for stage in stages}
        missing = [stage for stage in stages if only or whole or found[stage] in (None, *again)]
        if missing:
            left.append((name, missing))
    return left


def write(records: dict[str, Any]) -> None:
    write_result(RESULT, {**stamp(), "architectures": records})
    PAGE.write_text(page(records), encoding="utf-8")


def predictions(compared: list[dict[str, Any]]) -> list[str]:
    """A table of how far predicted peaks are from measured ones. A prediction has a reserve of a fixed size in it,
    which is left out above the measured peak: it is up to 1% of these small models."""
    share = {"below the measured peak": 0, "above it, by less than the reserve": 0}
    bounds = {"0 to 1% above it beside the reserve": 0.01, "1 to 5%": 0.05, "more": float("inf")}
    share |= dict.fromkeys(bounds, 0)
    for found in compared:
        if found["over"] < 0:
            name = "below the measured peak"
        elif found["over_less_reserve"] < 0:
            name = "above it, by less than the reserve"
        else:
            name = next(name for name, bound in bounds.items() if found["over_less_reserve"] <= bound)
        share[name] += 1
    head = ["| predicted peak | runs |", "|---|---|"]
    return [*head, *(f"| {name} | {count} |" for name, count in share.items())]


def page(records: dict[str, Any]) -> str:
    """Return docs/sweep.md: how many of each verdict, and a row for every architecture that is not right."""
    counts = Counter(verdict(record) for record in records.values())
    compared = [record[stage] for record in records.values() for stage in STAGES if "over" in record.get(stage, {})]
    lines = [
        "# The sweep", "",
        "Every architecture of transformers that trains from a small configuration, and image models of timm and",
        "torchvision, with random weights, plain and planned side by side: `make sweep`, which goes on where it",
        "stopped; figures in `benchmarks/results/sweep.json`. Stages: `mid` and `smallest` are exact (fp32, recompute",
        "and reinplace), half-way between the smallest budget and the plain peak, and at the smallest; `inductor` is",
        "`mid` through inductor with eager mode's random numbers, right but for rounding, and judged in fp64 where",
        "fp32 is further off; `default` takes the default options half-way, and is right where losses are within 5%",
        "of fp32's, or the first gradients within 1.5 times `torch.autocast`'s difference. Two steps of AdamW and one",
        "with accumulation; losses, gradients, buffers, parameters and the next random numbers are compared bitwise.",
        f"Rounding is {ROUNDING:.0e} of the largest value of each; where the plan names it, {CONDITIONED:.0f} times",
        "the difference of the plain model from one whose weights are one unit in the last place larger.",
        "",
        "Run so far: " + ", ".join(f"{sum(s in r for r in records.values())} of {s}" for s in STAGES) + ".", "",
        f"{len(records)} tried.", "",
        "| verdict | architectures |", "|---|---|",
        *(f"| {name} | {counts[name]} |" for name in reversed(ORDER)), "",
        *predictions(compared), "",
        "## Not right", "",
        "| architecture | class | stage | verdict | why | aot_eager |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, record in sorted(records.items()):
        stages = {stage: record[stage] for stage in STAGES if stage in record} or {"": record}
        for stage, found in stages.items():
            if found["verdict"] != "right":
                cells = (name, class_name(name) or "", stage, found["verdict"], why(found), record.get("aot_eager", ""))
                lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    in_fp64 = {
        name: record["inductor"]["fp64_difference"]
        for name, record in sorted(records.items())
        if "fp64_difference" in record.get("inductor", {})
    }
    if in_fp64:
        lines += [
            "", "Through inductor further from eager mode than rounding in fp32, and judged in fp64: "
            + ", ".join(f"{name} ({apart:.1e})" for name, apart in in_fp64.items()) + ".",
        ]  # fmt: skip
    right = sorted(name for name, record in records.items() if verdict(record) == "right")
    return "\n".join([*lines, "", "## Right", "", ", ".join(right) + ".", ""])


def why(found: dict[str, Any]) -> str:
    if "message" in found:
        return found["message"]
    if found["verdict"] == "over budget":
        return f"{found['measured_mb']:.3f} of {found['budget_mb']:.3f} MB"
    difference = found.get("difference", found.get("accumulation_difference", 0.0))
    return f"{difference:.1e}: {found.get('at', found.get('accumulation_at', ''))}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=["mid"])
    parser.add_argument("--only", nargs="+", default=[], help="model types of transformers")
    parser.add_argument("--again", nargs="*", metavar="VERDICT", help="repeat these verdicts (all but right ones)")
    parser.add_argument("--limit-minutes", type=float, default=float("inf"))
    parser.add_argument("--list", action="store_true", help="only say what would be run")
    arguments = parser.parse_args()
    again = list(ORDER[:-2]) if arguments.again == [] else arguments.again or []
    records, start = known(), time.time()
    for name, stages in to_do(records, arguments.only, arguments.stages, again):
        if arguments.list:
            print(f"{name}: {class_name(name)}, {task_of(name).lower()}, {' '.join(stages)}")
            continue
        if time.time() - start > 60 * arguments.limit_minutes:
            break
        source_of(name)
        found = isolated(name, stages)
        before = {stage: value for stage, value in records.get(name, {}).items() if stage in STAGES}
        records[name] = {**before, **found}
        write(records)
        print(f"{name}: {verdict(found)}", json.dumps(found)[:600], flush=True)


if __name__ == "__main__":
    main()
