"""Every differentiable operator and module of torch's own test databases in a small module, trained plain and planned.

    python -m benchmarks.opinfo [--dtypes float32] [--stages loss smallest] [--only svd] [--again] [--limit-minutes 9]

Operators run in batches, each in a process of its own. Results are written after each operator, so that a run goes
on where the last one stopped; `--again` repeats what is not right. docs/opinfo.md is made from the result file.
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
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.update({"MEMOPT_PLAN": "always", "MEMOPT_CACHE": "0"})

import torch
import torch._inductor.compile_fx
from torch.testing._internal.autograd_function_db import autograd_function_db
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.custom_op_db import custom_op_db

from benchmarks.stamp import stamp, write_result
from examples.models.operator_trials import STAGES, ModuleOperator, trial

RESULT = Path(__file__).parent / "results" / "opinfo.json"
PAGE = Path(__file__).parent.parent / "docs" / "opinfo.md"
DTYPES = ("float32", "float64", "complex64")
LIMIT_SECONDS = 90
"""The time limit for one operator."""
BATCH = 24
"""How many operators one process takes."""
ORDER = ("no case", "error not ours", "wrong", "refused", "rounding", "rounding, named", "right")
MEANING = {
    "right": "loss, results, gradients, their strides and the generator's state are those of the plain model",
    "rounding": "bits differ, by less than 1e-5 of the largest value",
    "rounding, named": "as rounding, and the notes of the plan name the operator",
    "refused": "refused with a reason, before a step was taken",
    "wrong": "other values, strides or random numbers",
    "error not ours": "ends in an error that is not memopt's",
    "no case": "nothing to compare: the plain module fails, gives other numbers each time, or takes no gradient",
}

INTRODUCTION = """# Operators

Every operator of torch's OpInfo database (`common_methods_invocations`, `custom_op_db`, `autograd_function_db`) that
supports gradients, and every module of `common_modules`, in a small module whose operands and results lie between
operators that save them. Two samples of each or more: everything recomputed that may be (all outputs: with all results
returned; loss: with the loss alone; in place: where the operator has such a form; transposed: with operands whose
dimensions lie in memory in reverse order; derivative: with a loss of the operator's derivatives, where it has second
ones), and the smallest budget; precision fp32, recompute and reinplace. Loss, results, gradients, buffers, all their
strides and the state of the generator are compared with the plain module's, bit by bit, in the first run of what was
planned, which torch may run in another way, and in a second one.
`python -m benchmarks.opinfo` goes on where it stopped; figures in `benchmarks/results/opinfo.json`."""

Record = dict[str, Any]


def operators() -> dict[str, Any]:
    """The operators and modules of torch's databases that support gradients, by name and variant."""
    found: dict[str, Any] = {}
    for op in [*op_db, *autograd_function_db, *custom_op_db]:
        if op.supports_autograd:
            found.setdefault(f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name, op)
    return found | {info.name: ModuleOperator(info) for info in module_db}


Task = tuple[str, str, tuple[str, ...], int]
"""An operator, a dtype, the stages to run, and how many samples to take."""


