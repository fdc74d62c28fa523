"""The tables of plans for clusters: what one card holds and takes, and torchtitan's figures beside the predicted."""

from __future__ import annotations

from typing import Any

from benchmarks.report_tables import Document, number, percent, source, table


def clusters(document: Document) -> str:
    """Both tables of `benchmarks.cluster`."""
    words = (
        "Llama 3.1 at 8,192 tokens on H100 of 80 GB over NVLink 4 and InfiniBand NDR, by `memopt.plan` with "
        "recomputation as the only lever; no card was there. Static: shards of parameters, gradients and "
        "AdamW's state; "
        "gathered: whole parameters and gradients in flight; nothing recomputed: the peak of that, with the blocks "
        "that the plan keeps gathered. Times are those of the time model, which takes it that products reach "
        "80% of the data sheet's peak: published steps take longer (below). What is assumed, and from where, is in "
        "[Clusters](cluster.md)."
    )
    return "\n\n".join((words, _planned(document), _published(document), source(document)))


def _planned(document: Document) -> str:
    head = ("model", "cards", "mesh", "sequences", "static GB", "gathered GB", "peak GB", "nothing recomputed",
            "added time", "step s", "tokens/s a card", "bound")  # fmt: skip
    return table(head, [_row(row) for row in document["clusters"]])


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    cards = 1
    for size in row["mesh"].values():
        cards *= size
    first = (row["model"], f"{cards:,}", _mesh(row["mesh"]), f"{row['samples']}",
             number(row["static_gb"], 1), number(row["gathered_gb"], 1))  # fmt: skip
    if "smallest_gb" in row:
        return (*first, f"needs {row['smallest_gb']:.1f}", *("–",) * 5)
    bound = next(iter(row["bounds"]))
    share = row["bounds"][bound] / row["seconds"]
    figures = (number(row["peak_gb"], 1), number(row["plain_gb"], 1), percent(row["added_time"]))
    return (*first, *figures, number(row["seconds"]), f"{row['tokens_per_second']:,.0f}", f"{bound} {share:.0%}")


def _mesh(mesh: dict[str, int]) -> str:
    return " × ".join(f"{name} {size}" for name, size in mesh.items() if size > 1)


def _published(document: Document) -> str:
    words = (
        "torchtitan's own figures (benchmarks/llama3_h100_202412_torchtitan.md, H100 of 96 GB), the most that torch's "
        "allocator reserved, beside what is predicted for the same recipe in plain operators: one stream's blocks, and "
        "beside them those that are kept for FSDP2's other streams and the copy that torch's parallel loss makes."
    )
    rows = [
        (row["model"], _mesh(row["mesh"]), f"{row['samples']}", row["recipe"], row["technique"],
         number(row["published_gib"], 1), number(row["predicted_gib"], 1), number(row["of_them_beside_the_stream"], 1),
         f"{row['difference']:+.1%}", f"{row['published_tokens_per_second']:,.0f}",
         f"{row['predicted_tokens_per_second']:,.0f}")
        for row in document["published"]
    ]  # fmt: skip
    head = ("model", "mesh", "sequences", "recomputed", "technique", "published GiB", "predicted", "of it beside",
            "difference", "published tokens/s", "predicted")  # fmt: skip
    return f"{words}\n\n{table(head, rows)}"
