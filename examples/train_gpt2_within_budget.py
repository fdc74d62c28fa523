"""Train a GPT-2 on real text within a budget that the plain model exceeds, and check it against the plain model.

Runs on a CPU, in minutes: `make demo`, or `python examples/train_gpt2_within_budget.py`.
"""

from __future__ import annotations

import argparse
import inspect
import random
import time
from collections.abc import Iterator
from pydoc_data.topics import topics

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import GPT2Config, GPT2LMHeadModel

import memopt

SEQUENCES, TOKENS = 6, 256
STEPS = 12
# This step fits no budget under 0.21 GB, and the plain model takes over 0.6 GB for it (both are printed below).
BUDGET_GB = 0.3
TOO_SMALL_GB = 0.2

console = Console(highlight=False, width=None if Console().is_terminal else 110)
Batch = dict[str, torch.Tensor]


def main() -> None:
    started = time.perf_counter()
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = make_batches(read_text())
    first = next(batches)
    console.rule(f"Plan {BUDGET_GB} GB for {parameters(model):.1f} M parameters and {SEQUENCES}×{TOKENS} bytes a step")
    exact = {"precision": "fp32", "allow": {"recompute", "reinplace"}}  # bitwise the plain model's numbers
    memopt.optimize(model, BUDGET_GB, example_inputs=first, optimizer=optimizer, **exact)
    show_plan(memopt.plan_of(model))
    console.rule(f"Train {STEPS} steps")
    peak_bytes = train(model, optimizer, batches)
    console.rule("Compare with the plain model, from the state that the training has reached")
    comparison = memopt.compare(model, first)
    console.print(comparison.table(), markup=False)
    console.rule("Result")
    show_result(peak_bytes, comparison)
    console.print(f"{time.perf_counter() - started:.0f} seconds in all")


def make_model() -> GPT2LMHeadModel:
    """GPT-2 of 6 layers, width 384, over bytes; random weights, and dropout of 0.1 as the configuration has it."""
    config = GPT2Config(
        vocab_size=256,
        n_positions=TOKENS,
        n_embd=384,
        n_layer=6,
        n_head=6,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"  # as it would be anyway, after a warning
    return model


def parameters(model: torch.nn.Module) -> float:
    return sum(parameter.numel() for parameter in model.parameters()) / 1e6


def read_text() -> bytes:
    """Return text that every Python ships: its language reference and sources of its library, on one line."""
    sources = (inspect.getsource(module) for module in (argparse, inspect, random))
    return " ".join(" ".join([*topics.values(), *sources]).split()).encode()


def make_batches(text: bytes) -> Iterator[Batch]:
    """Yield batches of random places of the text, a byte a token; GPT-2 shifts the labels itself."""
    places = random.Random(0)
    while True:
        starts = [places.randrange(len(text) - TOKENS) for _ in range(SEQUENCES)]
        tokens = torch.tensor([list(text[start : start + TOKENS]) for start in starts])
        yield {"input_ids": tokens, "labels": tokens}


def show_plan(plan: memopt.Plan) -> None:
    console.print(plan.table(), markup=False)
    console.print(
        f"predicted peak {plan.predicted_peak_gb:.4f} GB, with nothing recomputed {plan.plain_peak_gb:.4f} GB"
    )
    console.print(f"added time {plan.added_time:.1%}, and no plan within the budget adds less than {plan.bound:.1%}")
    console.print(f"change of the graph (plan.diff()): {plan.diff().summary()}")
    console.print(f"smallest budget {plan.smallest_gb():.4f} GB")
    try:
        plan.at(TOO_SMALL_GB)
    except memopt.BudgetError as refusal:
        console.print(f"BudgetError: {refusal.sentence}")


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[Batch]) -> int:
    """Train; return the most bytes that a measured step held: the first, which compiles, and every fourth."""
    first_loss, peak_bytes = measured_step(model, optimizer, next(batches))
    report("step       1", [first_loss], peak_bytes)
    losses: list[float] = []
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("training", total=STEPS, completed=1)
        for step in range(2, STEPS + 1):
            if step % 4:
                losses.append(train_step(model, optimizer, next(batches)))
            else:
                loss, step_bytes = measured_step(model, optimizer, next(batches))
                losses, peak_bytes = [*losses[-3:], loss], max(peak_bytes, step_bytes)
                report(f"steps to {step:3}", losses, peak_bytes)
            progress.advance(task)
    return peak_bytes


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    """Take a step as without memopt; return its loss."""
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def measured_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> tuple[float, int]:
    """Take a step; return its loss and the most bytes that the process held. Measuring makes it slower."""
    with memopt.measure_peak() as peak:
        loss = train_step(model, optimizer, batch)
    return loss, peak.bytes


def report(steps: str, losses: list[float], peak_bytes: int) -> None:
    """Print the mean of the latest losses, and the highest peak so far."""
    console.print(f"{steps}   loss {sum(losses) / len(losses):.3f}   peak {peak_bytes / 1024**3:.4f} GB")


def show_result(peak_bytes: int, comparison: memopt.Comparison) -> None:
    """Raises `SystemExit` where a promise is broken."""
    peak_gb, plain_gb = peak_bytes / 1024**3, comparison.plain.peak_gb
    console.print(f"measured peak of the training: {peak_gb:.4f} GB, of a budget of {BUDGET_GB} GB")
    console.print(f"measured peak of a plain step:  {plain_gb:.4f} GB")
    console.print(f"loss and gradients bitwise those of the plain model: {'yes' if comparison.bitwise else 'no'}")
    if max(peak_gb, comparison.optimized.peak_gb) > BUDGET_GB or not comparison.bitwise:
        raise SystemExit("the training broke its budget, or the gradients differ: please report it")


if __name__ == "__main__":
    main()
