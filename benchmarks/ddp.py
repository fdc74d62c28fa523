"""Two ranks under `DistributedDataParallel` with 100 MB of parameters: peaks against five budgets, gradients against
plain DDP's; one JSON file and a table.

    python -m benchmarks.ddp [--budgets 0.425 0.44 0.455 0.47 0.485]

The ranks are two processes of this machine that exchange gradients by gloo. Peaks are metered from the making of the
model on, so that the buckets are among them. The odd budgets are met by a model that is optimised before it is wrapped,
the even ones after. Seconds are those of the last step, with both ranks on the same cores.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import distributed, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

import memopt
from benchmarks.stamp import stamp, write_result

RESULT = Path(__file__).parent / "results" / "ddp.json"
BUDGETS = (0.425, 0.44, 0.455, 0.47, 0.485)
ACCUMULATING = 0.53
STEPS = 3


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=8_400, n_positions=64, n_embd=640, n_layer=4, n_head=10, use_cache=False, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"
    return model


def wrapped(budget_gb: float | None, before: bool, views: bool) -> nn.Module:
    """The model under DDP; without a budget the plain one."""
    exact: dict[str, Any] = {"precision": "fp32", "allow": {"recompute", "reinplace"}}
    if budget_gb is not None and before:
        return DistributedDataParallel(memopt.optimize(gpt2(), budget_gb, **exact), gradient_as_bucket_view=views)
    model = DistributedDataParallel(gpt2(), gradient_as_bucket_view=views)
    return model if budget_gb is None else memopt.optimize(model, budget_gb, **exact)


def train(rank: int, budget_gb: float | None, before: bool, views: bool, accumulate: int) -> dict[str, Any]:
    """Train with AdamW; the peak, hashes of all gradients of each step, and the last step's seconds."""
    hashes = []
    with memopt.measure_peak() as peak:
        model = wrapped(budget_gb, before, views)
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(STEPS):
            torch.manual_seed(step + rank)
            start = time.perf_counter()
            for number in range(accumulate):
                with nullcontext() if number == accumulate - 1 else model.no_sync():  # type: ignore[operator]
                    tokens = torch.randint(0, 8_400, (4, 64))
                    model(input_ids=tokens, labels=tokens).loss.backward()
            digest = hashlib.sha256()
            for parameter in model.parameters():
                digest.update(parameter.grad.numpy().data)  # type: ignore[union-attr]
            hashes.append(digest.hexdigest())
            optimizer.step()
            optimizer.zero_grad()
            seconds = time.perf_counter() - start
    plan = None if budget_gb is None else memopt.plan_of(model)
    return {
        "hashes": hashes,
        "peak_gb": peak.gb,
        "seconds": seconds,
        "added_time": plan and plan.added_time,
        "regions": plan and len(plan.regions),
    }


def on_rank(rank: int, folder: str, cases: list[tuple[Any, ...]]) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=2)
    torch.save([train(rank, *case) for case in cases], Path(folder) / str(rank))
    distributed.barrier()
    os._exit(0)  # the group's destructor may wait for itself


def rows(budgets: list[float]) -> list[dict[str, Any]]:
    cases = [(None, True, True, 1), (None, True, False, 2)]
    cases += [(budget_gb, number % 2 == 0, True, 1) for number, budget_gb in enumerate(budgets)]
    cases += [(ACCUMULATING, True, False, 2)]
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(on_rank, (folder, cases), nprocs=2)
        ranks = [torch.load(Path(folder) / str(rank)) for rank in range(2)]
    plain = {1: [rank[0] for rank in ranks], 2: [rank[1] for rank in ranks]}
    found = []
    for number, (budget_gb, before, views, accumulate) in enumerate(cases):
        pair = [rank[number] for rank in ranks]
        found.append({
            "budget_gb": budget_gb,
            "optimised": None if budget_gb is None else "before" if before else "after",
            "gradient_as_bucket_view": views,
            "accumulate": accumulate,
            "peaks_gb": [rank["peak_gb"] for rank in pair],
            "equal": [one["hashes"] == other["hashes"] for one, other in zip(pair, plain[accumulate], strict=True)],
            "added_time": pair[0]["added_time"],
            "regions": pair[0]["regions"],
            "seconds": max(rank["seconds"] for rank in pair),
        })  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--budgets", type=float, nargs="+", default=BUDGETS)
    found = rows(parser.parse_args().budgets)
    write_result(RESULT, {**stamp(), "rows": found})
    table = Table("budget", "optimised", "views", "accumulate", "peaks of the ranks", "gradients", "added", "seconds")
    for row in found:
        table.add_row(
            "plain" if row["budget_gb"] is None else f"{row['budget_gb']} GB",
            row["optimised"],
            str(row["gradient_as_bucket_view"]),
            str(row["accumulate"]),
            ", ".join(f"{peak:.4f} GB" for peak in row["peaks_gb"]),
            "equal" if all(row["equal"]) else "differ",
            "" if row["added_time"] is None else f"{row['added_time']:.1%}",
            f"{row['seconds']:.1f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
