"""How long it takes to plan large models on the meta device, and what the plans say: one JSON file and a table.

    python -m benchmarks.plan_large [--model llama-8b]

Each model is planned in a process of its own for an H100: AdamW, everything counted. Time and memory are of planning.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import memopt
from benchmarks.stamp import stamp, write_result

RESULT = Path(__file__).parent / "results" / "plan_large.json"


def llama_8b() -> tuple[torch.nn.Module, tuple[int, int]]:
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        use_cache=False,
    )
    return LlamaForCausalLM(config), (1, 2048)


def gpt2_48() -> tuple[torch.nn.Module, tuple[int, int]]:
    return GPT2LMHeadModel(GPT2Config(n_layer=48, n_embd=1600, n_head=25, use_cache=False)), (8, 1024)


MODELS = {"llama-8b": llama_8b, "gpt2-48": gpt2_48}


@dataclass(frozen=True)
class Row:
    model: str
    nodes: int
    ops: int
    plan_seconds: float
    solve_seconds: float
    memory_gb: float
    plain_peak_gb: float
    smallest_gb: float
    budget_gb: float
    peak_gb: float
    added_time: float
    bound: float


def measure(name: str) -> tuple[Row, memopt.Plan]:
    with torch.device("meta"):
        model, shape = MODELS[name]()
        tokens = torch.empty(shape, dtype=torch.long)
    model.loss_type = "ForCausalLM"
    start = time.perf_counter()
    plain = memopt.plan(
        model.train(), 10_000, {"input_ids": tokens, "labels": tokens}, optimizer="sgd", device="h100", precision="fp32"
    )
    planned_after = time.perf_counter() - start
    smallest = plain.smallest_gb()
    budget = smallest + 0.25 * (plain.plain_peak_gb - smallest)
    start = time.perf_counter()
    plan = plain.at(budget)
    solve_seconds = time.perf_counter() - start
    assert plan.captured is not None
    assert plan.joined is not None
    row = Row(
        name,
        sum(len(region.module.graph.nodes) for region in plan.captured.regions),
        len(plan.joined.problem.ops),
        planned_after,
        solve_seconds,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        plain.plain_peak_gb,
        smallest,
        budget,
        plan.predicted_peak_gb,
        plan.added_time,
        plan.bound,
    )
    return row, plan


def table(rows: list[dict[str, Any]]) -> Table:
    shown = Table(title="Planning large models for an H100, on the meta device")
    for column in ("model", "nodes", "plan s", "solve s", "GB of RAM", "plain GB", "smallest GB", "budget GB", "added"):
        shown.add_column(column, justify="left" if column == "model" else "right")
    for row in rows:
        shown.add_row(
            row["model"],
            str(row["nodes"]),
            f"{row['plan_seconds']:.1f}",
            f"{row['solve_seconds']:.1f}",
            f"{row['memory_gb']:.2f}",
            f"{row['plain_peak_gb']:.1f}",
            f"{row['smallest_gb']:.1f}",
            f"{row['budget_gb']:.1f}",
            f"{row['added_time']:.1%} (≥ {row['bound']:.1%})",
        )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS)
    chosen = parser.parse_args().model
    if chosen:
        row, plan = measure(chosen)
        print(plan.table(), file=sys.stderr)
        print(json.dumps(asdict(row)))
        return
    rows = []
    for name in MODELS:
        command = [sys.executable, "-m", "benchmarks.plan_large", "--model", name]
        run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        rows.append(json.loads(run.stdout.splitlines()[-1]))
    write_result(RESULT, {**stamp(), "rows": rows})
    Console(width=120).print(table(rows))


if __name__ == "__main__":
    main()
