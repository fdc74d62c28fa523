"""The default effort against the exact reference on small graphs, blocks of real models among them: JSON and a table.

    python -m benchmarks.exact [--seconds 60] [--jobs 2]

A budget's share is where it lies between the floor (0) and the peak of saving everything (1). Added time is in percent
of the step. Budgets that the reference does not solve to optimality within its seconds are left out of the tally.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table

import memopt
from benchmarks.frontier import PRICES
from benchmarks.real_models import RealModel, UNet, chunked, gpt2, images, library, llama, segmentation, tokens
from benchmarks.stamp import stamp, write_result
from examples.models.exact import solve_exactly
from examples.models.problems import random_problem, unet
from memopt.solver import Infeasible, Portfolio, RematProblem, Schedule, floor_bytes, simulate

RESULT = Path(__file__).parent / "results" / "exact.json"
SHARES = (0.7, 0.4, 0.2, 0.1, 0.04)
MOST_OPS = 170


@dataclass(frozen=True)
class Comparison:
    graph: str
    ops: int
    share: float
    proven: bool
    exact: float | None
    """Added time of the exact reference; None where no schedule exists, or none was found."""
    memopt: float | None
    """Added time of memopt; None where no schedule was found."""
    missed: bool
    """Whether the reference fits even the budget divided by 1.02, and memopt does not fit the budget."""


def bert(layers: int) -> Callable[[], torch.nn.Module]:
    config = transformers.BertConfig(
        num_hidden_layers=layers, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0
    )
    return library("BertForMaskedLM", config)


def vit(layers: int) -> Callable[[], torch.nn.Module]:
    config = transformers.ViTConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=layers, num_attention_heads=16,
        problem_type="single_label_classification",
    )  # fmt: skip
    return library("ViTForImageClassification", config, "ForSequenceClassification")


def resnet(*depths: int) -> Callable[[], torch.nn.Module]:
    sizes = [256 << stage for stage in range(len(depths))]
    config = transformers.ResNetConfig(
        depths=list(depths), hidden_sizes=sizes, problem_type="single_label_classification"
    )
    return library("ResNetForImageClassification", config, "ForSequenceClassification")


def small_unet() -> torch.nn.Module:
    with torch.device("meta"):
        return UNet(levels=2).to(torch.bfloat16).train()


def t5() -> torch.nn.Module:
    config = transformers.T5Config(
        d_model=768, d_kv=64, d_ff=3072, num_layers=1, num_heads=12, decoder_start_token_id=0, use_cache=False,
        dropout_rate=0.0,
    )  # fmt: skip
    return library("T5ForConditionalGeneration", config)()


BLOCKS = (
    RealModel("GPT-2 1L", gpt2(n_layer=1), tokens(8, 1024)),
    RealModel("GPT-2 2L", gpt2(n_layer=2), tokens(8, 1024)),
    RealModel("GPT-2 XL 2L", gpt2(n_layer=2, n_embd=1600, n_head=25), tokens(8, 1024)),
    RealModel("GPT-2 1L, chunked loss", chunked(gpt2(n_layer=1), rows=4096), tokens(8, 1024)),
    RealModel("BERT 1L", bert(1), tokens(32, 512)),
    RealModel("BERT 2L", bert(2), tokens(32, 512)),
    RealModel("ViT-L 1L", vit(1), images(64)),
    RealModel("ViT-L 2L", vit(2), images(64)),
    RealModel("ViT-L 3L", vit(3), images(64)),
    RealModel("Llama 1L", llama(1, 2048, 8192), tokens(4, 2048)),
    RealModel("ResNet 1+1", resnet(1, 1), images(128)),
    RealModel("ResNet 2", resnet(2), images(128)),
    RealModel("ResNet 1+1+1", resnet(1, 1, 1), images(128)),
    RealModel("U-Net of 2 levels", small_unet, segmentation(8, 256)),
    RealModel("T5 1+1L", t5, tokens(8, 512)),
)


def graphs() -> dict[str, Callable[[], RematProblem]]:
    real = {block.name: lambda block=block: captured(block) for block in BLOCKS}
    hourglass: dict[str, Callable[[], RematProblem]] = {"hourglass of 3 levels": lambda: unet(3)}
    drawn = {
        f"random {seed}": lambda seed=seed: random_problem(random.Random(seed), 8 + seed % 24)
        for seed in range(100, 124)
    }
    return {**real, **hourglass, **drawn}


def captured(block: RealModel) -> RematProblem:
    plan = memopt.plan(block.make(), 10_000, block.batch(), optimizer=None, device="h200", precision="fp32")
    assert plan.captured is not None
    problem = plan.priced.priced_for(hardware=PRICES, accumulating=False).problem.problem
    return replace(problem, resident_bytes=plan.account.parameters)


def compare(name: str, seconds: float) -> list[Comparison]:
    problem = graphs()[name]()
    if len(problem.ops) > MOST_OPS:
        return []
    floor, peak = floor_bytes(problem), simulate(problem, Schedule.save_all(problem)).peak_bytes
    rows = []
    for share in SHARES:
        budget_bytes = int(floor + share * (peak - floor))
        own: float | None = None
        try:
            own = Portfolio(problem).solve(budget_bytes).added_seconds
        except Infeasible:
            below = solve_exactly(problem, int(budget_bytes / 1.02), seconds=seconds)
            rows.append(Comparison(name, len(problem.ops), share, below.proven, None, None, below.schedule is not None))
            continue
        exact = solve_exactly(problem, budget_bytes, seconds=seconds)
        percent = 100 / problem.seconds
        best = exact.added_seconds * percent if exact.schedule else None
        rows.append(Comparison(name, len(problem.ops), share, exact.proven, best, own * percent, False))
    return rows


def tally(rows: list[Comparison]) -> Table:
    proven = [row for row in rows if row.proven and row.exact is not None and row.memopt is not None]
    points = [row.memopt - row.exact for row in proven if row.memopt is not None and row.exact is not None]
    below = [row for row in rows if row.exact is not None and row.memopt is not None and row.memopt < row.exact - 1e-3]
    table = Table(title="The default effort against the exact reference", show_header=False)
    table.add_row("graphs with a proven budget", str(len({row.graph for row in proven})))
    table.add_row("budgets, proven", f"{len(rows)}, {len(proven)}")
    table.add_row("equal within 0.1 points", f"{sum(value <= 0.1 for value in points)} of {len(points)}")
    table.add_row("most above the optimum", f"{max(points, default=0.0):.2f} points")
    table.add_row("better than the reference's best, unproven", str(len(below)))
    table.add_row("feasible budgets missed", str(sum(row.missed for row in rows)))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", choices=sorted(graphs()))
    chosen = parser.parse_args()
    names = [chosen.only] if chosen.only else list(graphs())
    rows: list[Comparison] = []
    console = Console(width=120)
    with ProcessPoolExecutor(chosen.jobs, max_tasks_per_child=1) as pool:
        for found in [pool.submit(compare, name, chosen.seconds) for name in names]:
            for row in found.result():
                rows.append(row)
                console.print(row)
    document = {**stamp(), "seconds": chosen.seconds}
    if not chosen.only:
        write_result(RESULT, {**document, "rows": [asdict(row) for row in rows]})
    console.print(tally(rows))


if __name__ == "__main__":
    main()
