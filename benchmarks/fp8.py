"""fp8 beside bf16 on Llama: what is kept for the backward, the time of a step, and what is learned; JSON and tables.

    python -m benchmarks.fp8 --small     # on a CPU, where 8-bit products are emulated: a small Llama, 200 steps
    python -m benchmarks.fp8             # on CUDA: Llama 3.2 1B, 500 steps
    python -m benchmarks.fp8 --only fp8  # bf16 and this mode; the figures of others remain in the file

Kept bytes: Llama 3.2 1B with 4 × 2,048 tokens, captured on fakes for an H100 with nothing recomputed, by the
plan's account; weights are copies of parameters in 16 or 8 bits. Training: the bytes of the demo's text, from one start
and on the same batches, by `memopt.TrainStep`; losses are the mean of the last 20 steps', and of what was held out.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn, optim
from transformers import LlamaConfig, LlamaForCausalLM

import memopt
from benchmarks.stamp import stamp, write_result
from examples.train_gpt2_within_budget import read_text
from memopt.capture.joint import JointGraph
from memopt.capture.on_fakes import capture_on_fakes
from memopt.device import hardware
from memopt.levers import lever_sets, levers_named, precision_rewriting
from memopt.planning.priced_step import PriceSettings, TracedStep
from memopt.planning.schedule_parts import held_after_forward
from memopt.rewrite.trace import trace_call
from memopt.solver import RematProblem, Schedule

RESULTS = Path(__file__).parent / "results"
MODES: dict[str, set[str]] = {
    "bf16": set(),
    "fp8": {"fp8"},
    "fp8 + activations": {"fp8", "fp8_activations"},
    "fp8_block + activations": {"fp8_block", "fp8_activations"},
    "mxfp8 + activations": {"mxfp8", "fp8_activations"},
}
LLAMA_1B = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip
SMALL = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
LAST = 20
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Kept:
    mode: str
    levers: tuple[str, ...]
    kept_gb: float
    """GB that the forward saves for the backward."""
    weights_gb: float
    """The part of `kept_gb` that is copies of parameters."""
    step_ms: float
    """Time of forward and backward, by the time model."""


@dataclass(frozen=True)
class Trained:
    mode: str
    levers: tuple[str, ...]
    loss: float
    held_out: float
    loss_ratio: float
    """The loss over that in bf16."""
    held_out_ratio: float
    kept_mb: float
    step_ms: float
    """The median of measured steps."""


def llama(sizes: dict[str, int], device: str) -> nn.Module:
    torch.manual_seed(0)
    with torch.device(device):
        model: nn.Module = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True, use_cache=False)).train()
    model.loss_type = "ForCausalLM"  # type: ignore[assignment]
    return model


def smallest(model: nn.Module, batch: Batch, **options: Any) -> float:
    """Return the smallest budget in GB with these levers; the plan there uses every lever that saves memory."""
    try:
        memopt.plan(model, 1e-6, batch, **options)
    except memopt.BudgetError as refusal:
        return refusal.smallest_bytes / 2**30 * (1 + 1e-6)
    raise AssertionError("a thousand bytes are no budget")


def keeps(sizes: Mapping[str, int], card: str = "h100") -> list[Kept]:
    """Return what a Llama saves for the backward in each mode: 4 × 2,048 tokens, with a chunked loss."""
    model = llama(dict(sizes), "meta")
    tokens = torch.zeros(4, 2048, dtype=torch.long)
    call = ((), {"input_ids": tokens, "labels": tokens})
    captured = capture_on_fakes(model, call, None, torch.device("cpu"), differentiate_all=False)
    found, planned_for = [], hardware(card)
    for mode, levers in MODES.items():
        base = precision_rewriting("bf16", planned_for)
        top = lever_sets(base, levers_named({"chunked_loss", *levers}), planned_for)[-1]
        regions = trace_call(captured, replace(top, needed=""))
        problem = TracedStep("Llama", regions).price(PriceSettings(planned_for)).problem.problem
        everything = Schedule.save_all(problem)
        weights = copies_of_parameters(regions[0], problem)
        gb = [held_after_forward(problem, everything) / 2**30, weights / 2**30]
        found.append(Kept(mode, top.levers, *(round(size, 3) for size in gb), round(1000 * problem.seconds, 2)))
    return found


def copies_of_parameters(region: JointGraph, problem: RematProblem) -> int:
    """Return the bytes of values that the forward computes from parameters alone and that the backward reads."""
    copies: set[torch.fx.Node] = set()
    for number, node in enumerate(region.module.graph.nodes):
        inputs = node.all_input_nodes
        if number in region.parameter_inputs or (inputs and copies.issuperset(inputs)):
            copies.add(node)
    names = {node.name for node in copies}
    forward, backward = problem.ops[: problem.forward_ops], problem.ops[problem.forward_ops :]
    read = {storage for op in backward for storage in op.reads}
    made = (storage for op in forward if op.name.partition(" of ")[0] in names for storage in op.makes)
    return sum(problem.storages[storage].bytes for storage in made if storage in read)


def kept(plan: memopt.Plan) -> int:
    assert plan.captured is not None
    assert plan.schedule is not None
    return held_after_forward(plan.joined.problem, plan.schedule)


def batches(length: int, size: int, device: str) -> tuple[Iterator[Batch], Batch]:
    """Return endless batches of random places of the text except its last tenth, and one batch of that tenth."""
    text = read_text()
    split = 9 * len(text) // 10

    def at(starts: list[int]) -> Batch:
        tokens = torch.tensor([list(text[start : start + length]) for start in starts], device=device)
        return {"input_ids": tokens, "labels": tokens}

    def draw() -> Iterator[Batch]:
        places = random.Random(0)
        while True:
            yield at([places.randrange(split - length) for _ in range(size)])

    return draw(), at([split + number * (len(text) - split - length) // 16 for number in range(16)])


def train(mode: str, small: bool, steps: int, bf16: Trained | None) -> Trained:
    device, sizes = ("cpu", SMALL) if small else ("cuda", LLAMA_1B)
    model = llama(sizes, device)
    drawn, held_out = batches(*((128, 8) if small else (2048, 4)), device)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3 if small else 2e-4)
    schedule = optim.lr_scheduler.OneCycleLR(optimizer, 1e-3 if small else 2e-4, total_steps=steps + 1)
    levers = MODES[mode] | (set() if small else {"chunked_loss"})
    options: dict[str, Any] = {"optimizer": optimizer, "precision": "bf16", "allow": levers}
    batch = next(drawn)
    budget_gb = smallest(model, batch, **options)
    memopt.optimize(model, budget_gb, **options, backend="aten" if small else "auto")
    step = memopt.TrainStep(model, optimizer, max_grad_norm=1.0, scheduler=schedule)
    losses, seconds = [], []
    for _ in range(steps):
        start = time.perf_counter()
        losses.append(float(step(batch).loss))
        seconds.append(time.perf_counter() - start)
        batch = next(drawn)
    model.eval()
    with torch.no_grad():
        last, tested = mean(losses[-LAST:]), float(model(**held_out).loss)
    plan = memopt.plan_of(model)
    ratios = (last / bf16.loss, tested / bf16.held_out) if bf16 else (1.0, 1.0)
    figures = (*(round(figure, 5) for figure in (last, tested, *ratios)), round(kept(plan) / 2**20, 3))
    return Trained(mode, plan.levers, *figures, round(1000 * median(seconds), 2))


def table(title: str, rows: list[Any]) -> Table:
    shown = Table(title=title, title_justify="left")
    for name in asdict(rows[0]):
        shown.add_column(name.replace("_", " "))
    for row in rows:
        shown.add_row(*(" ".join(cell) if isinstance(cell, tuple) else str(cell) for cell in asdict(row).values()))
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--only", nargs="+", choices=MODES, metavar="MODE", help="of " + ", ".join(MODES))
    chosen = parser.parse_args()
    if not chosen.small and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --small runs on the CPU")
    steps = chosen.steps or (200 if chosen.small else 500)
    accounts = keeps(LLAMA_1B)
    Console(width=140).print(table("Llama 3.2 1B, 4 x 2,048 tokens, planned for an H100", accounts))
    trained: list[Trained] = []
    for mode in [mode for mode in MODES if not chosen.only or mode in ("bf16", *chosen.only)]:
        trained.append(train(mode, chosen.small, steps, trained[0] if trained else None))
        Console(width=140).print(table(f"{steps} steps", trained))
    path = RESULTS / ("fp8_small.json" if chosen.small else "fp8.json")
    new = {row.mode: asdict(row) for row in trained}
    before = json.loads(path.read_text())["trained"] if path.exists() and chosen.only else []
    rows = {**{row["mode"]: row for row in before if row["mode"] in MODES}, **new}
    result = {**stamp(), "steps": steps, "kept": list(map(asdict, accounts)), "trained": list(rows.values())}
    write_result(path, result)


if __name__ == "__main__":
    main()
