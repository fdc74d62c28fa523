"""The figures of `benchmarks/results/` as the tables of docs/results.md.

    python -m benchmarks.report [--check]

Writes the page. `--check` writes nothing and fails where the page is not what the result files say.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean

from benchmarks.report_card import card_bytes, named_on_card, versions
from benchmarks.report_cluster import clusters
from benchmarks.report_ranks import fully_sharded, rank_failures
from benchmarks.report_tables import Document, number, percent, source, table
from benchmarks.report_trials import abuse, fuzz

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parent.parent / "docs" / "results.md"
INTRODUCTION = """# Results

Written by `python -m benchmarks.report` from `benchmarks/results/`: do not edit. Each table names the command that
measured it, the day and the machine. GB are of 1024³ bytes where nothing else is said. Nothing here has been measured
on a GPU; one table is of a stand-in for one, and says so."""


def frontier(document: Document) -> str:
    models = list(document.values())
    head = ("model", "operators", "plain peak", "smallest", "added at 50%", "its bound", "torch's", "per block",
            "beaten by a peer", "median s")  # fmt: skip
    rows = []
    for record in models:
        half = record["points"][2]
        columns = (half["memopt"], half["bound"], half["torch"], half["per_block"])
        rows.append(
            (record["model"], str(record["ops"]), number(record["save_all_gb"]), number(record["smallest_gb"]),
             *(number(value, 1) for value in columns), f"{record['beaten']} of {record['budgets']}",
             number(record["median_seconds"]))
        )  # fmt: skip
    words = """Added time in percent of a step in bfloat16, on 553 TFLOP/s and 4.3 TB/s, at the budget nearest to
