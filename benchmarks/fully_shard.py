"""FSDP2 on several ranks with 100 MB and more of parameters: peaks and predictions at three budgets between plain
FSDP2's peak and the smallest, losses and gradients against plain FSDP2's, and within the peak of checkpoints at every
block the floating-point operations that a plan adds, against those that the checkpoints add; and the gathers of a
step, fewer where a plan keeps blocks gathered until their backward. One JSON file and a table.

    python -m benchmarks.fully_shard [--ranks 2 4] [--models GPT-2 Llama ViT] [--shardings fp32]

Shards over two and four ranks; over two with parameters that are gathered in bf16; and over two of four (HSDP). Ranks
are processes of this machine that exchange tensors by gloo (`examples/models/settled_gloo.py`). Peaks are those of
whole steps with AdamW after the first one, optimizer's step and gloo's copies included. Rows of models, numbers of
ranks and shardings that are not measured again are kept.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
from collections.abc import Sequence
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, distributed, fx, multiprocessing
from torch.utils.flop_counter import FlopCounterMode

import memopt
from benchmarks.stamp import stamp, write_result
from examples.models.fully_shard import FAMILIES, POLICY, REPLICAS, SHARDINGS, WHOLE, planned, train_step
from examples.models.settled_gloo import counted
from memopt.compat.tensors import shard_of
from memopt.device.op_call import flop_formula

RESULT = Path(__file__).parent / "results" / "fully_shard.json"
COMMAND = "python -m benchmarks.fully_shard"
"""The command for all rows, perhaps measured a few at a time."""
SHARES = (0.1, 0.4, 0.7)
"""Where the budgets lie between the smallest and plain FSDP2's peak."""
STEPS = 2
PLAIN, CHECKPOINTS = "plain", "checkpoints at every block"
SMALLEST, PLANNED, REFUSED = "smallest", "planned", "refused"


class Case(NamedTuple):
    """A model of `FAMILIES` on a number of ranks in one of `SHARDINGS`: the first keys of a row."""

    model: str
    ranks: int
    sharding: str

    def sharded(self, *, checkpointed: bool = False) -> Any:
        """The model on this rank."""
        return FAMILIES[self.model].sharded(self.ranks, checkpointed=checkpointed, sharding=self.sharding)


NUMBERS_OF_RANKS = {WHOLE: (2, 4), POLICY: (2,), REPLICAS: (4,)}
CASES = [
    Case(model, ranks, sharding)
    for sharding, numbers in NUMBERS_OF_RANKS.items()
    for ranks in numbers
    for model in FAMILIES
]


def train(rank: int, case: Case, way: str, budget_gb: float | None, folder: Path) -> dict[str, Any]:
    """Train for `STEPS` steps in one of the four ways.

    Returns the peak of the steps after the first one, the gathers of the last one, and the largest absolute difference
    of a loss or gradient to that of the plain way, divided by the largest magnitude in its tensor.
    """
    model = case.sharded(checkpointed=way == CHECKPOINTS)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    if budget_gb is not None:
        planned(model, budget_gb, optimizer)
    gathers = counted(model)
    plain, peak_gb, difference = folder / f"plain of {rank}", 0.0, 0.0
    for step in range(STEPS):
        batch = FAMILIES[case.model].batch(100 * rank + step)
        gc.collect()
        gathers.clear()
        torch.manual_seed(step + rank)
        with memopt.measure_peak("cpu") as peak:
            loss = train_step(model, optimizer, batch)
        peak_gb = max(peak_gb, peak.gb if step else 0.0)
        difference = max(difference, _difference(model, loss, f"{plain} {step}", first=way == PLAIN))
        optimizer.zero_grad()
    found = {"peak_gb": peak_gb, "difference": difference, "gathers": len(gathers)}
    if budget_gb is None:
        return {**found, "flops": operations(model, batch)}
    plan = memopt.plan_of(model)
    figures = {"predicted_gb": plan.predicted_peak_gb, "added_time": plan.added_time}
    figures["flops"] = operations_again(plan)
    return {"budget_gb": budget_gb, **found, **figures}


def _difference(model: Any, loss: Tensor, path: str, *, first: bool) -> float:
    """The largest relative difference of the loss or a gradient to those saved at `path`; saves them there if `first`.

    No gradient is referenced any more when it returns: the shards of one group are views of one storage, so that a
    reference to the smallest would hold all of them through the next step.
    """
    values = [loss, *(shard_of(value.grad) for value in model.parameters())]
    if first:
        torch.save(values, path)
        return 0.0
    return max(_apart(one, other) for one, other in zip(values, torch.load(path), strict=True))


def _apart(one: Tensor, other: Tensor) -> float:
    if not one.numel():  # a rank's shard of a parameter with fewer rows than there are ranks
        return 0.0
    return float((one - other).abs().max() / other.abs().max().clamp(min=1e-30))


def operations(model: Any, batch: dict[str, Tensor]) -> int:
    """The floating-point operations of a forward and backward, by torch's formulas."""
    with FlopCounterMode(display=False) as counter:
        model(**batch).loss.backward()
    return counter.get_total_flops()


