"""The tables of docs/results.md on trainings with several ranks."""

from __future__ import annotations

from benchmarks.report_tables import Document, number, percent, source, table


def fully_sharded(document: Document) -> str:
    rows = [
        (row["model"], str(row["ranks"]), row["sharding"], row["way"], number(row.get("budget_gb"), 4),
         number(row.get("predicted_gb"), 4), ", ".join(number(peak, 4) for peak in row.get("peaks_gb", ())),
         f"{row['difference']:.0e}" if "difference" in row else "–", percent(row.get("more_flops")),
         percent(row.get("added_time")),
         number(row.get("gathers"), 0))
        for row in document["rows"]
    ]  # fmt: skip
    words = (
        "FSDP2 by block and at the root on ranks that are processes of one machine, whole steps with AdamW. "
        "Shards: of parameters in fp32; of such that are gathered in bf16, with gradients reduced in fp32; and over "
        "two of four ranks, the others holding the same (HSDP). "
        "Difference: the largest of any loss or gradient to plain FSDP2's, as a part of its tensor's largest value. "
        "The last budget of each is the peak of checkpoints at every block. Gathers: of one step, where they were "
        "counted; a plan keeps blocks gathered until their backward where it has room. Exchanges wait until gloo's "
        "threads have let go of their tensors, since a buffer that is freed by one of these is not seen by the meter."
    )
    head = ("model", "ranks", "shards", "way", "budget GB", "predicted", "peaks of the ranks", "difference",
            "more operations", "added time", "gathers")  # fmt: skip
    return f"{words}\n\n{table(head, rows)}\n\n{source(document)}"


def rank_failures(document: Document) -> str:
    """Return the tables of failures on one rank, and of runs that went on with another number of ranks."""
    faults = [
        (row["way"], row["fault"], ", ".join(map(str, row["codes"])), number(row["until_error_s"], 1),
         number(row["until_gone_s"], 1), "; ".join(row["errors"]))
        for row in document["faults"]
    ]  # fmt: skip
    resumed = [
        (row["way"], *map(str, row["ranks"]), ", ".join(map(str, row["codes"])), f"{row['difference']:.0e}")
        for row in document["resumed"]
    ]
    words = (
        "A GPT-2 of 100 MB on gloo ranks that are processes of one machine. All ranks are given too little memory, or "
        "rank 1 has another budget, claims another version of torch, gets a batch eight times as large in the fourth "
        "step, or is killed there. Error after: from the beginning of the failing call to the first error, or to the "
        "kill. Gone after: from then until no process is left."
    )
    head = ("way", "fault", "exit codes", "error after, s", "gone after, s", "error, on every rank that raises")
    later = (
        "Killed in the fourth step, and resumed from the checkpoint of the second on as many, more or fewer ranks. "
        "Difference: the largest of a loss to those of plain PyTorch on the first number of ranks, never interrupted."
    )
    columns = ("way", "ranks before", "ranks after", "exit codes of the killed run", "difference")
    return f"{words}\n\n{table(head, faults)}\n\n{later}\n\n{table(columns, resumed)}\n\n{source(document)}"