half-way between the smallest peak and the plain one; GB of 10⁹ bytes. "torch's" is the best of its partitioner's
solvers within that budget, "per block" checkpointing of each block. "Beaten" counts the budgets at which any other
method is faster."""
    latest = {**models[0], "command": "python -m benchmarks.frontier"}
    return f"{words}\n\n{table(head, rows)}\n\n{source(latest)}"


def exact(document: Document) -> str:
    rows = document["rows"]
    proven = [row for row in rows if row["proven"] and None not in (row["exact"], row["memopt"])]
    gaps = [row["memopt"] - row["exact"] for row in proven]
    figures = [
        ("graphs with a proven budget", len({row["graph"] for row in proven})),
        ("budgets, and proven ones", f"{len(rows)}, {len(proven)}"),
        ("within 0.1 points of the optimum", f"{sum(gap <= 0.1 for gap in gaps)} of {len(gaps)}"),
        ("most above the optimum", f"{max(gaps):.2f} points"),
        ("feasible budgets missed", sum(row["missed"] for row in rows)),
    ]
    body = table(("the default effort against exact search", ""), [(name, str(value)) for name, value in figures])
    return f"{body}\n\n{source(document)}"


def growth(document: Document) -> str:
    rows = [
        (str(row["layers"]), str(row["ops"]), number(row["smallest_seconds"]), number(max(row["seconds"])))
        for row in document["rows"]
    ]
    return f"{table(('layers of GPT-2', 'operators', 's, smallest', 's, slowest budget'), rows)}\n\n{source(document)}"


def families(document: Document) -> str:
    rows = []
    for name in dict.fromkeys(run["family"] for run in document["runs"]):
        runs = [run for run in document["runs"] if run["family"] == name]
        ratios = [run["predicted_mb"] / run["measured_mb"] for run in runs]
        worst = max(run["largest_difference"] for run in runs)
        half = next(run for run in runs if run["share"] == 0.5)
        rows.append(
            (name, f"{runs[0]['budget_mb']:.1f}", f"{runs[-1]['budget_mb']:.1f}", percent(half["added_time"]),
             percent(half["bound"]), f"{min(ratios):.4f} to {max(ratios):.4f}",
             f"{worst:.0e}" if worst else "bitwise equal")
        )  # fmt: skip
    head = (
        "family",
        "plain MB",
        "smallest MB",
        "added at half",
        "bound",
        "predicted / measured",
        "gradients off by",
    )
    words = "Small models of fourteen kinds, fp32, recomputation alone, seven budgets each, measured on the CPU."
    return f"{words}\n\n{table(head, rows)}\n\n{source(document)}"


def total_budget(document: Document) -> str:
    rows = [
        (row["model"], number(row["budget_gb"]), percent(row["share"]), row["outcome"], " ".join(row["levers"]) or "–",
         number(row["predicted_gb"], 3), number(row["measured_gb"], 3), percent(row["added_time"]))
        for row in document["rows"]
    ]  # fmt: skip
    head = ("model", "budget GB", "of the plain step", "outcome", "levers beside recompute", "predicted", "measured",
            "added")  # fmt: skip
    return f"Whole steps with AdamW, measured on the CPU.\n\n{table(head, rows)}\n\n{source(document)}"


def account(document: Document) -> str:
    rows = []
    for name in dict.fromkeys(run["model"] for run in document["runs"]):
        runs = [run for run in document["runs"] if run["model"] == name]
        peaks = [run["rows"]["peak of the step"] for run in runs]
        ratios = [predicted / measured for predicted, measured in peaks]
        kept = sum(run["holds"] for run in runs)
        rows.append((name, f"{kept} of {len(runs)}", f"{min(ratios):.4f} to {max(ratios):.4f}"))
    words = "Six optimizers in three ways each: the account's rows within 2%, the peak within 1% and never too low."
    head = ("model", "steps that hold", "predicted / measured peak")
    return f"{words}\n\n{table(head, rows)}\n\n{source(document)}"


def step_time(document: Document) -> str:
    rows = [
        (row["model"], percent(row["share"]), *(number(row[f"{name}_ms"], 0) for name in ("table", "calibrated")),
         number(row["measured_ms"], 0))
        for row in document["rows"]
    ]  # fmt: skip
    head = ("model", "of the plain activations", "by the table, ms", "calibrated, ms", "measured, ms")
    return f"{table(head, rows)}\n\n{source(document)}"


def precision(document: Document) -> str:
    rows = [
        (row["model"], *(number(row[way]["bytes"] / 2**30) for way in ("autocast", "memopt")),
         *(str(row[way]["casts"]) for way in ("autocast", "memopt")),
         *(number(row[f"{way}_error"], 5) for way in ("autocast", "memopt")))
        for row in document["models"].values()
    ]  # fmt: skip
    head = ("model", "autocast saves, GB", "memopt saves, GB", "casts", "casts", "gradient error", "gradient error")
    words = "Saved bytes and casts at real dimensions for an H100; gradient errors of small models, on the CPU."
    return f"{words}\n\n{table(head, rows)}\n\n{source(document)}"


def learning(document: Document) -> str:
    rows = []
    for task, mode in dict.fromkeys((curve["task"], curve["mode"]) for curve in document["curves"]):
        curves = [curve for curve in document["curves"] if (curve["task"], curve["mode"]) == (task, mode)]
        losses = [curve["losses"][-1] for curve in curves]
        accuracy = mean(curve["accuracies"][-1] for curve in curves)
        spread = f"{min(losses):.3f} to {max(losses):.3f}"
        rows.append((task, mode, number(mean(losses), 3), spread, number(accuracy, 4)))
    head = ("task", "trained in", "held-out loss, mean", "of the seeds", "accuracy, mean")
    return f"Three seeds each.\n\n{table(head, rows)}\n\n{source(document)}"


def fp8(document: Document) -> str:
    full = document["kept"][0]["kept_gb"]
    kept = [
        (row["mode"], number(row["kept_gb"]), percent(1 - row["kept_gb"] / full), number(row["step_ms"], 0))
        for row in document["kept"]
    ]
    trained = [
        (row["mode"], number(row["loss"], 4), number(row["loss_ratio"], 4), number(row["held_out"], 4))
        for row in document["trained"]
    ]
    head = ("mode", "saved for the backward, GB", "less", "predicted step, ms")
    words = "Llama 3.2 1B, 4 × 2,048 tokens, planned for an H100; then a small Llama, trained for 200 steps on a CPU."
    losses = table(("mode", "loss, last 20 steps", "of bf16's", "held-out loss"), trained)
    return f"{words}\n\n{table(head, kept)}\n\n{losses}\n\n{source(document)}"


def chunked_loss(document: Document) -> str:
    rows = [
        (name, str(row["tokens"]), number(row["plain_loss_mb"], 0), number(row["chunked_loss_mb"], 0),
         number(row["plain_peak_mb"], 0), number(row["later_peak_mb"], 0), f"{row['gradient_error']:.0e}")
        for name, row in document["sizes"].items()
    ]  # fmt: skip
    head = ("layer", "tokens", "plain, MB", "chunked, MB", "peak with the layer's gradient", "chunked",
            "gradient error")  # fmt: skip
    return f"{table(head, rows)}\n\n{source(document)}"


def articles(document: Document) -> str:
    rows = [
        (name, row["step"], number(row["peak_gb"], 1), percent(row["added_time"]))
        for name, steps in document["articles"].items()
        for row in steps
    ]
    words = """Planned for an H100; GB of 10⁹ bytes without the CUDA context, as in the articles that
