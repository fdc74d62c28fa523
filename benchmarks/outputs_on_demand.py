"""Language models with a large vocabulary, default options: predicted and measured peaks in four loops, on the CPU.

    python -m benchmarks.outputs_on_demand [--only GPT-2] [--before]

For each model, two steps of AdamW in the smallest budget: by `TrainStep` (also half-way to the plain peak), by a plain
loop that drops the model's outputs, by one that holds them, and by the `Trainer` of transformers with both kinds of
AdamW, where its package accelerate is installed. `reads_bitwise`: whether a loop that reads the logits gets those of
the plain model, and its losses, in fp32 with recomputation alone. `--before` notes the smallest budgets of another tree
(this file run by its path, with PYTHONPATH set to that tree) beside those that are known.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import memopt
from benchmarks.stamp import stamp, write_result
from examples.models import language_models
from examples.models.language_models import CONFIGS, Batch, dropping, holding, peak_bytes
from memopt.errors import GIB

RESULT = Path(__file__).parent / "results" / "outputs_on_demand.json"
STEPS = 2


@dataclass(frozen=True)
class Row:
    model: str
    vocabulary: int
    loop: str
    budget_gb: float
    predicted_gb: float
    measured_gb: float
    over: float
    """Predicted over measured, less 1."""
    levers: tuple[str, ...]


def make(name: str) -> tuple[nn.Module, Batch]:
    return language_models.make(CONFIGS[name](), samples=4, length=128)


def reading(model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer) -> tuple[torch.Tensor, torch.Tensor]:
    outputs = model(**batch)
    logits = outputs.logits.detach().clone()
    outputs.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return outputs.loss.detach(), logits


LOOPS = {"loop, outputs dropped": dropping, "loop, outputs held": holding}


def smallest_gb(name: str) -> float:
    model, batch = make(name)
    try:
        memopt.plan(model, 1e-3, batch)
    except memopt.BudgetError as refused:
        return refused.smallest_gb
    raise AssertionError("a budget of a thousandth of a GB was met")


def plain_gb(name: str) -> float:
    """The peak with nothing recomputed. The model is gone afterwards, and not counted as memory elsewhere."""
    model, batch = make(name)
    return memopt.plan(model, 1000, batch).plain_peak_gb


def measured_gb(model: nn.Module, batch: Batch, steps: Callable[[], None]) -> float:
    gc.collect()
    return peak_bytes(model, batch, [steps]) / GIB


def by_loop(step: Callable[..., Any], model: nn.Module, batch: Batch) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters())

    def steps() -> None:
        for _ in range(STEPS):
            step(model, batch, optimizer)

    return steps


def by_train_step(model: nn.Module, batch: Batch) -> Callable[[], None]:
    step = memopt.TrainStep(model, torch.optim.AdamW(model.parameters()), max_grad_norm=None)

    def steps() -> None:
        for _ in range(STEPS):
            step(batch)

    return steps


def by_trainer(model: nn.Module, batch: Batch, optim: str = "adamw_torch") -> Callable[[], None]:
    """Hugging Face's `Trainer`, whose data loader gives the batch again and again, and whose optimizer decays matrices
    alone."""
    samples = [{key: value[row] for key, value in batch.items()} for row in range(4)] * STEPS
    arguments = transformers.TrainingArguments(
        tempfile.mkdtemp(), max_steps=STEPS, per_device_train_batch_size=4, use_cpu=True, report_to=[], max_grad_norm=0,
        save_strategy="no", logging_strategy="no", disable_tqdm=True, optim=optim,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=samples)
    return lambda: trainer.train() and None


def row_of(name: str, loop: str, budget_gb: float, steps_of: Callable[[nn.Module, Batch], Callable[[], None]]) -> Row:
    model, batch = make(name)
    memopt.optimize(model, budget_gb)
    measured = measured_gb(model, batch, steps_of(model, batch))
    plan = memopt.plan_of(model)
    predicted = plan.predicted_peak_gb
    return Row(
        name, model.config.vocab_size, loop, budget_gb, predicted, measured, predicted / measured - 1, plan.levers
    )


def reads_bitwise(name: str) -> bool:
    """Whether two steps that read logits give the plain model's losses and logits."""
    model, batch = make(name)
    plain = copy.deepcopy(model)
    exact: Any = {"precision": "fp32", "allow": {"recompute", "reinplace"}}
    memopt.optimize(model, 4.0, **exact)
    found = []
    for one in (model, plain):
        torch.manual_seed(1)
        optimizer = torch.optim.AdamW(one.parameters())
        found.append([tensor for _ in range(STEPS) for tensor in reading(one, batch, optimizer)])
    return all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


def rows_of(name: str, least: float, chosen: Sequence[str]) -> list[Row]:
    """The rows of a model whose smallest budget is `least`, for the loops that are chosen; for all if none is."""
    plain = plain_gb(name)
    loops: dict[str, Callable[[nn.Module, Batch], Callable[[], None]]] = {"TrainStep": by_train_step}
    for loop, step in LOOPS.items():
        loops[loop] = lambda model, batch, step=step: by_loop(step, model, batch)
    if find_spec("accelerate"):
        loops["Trainer"] = by_trainer
        loops["Trainer, fused AdamW"] = partial(by_trainer, optim="adamw_torch_fused")
    rows = []
    for budget_gb, some in ((1.001 * least, loops), ((least + plain) / 2, {"TrainStep": by_train_step})):
        for loop, steps_of in some.items():
            if chosen and loop not in chosen:
                continue
            rows.append(row_of(name, loop, budget_gb, steps_of))
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CONFIGS, default=list(CONFIGS))
    parser.add_argument("--loops", nargs="+", default=[], help="only these loops, in the smallest budget that is known")
    parser.add_argument("--before", action="store_true")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    known = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    smallest = known.get("smallest_gb", {})
    measured = () if arguments.before else arguments.only
    again = [*measured] if not arguments.loops else [(name, loop) for name in measured for loop in arguments.loops]
    rows = [row for row in known.get("rows", []) if not {row["model"], (row["model"], row["loop"])} & {*again}]
    for name in arguments.only:
        if arguments.loops:
            rows += [asdict(row) for row in rows_of(name, smallest[name]["now"], arguments.loops)]
            continue
        smallest.setdefault(name, {})["before" if arguments.before else "now"] = smallest_gb(name)
        if not arguments.before:
            smallest[name]["reads_bitwise"] = reads_bitwise(name)
            rows += [asdict(row) for row in rows_of(name, smallest[name]["now"], ())]
        print(name, smallest[name], flush=True)
    write_result(RESULT, {**stamp(), "smallest_gb": smallest, "rows": rows})


if __name__ == "__main__":
    main()
