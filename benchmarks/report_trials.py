"""The tables of docs/results.md on random models and on abuse."""

from __future__ import annotations

from benchmarks.report_tables import Document, source, table

MEANINGS = {
    "right": "all numbers bitwise the plain model's (through inductor: to rounding), memory within the budget",
    "rounding, named": "equal to rounding, and the plan names the operator",
    "rounding": "equal to rounding, and the plan does not say so",
    "wrong": "other numbers",
    "over budget": "measured memory above the budget",
    "budget refused": "refused within a budget that is not below the smallest",
    "refused": "refused with a reason",
    "error not ours": "an error that is no refusal",
    "plain fails": "the plain model fails, or gives other numbers each time",
}
PARTS = {"mutations": "plan files damaged", "kills": "runs killed, or out of disk", "shapes": "steps of other shapes"}


def fuzz(document: Document) -> str:
    counts = document["counts"]
    rows = [(verdict, str(counts[verdict]), meaning) for verdict, meaning in MEANINGS.items() if verdict in counts]
    seeds = ", ".join(f"{first} to {last}" for first, last in document["seeds"])
    said = f"{document['cases']} cases of the seeds {seeds}, in {document['seconds'] / 3600:.1f} hours."
    return f"{said}\n\n{table(('verdict', 'cases', 'meaning'), rows)}\n\n{source(document)}"


def abuse(document: Document) -> str:
    rows = [
        (words, str(document[part]["seeds"]), str(len(document[part]["bad"])))
        for part, words in PARTS.items()
        if part in document
    ]
    return f"{table(('what', 'tried', 'corrupt, lost or growing'), rows)}\n\n{source(document)}"