`benchmarks/articles.py` names."""
    return f"{words}\n\n{table(('model', 'step', 'peak GB', 'added'), rows)}\n\n{source(document)}"


def vit_finetune(document: Document) -> str:
    rows = [
        (row["recipe"], row["method"], str(row["batch"]), number(1024 * row["peak_gb"], 1), number(row["step_ms"], 0))
        for row in document["rows"]
    ]
    head = ("step of the article", "by", "batch", "peak MB", "step ms")
    return f"A small ViT on the CPU.\n\n{table(head, rows)}\n\n{source(document)}"


def planning(document: Document) -> str:
    small = [
        (str(row["layers"]), number(row["plan_s"], 1), number(row["whole_s"], 1), number(row["aot_eager_s"], 1),
         number(row["second_size_s"], 1), number(row["second_size_planned_s"], 1))
        for row in document["rows"] if "layers" in row
    ]  # fmt: skip
    large = [
        (row["model"], *(number(row[name], 1) for name in ("plan_s", "refusal_s", "aot_eager_s")),
         number(row["plan_s"] / row["aot_eager_s"]), number(row["refusal_s"] / row["plan_s"]),
         f"{row['added_time']:.1%}")
        for row in document["rows"] if "model" in row
    ]  # fmt: skip
    of_small = (
        "layers",
        "plan",
        "plan, each block traced",
        "aot_eager",
        "a second size",
        "the same, all calls planned",
    )
    of_large = ("model", "plan", "refusal", "aot_eager", "plan / aot_eager", "refusal / plan", "added time")
    return (
        "CPU seconds, one thread; `aot_eager`: the first step under `torch.compile` with that backend. First GPT-2s of "
        f"width 64, then models at real sizes, planned for an H100.\n\n{table(of_small, small)}\n\n"
        f"{table(of_large, large)}\n\n{source(document)}"
    )


def ways(document: Document) -> str:
    rows = []
    for row in document["rows"]:
        name = " at ".join(filter(None, (row["way"], row.get("at"))))
        if "step_ms" not in row:
            rows.append((row["model"], name, "–", "–", "–", row["failure"].partition(":")[0]))
            continue
        beside = next(one for one in document["rows"] if one["model"] == row["model"] and one["way"] == "compile")
        share = number(row["step_ms"] / beside["step_ms"])
        peak, step, first = row["peak_gb"] * 1024, row["step_ms"], row["first_s"]
        rows.append((row["model"], name, number(peak, 1), number(step, 0), share, number(first, 1)))
    head = ("model", "way", "peak, MB", "step, ms", "of compile's", "first step, s")
    about = (
        "Whole steps with AdamW in fp32 at small sizes; medians of processor time, of steps in turns. memopt within: a "
        "budget for all, the peak of checkpoints by hand, and half of what the compiled step adds."
    )
    return f"{about}\n\n{table(head, rows)}\n\n{source(document)}"


def max_flow(document: Document) -> str:
    rows = [
        (row["problem"], f"{row['operators']:,}", row["method"], number(row["hull_seconds"]), str(row["vertices"]),
         number(row["bound_seconds"]), number(row["bound_percent"], 4), number(row["installed_mb"], 0))
        for row in document["rows"] if "over_seconds" not in row
    ]  # fmt: skip
    head = ("problem", "operators", "flow by", "hull, CPU s", "its vertices", "bound, CPU s", "bound, % of the step",
            "installed MB")  # fmt: skip
    return f"{table(head, rows)}\n\n{source(document)}"


def second_start(document: Document) -> str:
    rows = [
        (row["model"], row["job"], *(number(seconds) for seconds in row["planning_seconds"]))
        for row in document["rows"]
    ]
    head = ("model", "planned", "planning at the first start, s", "at the second")
    return f"{table(head, rows)}\n\n{source(document)}"


def longest(document: Document) -> str:
    def of(row: Document, with_tiles: str, without: str) -> str:
        return f"{100 * (row[with_tiles] / row[without] - 1):+.1f}%" if row["longest"] else "–"

    rows = [
        (row["model"], f"{row['card_gb']} GB", f"{row['longest']:,}", f"{row['tiled']:,}",
         number(row["tiled"] / row["longest"]) if row["longest"] else "–",
         of(row, "tiled_smallest_gb", "smallest_gb"), of(row, "tiled_seconds", "seconds"))
        for row in document["rows"]
    ]  # fmt: skip
    head = ("model", "card", "longest", "with tiles", "times", "smallest budget", "time")
    about = """One sequence or image a step, planned on the meta device: the most tokens, or pixels of a side, that fit,
