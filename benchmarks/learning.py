"""Learning in 16 bits beside fp32: held-out loss and accuracy over the steps, three seeds each; JSON, table, picture.

    python -m benchmarks.learning [--again]

Runs that are in the file already are not repeated, unless `--again` is given.

A ViT on scikit-learn's handwritten digits (1,797 real images, a quarter held out) and a GPT over the characters of the
demo's text (a tenth held out), trained by `memopt.TrainStep` from the same start and on the same batches: in fp32,
under `torch.autocast`, and as planned by memopt for a budget between the smallest and the plain peak. What counts is
whether the mean of the final figures over the seeds lies within the range of fp32's seeds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, ViTConfig, ViTForImageClassification

import memopt
from benchmarks.stamp import stamp, write_result
from examples.train_gpt2_within_budget import read_text

RESULT = Path(__file__).parent / "results" / "learning.json"
PICTURE = Path(__file__).parent.parent / "docs" / "learning.svg"
SEEDS = (0, 1, 2)
MODES = ("fp32", "autocast bf16", "memopt bf16", "autocast fp16", "memopt fp16")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
EVERY = 20
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Task:
    name: str
    make: Callable[[], nn.Module]
    batches: Callable[[int], Iterator[Batch]]
    held_out: Batch
    steps: int
    learning_rate: float


@dataclass(frozen=True)
class Curve:
    task: str
    mode: str
    seed: int
    steps: tuple[int, ...]
    losses: tuple[float, ...]
    """Losses on the held-out data."""
    accuracies: tuple[float, ...]
    skipped: int
    """Steps that the loss scale skipped."""
    seconds: float


def digits() -> Task:
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, held_out = order[: 3 * len(order) // 4], order[3 * len(order) // 4 :]

    def make() -> nn.Module:
        config = ViTConfig(
            image_size=8, patch_size=2, num_channels=1, hidden_size=96, num_hidden_layers=4, num_attention_heads=4,
            intermediate_size=384, num_labels=10, problem_type="single_label_classification",
        )  # fmt: skip
        model = ViTForImageClassification(config).train()
        model.loss_type = "ForSequenceClassification"
        return model

    def batches(seed: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            for chosen in train[torch.randperm(len(train), generator=generator)].split(64)[:-1]:
                yield {"pixel_values": images[chosen], "labels": labels[chosen]}

    return Task(
        "ViT on digits", make, batches, {"pixel_values": images[held_out], "labels": labels[held_out]}, 400, 1e-3
    )


def characters() -> Task:
    text, length = read_text(), 96
    split = 9 * len(text) // 10

    def make() -> nn.Module:
        config = GPT2Config(
            vocab_size=256, n_positions=length, n_embd=128, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0,
            use_cache=False,
        )  # fmt: skip
        model = GPT2LMHeadModel(config).train()
        model.loss_type = "ForCausalLM"
        return model

    def piece(start: int) -> list[int]:
        return list(text[start : start + length])

    def batches(seed: int) -> Iterator[Batch]:
        places = random.Random(seed)
        while True:
            tokens = torch.tensor([piece(places.randrange(split - length)) for _ in range(16)])
            yield {"input_ids": tokens, "labels": tokens}

    held_out = torch.tensor([piece(start) for start in range(split, len(text) - length, (len(text) - split) // 64)])
    return Task("GPT on characters", make, batches, {"input_ids": held_out, "labels": held_out}, 300, 2e-3)


def train(task: Task, mode: str, seed: int) -> Curve:
    torch.manual_seed(seed)
    model = task.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, task.learning_rate, total_steps=task.steps + 1)
    batches = task.batches(seed)
    kind, _, dtype = mode.partition(" ")
    if kind == "memopt":
        plan = memopt.plan(model, 1000, next(task.batches(seed)), optimizer=optimizer, precision=dtype)
        budget_gb = (plan.smallest_gb() + plan.plain_peak_gb) / 2
        memopt.optimize(model, budget_gb, optimizer=optimizer, precision=dtype)
    autocast = DTYPES[dtype] if kind == "autocast" else None
    step = memopt.TrainStep(model, optimizer, max_grad_norm=1.0, scheduler=schedule, autocast=autocast)
    points: list[tuple[int, float, float]] = []
    skipped, start = 0, time.perf_counter()
    torch.manual_seed(seed)
    for number in range(1, task.steps + 1):
        skipped += bool(step(next(batches)).skipped)
        if number % EVERY == 0:
            points.append((number, *evaluate(task, model)))
    steps, losses, accuracies = zip(*points, strict=True)
    return Curve(task.name, mode, seed, steps, losses, accuracies, skipped, time.perf_counter() - start)


def evaluate(task: Task, model: nn.Module) -> tuple[float, float]:
    """Return loss and accuracy on the held-out data, computed in fp32."""
    model.eval()
    with torch.no_grad():
        output: Any = model(**task.held_out)
    model.train()
    labels, logits = task.held_out["labels"], output.logits
    if logits.dim() == 3:
        labels, logits = labels[:, 1:], logits[:, :-1]
    return float(output.loss), float((logits.argmax(-1) == labels).double().mean())


def table(curves: list[Curve]) -> Table:
    table = Table(title="After the last step, on what was held out", title_justify="left")
    for title in ("task", "trained in", "loss, mean of seeds", "fp32's seeds", "accuracy", "fp32's seeds", "skipped"):
        table.add_column(title)
    for task in dict.fromkeys(curve.task for curve in curves):
        plain = [curve for curve in curves if curve.task == task and curve.mode == "fp32"]
        for mode in MODES:
            chosen = [curve for curve in curves if curve.task == task and curve.mode == mode]
            row = [task, mode]
            for name, digits in (("losses", 3), ("accuracies", 4)):
                seeds = [getattr(curve, name)[-1] for curve in plain]
                figure = mean(getattr(curve, name)[-1] for curve in chosen)
                inside = "within" if min(seeds) <= figure <= max(seeds) else "outside"
                row += [f"{figure:.{digits}f} {inside}", f"{min(seeds):.{digits}f} to {max(seeds):.{digits}f}"]
            table.add_row(*row, str(sum(curve.skipped for curve in chosen)))
    return table


def draw(curves: list[Curve]) -> None:
    PICTURE.parent.mkdir(exist_ok=True)
    figure = Figure(figsize=(11, 4.2), dpi=120)
    FigureCanvasAgg(figure)
    tasks = list(dict.fromkeys(curve.task for curve in curves))
    colours = dict(zip(MODES, ("#333333", "#d99a6c", "#c4532d", "#7fa8d6", "#1f5fa8"), strict=True))
    for axes, task in zip(figure.subplots(1, len(tasks)), tasks, strict=True):
        for curve in [curve for curve in curves if curve.task == task]:
            label = curve.mode if curve.seed == SEEDS[0] else None
            axes.plot(curve.steps, curve.losses, color=colours[curve.mode], linewidth=1.1, alpha=0.8, label=label)
        axes.set(title=task, xlabel="steps", ylabel="held-out loss", yscale="log")
        axes.legend(frameon=False, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "memopt"}):  # text as text, the same names every time
        figure.savefig(PICTURE, metadata={"Date": None})


def write(curves: list[Curve]) -> None:
    write_result(RESULT, {**stamp(), "curves": [asdict(curve) for curve in curves]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true")
    known = [] if parser.parse_args().again or not RESULT.exists() else json.loads(RESULT.read_text())["curves"]
    curves = [Curve(**curve) for curve in known]
    done = {(curve.task, curve.mode, curve.seed) for curve in curves}
    torch.set_num_threads(1)  # two threads are no faster for small models
    for task, mode, seed in itertools.product((digits(), characters()), MODES, SEEDS):
        if (task.name, mode, seed) not in done:
            curves.append(train(task, mode, seed))
            write(curves)
            print(f"{len(curves)} of {2 * len(MODES) * len(SEEDS)} runs", file=sys.stderr)
    draw(curves)
    Console(width=140).print(table(curves))


if __name__ == "__main__":
    main()
