"""The tables of docs/results.md on bytes and budgets on a card, and on versions of Python and torch."""

from __future__ import annotations

from typing import Any

from benchmarks.report_tables import Document, number, source, table

TRAINED = {
    "loop": "bf16",
    "fp16": "fp16, GradScaler",
    "microbatches": "bf16, 4 microbatches",
}
"""How models are trained; else in bf16 with the lever that is named."""

ADAMW = {"adamw": "foreach", "fused": "fused"}
"""The kernels of the optimizer, by its name in the result file."""


def card_bytes(document: Document) -> str:
    rows = []
    for job in document["jobs"]:
        budgets = [dict(zip(document["figures"], row, strict=True)) for row in job["rows"]]
        ran = [one for one in budgets if one["share"] is not None]
        below = [one for one in budgets if one["share"] is None]
        off = [one["predicted_gb"] / one["allocated_gb"] - 1 for one in ran if one["allocated_gb"]]
        rows.append(
            (job["model"], ADAMW[job["optimizer"]], job["backend"] + ", expandable" * job["expandable"],
             TRAINED.get(job["way"], job["way"]), *(number(_budget(ran, share)) for share in (0.0, 1.0)),
             f"{min(off):+.2%} to {max(off):+.2%}" if off else "–",
             " ".join(str(one["capped_steps"]) for one in ran), _refused(below))
        )  # fmt: skip
    head = ("model", "AdamW", "backend", "trained in", "smallest GB", "plain GB", "predicted above allocated",
            "capped steps", "half a percent below the smallest")  # fmt: skip
    words = """Whole steps at real sizes, on a stand-in for an H200 (docs/card.md): bytes are those of a card, times are
not. Each of the budgets, from the smallest to the plain step's peak, is trained in for 20 steps by a process that may
hold the budget less the context and nothing else; what the plan predicts is set beside
`torch.cuda.max_memory_allocated`."""
    return f"{words}\n\n{table(head, rows)}\n\n{source(document)}"


def named_on_card(document: Document) -> str:
    rows = []
    for name in dict.fromkeys(row["model"] for row in document["rows"]):
        mine = [row for row in document["rows"] if row["model"] == name]
        first, *others, last = mine
        off = [row["predicted_gb"] / row["allocated_gb"] - 1 for row in mine if row.get("allocated_gb")]
        above = f"{min(off):+.2%} to {max(off):+.2%}" if off else "–"
        rows.append((name, _tried(first), ", ".join(map(_tried, others)), _tried(last), above))
    head = ("model", "named at first, and tried", "three other budgets", "named then, and tried",
            "predicted above allocated")  # fmt: skip
    words = """Vision models at real sizes on a stand-in for an H200 (docs/card.md), in bf16 with the fused AdamW, by
plain operators: the figure that a refusal names is taken at once, in a process that has no more; then three other
budgets are trained in, and what a second refusal names. In brackets the steps that ran, of 8."""
    return f"{words}\n\n{table(head, rows)}\n\n{source(document)}"


def _tried(row: dict[str, Any]) -> str:
    """A budget and the steps that ran."""
    failure = f", {row['failure'].partition(':')[0]}" if row["failure"] else ""
    return f"{row['budget_gb']:.4g} GB ({row['steps']}{failure})"


def _budget(records: list[dict[str, Any]], share: float) -> float | None:
    return next((one["budget_gb"] for one in records if one["share"] == share), None)


def _refused(records: list[dict[str, Any]]) -> str:
    """Whether the budget below the smallest was refused, and after how many seconds."""
    if not records:
        return "–"
    (record,) = records
    if record["failure"].startswith("BudgetError"):
        return f"refused after {record['plan_seconds']:.0f} s"
    return "not refused"


def versions(document: Document) -> str:
    pairs = {(row["torch"], row["python"]): row for row in document["pairs"]}
    pythons = list(dict.fromkeys(row["python"] for row in document["pairs"]))
    rows = [
        (torch, *(_cell(pairs.get((torch, python))) for python in pythons))
        for torch in dict.fromkeys(row["torch"] for row in document["pairs"])
    ]
    return f"{table(('torch', *(f'Python {python}' for python in pythons)), rows)}\n\n{source(document)}"


def _cell(row: dict[str, Any] | None) -> str:
    """The counts of the tests under one pair."""
    if row is None:
        return "not run"
    if "not_run" in row:
        return f"not run: {row['not_run']}"
    failed = row.get("failed", 0) + row.get("error", 0) + row.get("errors", 0)
    counts = f"{row.get('passed', 0):,} passed, {row.get('skipped', 0)} skipped"
    return counts + (f", **{failed} failed**" if failed else "") + ("" if row["tests"] == "tests" else " (a selection)")