without and with the lever "tiles"; at the longest that fits without them, what tiles change of the smallest budget and
of the predicted time at the card's size. 0: no length fits."""
    return f"{about}\n\n{table(head, rows)}\n\n{source(document)}"


def html_page(document: Document) -> str:
    rows = [
        (row["model"], f"{row['operators']:,}", number(row["page_mb"]), number(row["ready_ms"], 0),
         number(row["hover_ms"], 0), number(row["search_ms"], 0))
        for row in document["rows"]
    ]  # fmt: skip
    head = ("model", "nodes of the graph", "page, MB", "ready, ms", "hover, ms", "search, ms")
    return f"{table(head, rows)}\n\n{source(document)}"


def first_step(document: Document) -> str:
    parts = []
    for label, run in document.items():
        rows = [
            (row["model"], row["way"], number(row["cpu_seconds"], 1), number(row["wall_seconds"], 1),
             number(row["of_torch_cpu"]), number(row["second_step_seconds"], 1))
            for row in run["rows"]
        ]  # fmt: skip
        head = (f"{label}: model", "way", "CPU s", "wall s", "CPU of torch's", "second step")
        parts.append(f"{table(head, rows)}\n\n{source(run)}")
    return "Until the first forward and backward are done, planning included.\n\n" + "\n\n".join(parts)


def first_use(document: Document) -> str:
    parts = []
    for label, run in document.items():
        rows = [(f"import {row['import']}", number(row["cpu_seconds"]), "–") for row in run["imports"]]
        rows += [
            (f"{row['plan']} plan of GPT-2", number(row["plan_cpu"], 1), number(row["plan_wall"], 1))
            for row in run["plans"]
        ]
        parts.append(f"{table((label, 'CPU s', 'wall s'), rows)}\n\n{source(run)}")
    return "\n\n".join(parts)


def first_tasks(document: Document) -> str:
    rows = [
        (row["who"], row["wants"], number(row["minutes"], 1), number(row["cpu_minutes"], 1), len(row["wrong"]) or "–")
        for row in document["tasks"].values()
    ]
    head = ("who", "what they want", "minutes", "of CPU", "ended otherwise")
    about = "What newcomers type, from a shell in an empty folder, beside other work on the machine."
    return f"{about}\n\n{table(head, rows)}\n\n{source(document)}"


SECTIONS: dict[str, tuple[str, Callable[[Document], str]]] = {
    "Memory and added time": ("frontier", frontier),
    "Against the optimum": ("exact", exact),
    "Solving as graphs grow": ("growth", growth),
    "Fourteen families": ("families", families),
    "Whole steps within a budget": ("total_budget", total_budget),
    "Whole steps on a card": ("card_bytes", card_bytes),
    "Budgets that refusals name on a card": ("named_on_card", named_on_card),
    "FSDP2 on two and four ranks": ("fully_shard", fully_sharded),
    "Ranks that fail, and runs that go on": ("rank_failures", rank_failures),
    "Clusters": ("cluster", clusters),
    "The account": ("account", account),
    "Predicted and measured time": ("step_time", step_time),
    "Random models": ("fuzz", fuzz),
    "Random models through inductor": ("fuzz_inductor", fuzz),
    "Damaged files, kills and changing shapes": ("abuse", abuse),
    "Precision beside autocast": ("precision", precision),
    "Learning in 16 bits": ("learning", learning),
    "8-bit layers": ("fp8_small", fp8),
    "The chunked loss": ("chunk_loss", chunked_loss),
    "The longest sequences": ("longest", longest),
    "Articles": ("articles", articles),
    "An article's fine-tuning, measured": ("vit_finetune_small", vit_finetune),
    "Planning, beside a first step": ("starts", planning),
    "Ways to train, on a CPU": ("ways", ways),
    "Minimum cuts of large problems": ("max_flow", max_flow),
    "The page of a plan": ("page", html_page),
    "The second start of a job": ("second_start", second_start),
    "The first step": ("first_step", first_step),
    "First use": ("first_use", first_use),
    "First tasks": ("newcomers", first_tasks),
    "Versions of Python and torch": ("matrix", versions),
}


def page() -> str:
    """Return the page from all result files that are there."""
    parts = [INTRODUCTION]
    for title, (name, section) in SECTIONS.items():
        path = RESULTS / f"{name}.json"
        if path.exists():
            parts.append(f"## {title}\n\n{section(json.loads(path.read_text()))}")
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        PAGE.write_text(page(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != page():
        sys.exit(f"{PAGE} is not what the result files say: run python -m benchmarks.report")


if __name__ == "__main__":
    main()
