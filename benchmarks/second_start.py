"""What planning costs at the first and at the second start of a job, each in a process of its own.

    python -m benchmarks.second_start [--only GPT-2]

Full widths and depths at small batches, where torch computes on this machine, a budget half-way between the smallest
and the plain peak, an empty folder for plans at the start. "ahead" is a job that gives `optimize` its `example_inputs`:
all of `optimize` is planning. "lazy" is a job that plans at its first step: the second start captures and emits as the
first does, so that planning is the difference of their steps and the time to find the kept plan.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import nn

import memopt
from benchmarks.gpu_models import Batch, images, library, text
from benchmarks.processes import record_of
from benchmarks.stamp import stamp, write_result
from memopt.planning import plan_cache
from memopt.planning.job_key import PlanJob

RESULT = Path(__file__).parent / "results" / "second_start.json"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GPT2 = transformers.GPT2Config(use_cache=False)
VIT = transformers.ViTConfig(num_labels=1000)
RESNET = transformers.ResNetConfig(num_labels=1000, problem_type="single_label_classification")
Made = tuple[Callable[[], nn.Module], Callable[[], Batch]]
MODELS: dict[str, Made] = {
    "GPT-2": (library("GPT2LMHeadModel", GPT2, "ForCausalLM"), partial(text(50257, 256), 4)),
    "ViT-B/16": (library("ViTForImageClassification", VIT, "ForSequenceClassification"), partial(images(224, 1000), 8)),
    "ResNet-50": (
        library("ResNetForImageClassification", RESNET, "ForSequenceClassification"), partial(images(224, 1000), 8)
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Start:
    """Seconds of one start of a job."""

    optimize: float
    step: float
    """Seconds of the first step, with its compilation."""
    looking: float
    """Seconds of looking for a kept plan: making its key and reading it."""
    peak_gb: float
    """The peak that the plan predicts."""


def start(name: str, budget_gb: float, *, ahead: bool) -> Start:
    """Start a job in this process and measure it."""
    with torch.device(DEVICE):
        model, batch = MODELS[name][0](), MODELS[name][1]()
    looking = [0.0]
    with timed(looking, PlanJob, "key"), timed(looking, PlanJob, "sketch"), timed(looking, plan_cache, "find"):
        begin = time.perf_counter()
        memopt.optimize(model, budget_gb, **({"example_inputs": batch} if ahead else {}))
        optimized = time.perf_counter()
        model(**batch).loss.backward()
        done = time.perf_counter()
    return Start(optimized - begin, done - optimized, looking[0], memopt.plan_of(model).predicted_peak_gb)


@contextmanager
def timed(seconds: list[float], owner: Any, name: str) -> Iterator[None]:
    """Add the seconds that calls of `owner.name` take to `seconds[0]` inside the block."""
    function = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[0] += time.perf_counter() - begin

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, function)


def in_a_process(name: str, budget_gb: float, ahead: bool, folder: str) -> Start:
    arguments = "--start", name, str(budget_gb), str(int(ahead))
    return Start(**record_of("second_start", *arguments, MEMOPT_CACHE_DIR=folder, MEMOPT_CACHE="1"))


def compare(name: str) -> Iterator[dict[str, Any]]:
    with torch.device("meta"):
        plain = memopt.plan(MODELS[name][0](), 2.0**40, MODELS[name][1]())
    budget_gb = (plain.smallest_gb() + plain.plain_peak_gb) / 2
    for ahead in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            first, second = (in_a_process(name, budget_gb, ahead, folder) for _ in range(2))
        planning = first.step - second.step + second.looking, second.looking
        if ahead:
            planning = first.optimize, second.optimize
        row = {
            "model": name,
            "job": "ahead" if ahead else "lazy",
            "budget_gb": budget_gb,
            "planning_seconds": planning,
            "share": planning[1] / planning[0],
            "starts": [asdict(first), asdict(second)],
        }
        print(row, file=sys.stderr, flush=True)
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MODELS, nargs="+", default=list(MODELS))
    parser.add_argument("--start", nargs=3, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.start:
        name, budget_gb, ahead = chosen.start
        print(json.dumps(asdict(start(name, float(budget_gb), ahead=ahead == "1"))))
        return
    rows = [row for name in chosen.only for row in compare(name)]
    write_result(RESULT, {**stamp(), "device": DEVICE, "rows": rows})
    table = Table(title="Seconds of planning at the first and the second start", title_justify="left")
    for column in ("model", "job", "first", "second", "share", "whole start, first", "second"):
        table.add_column(column, justify="left" if column in ("model", "job") else "right")
    for row in rows:
        whole = [f"{start['optimize'] + start['step']:.1f}" for start in row["starts"]]
        first, second = row["planning_seconds"]
        table.add_row(row["model"], row["job"], f"{first:.1f}", f"{second:.2f}", f"{row['share']:.1%}", *whole)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