def operations_again(plan: Any) -> int:
    """The floating-point operations that a plan's recomputations add, by torch's formulas."""
    pairs = zip(plan.captured.regions, plan.regions, strict=True)
    again = (node for joint, schedule in pairs for node in _recomputed(joint.module.graph, schedule.evaluations))
    return sum(map(_flops, again))


def _recomputed(graph: fx.Graph, evaluations: Sequence[str]) -> list[fx.Node]:
    """The node of each evaluation after a node's first."""
    named = {node.name: node for node in graph.nodes}
    seen: set[str] = set()
    return [named[name] for name in evaluations if name in seen or seen.add(name)]  # type: ignore[func-returns-value]


def _flops(node: fx.Node) -> int:
    formula = flop_formula(node.target)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda given: given.meta["val"])
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=node.meta["val"]))


def smallest(rank: int, case: Case) -> dict[str, Any]:
    """The smallest budget that works on this rank."""
    model = case.sharded()
    planned(model, 0.01, torch.optim.AdamW(model.parameters(), foreach=False))
    try:
        model(**FAMILIES[case.model].batch(100 * rank))
    except memopt.BudgetError as error:
        return {"smallest_gb": error.smallest_gb}
    raise AssertionError("a step of 100 MB of parameters fits 0.01 GB")


def on_rank(rank: int, folder: Path, case: Case, way: str, budget_gb: float | None) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{folder}/{way} {budget_gb}", rank=rank, world_size=case.ranks)
    found = smallest(rank, case) if way == SMALLEST else train(rank, case, way, budget_gb, folder)
    torch.save(found, folder / str(rank))
    distributed.barrier()
    os._exit(0)  # the group's destructor may wait for itself


def of_ranks(folder: Path, case: Case, way: str, budget_gb: float | None = None) -> list[dict[str, Any]]:
    """The results of each rank for one way, each from a new process, whose memory holds nothing of the other ways."""
    given = folder, case, way, budget_gb
    multiprocessing.start_processes(on_rank, given, nprocs=case.ranks, start_method="forkserver")
    return [torch.load(folder / str(rank)) for rank in range(case.ranks)]


def rows(case: Case) -> list[dict[str, Any]]:
    """The rows of one case, each with the peaks of all ranks."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        by_way = {way: of_ranks(folder, case, way) for way in (PLAIN, CHECKPOINTS)}
        least = max(one["smallest_gb"] for one in of_ranks(folder, case, SMALLEST))
        most, recipe = (min(one["peak_gb"] for one in by_way[way]) for way in (PLAIN, CHECKPOINTS))
        plain_flops = by_way[PLAIN][0]["flops"]
        found = [{"way": way, **_row(runs, plain_flops)} for way, runs in by_way.items()]
        for row in found:
            row["more_flops"] -= 1
        for budget_gb in (*(least + share * (most - least) for share in SHARES), recipe):
            if budget_gb < least:
                found.append({"way": REFUSED, "budget_gb": budget_gb, "smallest_gb": least})
            else:
                found.append({"way": PLANNED, **_row(of_ranks(folder, case, PLANNED, budget_gb), plain_flops)})
    return [{**case._asdict(), **row} for row in found]


def _row(runs: list[dict[str, Any]], plain_flops: int) -> dict[str, Any]:
    row = {**runs[0], "peaks_gb": [one["peak_gb"] for one in runs]}
    row["difference"] = max(one["difference"] for one in runs)
    row["more_flops"] = row.pop("flops") / plain_flops
    del row["peak_gb"]
    return row


def show(found: list[dict[str, Any]]) -> None:
    columns = (
        "model",
        "ranks",
        "shards",
        "way",
        "budget",
        "predicted",
        "peaks of the ranks",
        "difference",
        "more",
        "added",
        "gathers",
    )
    table = Table(*columns)
    for row in found:
        table.add_row(
            row["model"],
            str(row["ranks"]),
            row["sharding"],
            row["way"],
            f"{row['budget_gb']:.4f} GB" if "budget_gb" in row else "",
            f"{row['predicted_gb']:.4f} GB" if "predicted_gb" in row else "",
            ", ".join(f"{peak:.4f}" for peak in row.get("peaks_gb", [])),
            f"{row['difference']:.1e}" if "difference" in row else "",
            f"{row['more_flops']:.1%} of operations" if "more_flops" in row else "",
            f"{row['added_time']:.1%} of time" if "added_time" in row else "",
            str(row.get("gathers", "")),
        )
    Console().print(table)


def case_of(row: dict[str, Any]) -> Case:
    """The case that a row is of."""
    return Case(row["model"], row["ranks"], row["sharding"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--shardings", nargs="+", default=list(SHARDINGS), choices=SHARDINGS)
    given = parser.parse_args()
    set_forkserver_preload(["examples.models.fully_shard", "torch._dynamo"])  # imported once for all processes
    found = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else []
    for case in CASES:
        if case.ranks in given.ranks and case.model in given.models and case.sharding in given.shardings:
            found = [*(row for row in found if case_of(row) != case), *rows(case)]
            found.sort(key=lambda row: CASES.index(case_of(row)))
            write_result(RESULT, {**stamp(), "command": COMMAND, "rows": found})
    show(found)


if __name__ == "__main__":
    main()