def run_batch(sender: Connection, tasks: list[Task]) -> None:
    """Send for each operator and dtype the record of its trial."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    ops = operators()
    for name, dtype, stages, most_samples in tasks:
        sender.send(trial(ops[name], getattr(torch, dtype), stages, most_samples))


def records_of(tasks: list[Task]) -> Iterator[tuple[Task, Record]]:
    """Run tasks one after another, and go on with a new process after a batch, a crash or the time limit."""
    context = multiprocessing.get_context("fork")
    while tasks:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=run_batch, args=(sender, tasks[:BATCH]))
        process.start()
        sender.close()
        for _ in range(min(BATCH, len(tasks))):
            failure = ""
            try:
                record = receiver.recv() if receiver.poll(LIMIT_SECONDS) else None
                failure = f"no result within {LIMIT_SECONDS} s"
            except EOFError:
                process.join(10)
                record, failure = None, f"the process ended with code {process.exitcode}"
            yield (
                tasks.pop(0),
                record if record is not None else {"": {"verdict": "error not ours", "message": failure}},
            )
            if record is None:
                break
        process.kill()
        process.join()


def known() -> dict[str, Record]:
    """The records in the result file by operator and dtype. Those that are equal are written once, under all names."""
    groups = json.loads(RESULT.read_text())["records"] if RESULT.exists() else []
    return {name: group["record"] for group in groups for name in group["operators"]}


def merged(before: Record, record: Record, stages: tuple[str, ...]) -> Record:
    """The part of a record that is written: the stages that were run, the number of right cases, and all cases that are
    not.

    Cases of stages that were run before are kept from `before`."""
    cases = {name: case for name, case in before.get("cases", {}).items() if name and not name.endswith(stages)}
    right = {stage: count for stage, count in before.get("right", {}).items() if stage not in stages}
    for name, case in record.items():
        stage = name.rpartition(", ")[2]
        if case["verdict"] == "right":
            right[stage] = right.get(stage, 0) + 1
        else:
            cases[name] = case
    compared = {name: case for name, case in cases.items() if case["verdict"] != "no case"}
    found = [case["verdict"] for case in compared.values()] + ["right"] * bool(right)
    worst = min(found, key=ORDER.index, default="no case")
    cases = compared if found else dict(list(cases.items())[:1])
    known = [stage for stage in STAGES if stage in stages or stage in before.get("stages", ())]
    return {"verdict": worst, "stages": known, "right": right, "cases": cases}


def write(records: dict[str, Record]) -> None:
    records = dict(sorted(records.items()))
    groups: dict[str, list[str]] = {}
    for name, record in records.items():
        groups.setdefault(json.dumps(record, sort_keys=True), []).append(name)
    grouped = [{"operators": names, "record": records[names[0]]} for names in groups.values()]
    write_result(RESULT, {**stamp(), "records": grouped})
    PAGE.write_text(page(records), encoding="utf-8")


def page(records: dict[str, Record]) -> str:
    """Return docs/opinfo.md: how many of each verdict, and a row for every operator that is not right."""
    lines = [
        *INTRODUCTION.splitlines(), "",
        "| verdict | " + " | ".join(DTYPES) + " | meaning |", "|---" * (2 + len(DTYPES)) + "|",
    ]  # fmt: skip
    counts = Counter((name.rpartition(" ")[2], record["verdict"]) for name, record in records.items())
    for name in reversed(ORDER):
        lines.append(f"| {name} | {' | '.join(str(counts[dtype, name]) for dtype in DTYPES)} | {MEANING[name]} |")
    cases = Counter(stage for record in records.values() for stage in Counter(record["right"]).elements())
    told = ", ".join(f"{cases[stage]} of {stage}" for stage in STAGES)
    lines += ["", f"Cases that are right: {told}.", "", "## Not right", ""]
    lines += ["| operator | case | verdict | why | aot_eager |", "|---|---|---|---|---|"]
    for name, record in records.items():
        for case, found in record["cases"].items():
            if found["verdict"] != "no case":
                cells = (name, case, found["verdict"], found.get("message", ""), found.get("aot_eager", ""))
                lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    lines += ["", "## No case", "", "| operator | why |", "|---|---|"]
    for name, record in records.items():
        if record["verdict"] == "no case":
            why = next(iter(record["cases"].values()))["message"].replace("|", "\\|")
            lines.append(f"| {name} | {why} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["float32"])
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--samples", type=int, default=2, help="how many samples of an operator to take")
    parser.add_argument("--only", nargs="+", default=[], help="operators, with or without their variant")
    parser.add_argument("--again", nargs="*", metavar="VERDICT", help="repeat these verdicts (all but right ones)")
    parser.add_argument("--limit-minutes", type=float, default=float("inf"))
    arguments = parser.parse_args()
    again = list(ORDER[1:-1]) if arguments.again == [] else arguments.again or []
    records, start = known(), time.time()
    tasks: list[Task] = []
    for dtype in arguments.dtypes:
        for name, op in operators().items():
            before = records.get(f"{name} {dtype}", {})
            wanted = not arguments.only or name in arguments.only or op.name in arguments.only
            repeat = arguments.only or before.get("verdict") in again
            stages = tuple(stage for stage in arguments.stages if repeat or stage not in before.get("stages", ()))
            if wanted and stages and op.supports_dtype(getattr(torch, dtype), "cpu"):
                tasks.append((name, dtype, stages, arguments.samples))
    for (name, dtype, stages, _), record in records_of(tasks):
        key = f"{name} {dtype}"
        records[key] = merged(records.get(key, {}), record, stages)
        write(records)
        print(f"{key}: {json.dumps(records[key])[:700]}", flush=True)
        if time.time() - start > 60 * arguments.limit_minutes:
            break


if __name__ == "__main__":
    main()
