"""Seconds until the first training step is done, planning included, beside torch.compile with "aot_eager".

    python -m benchmarks.first_step [--only GPT-2] [--ways torch exact-ahead] [--repeats 3]
    python -m benchmarks.first_step --tree /path/to/another/checkout    # measures the memopt of that folder

GPT-2 of 12 layers (124 M parameters), a Llama of 16 layers of width 512, and this Llama with low-rank adapters and
checkpointed blocks, random weights, fp32, one sequence of 256 tokens, one thread. A step is a forward and a backward.
Each way runs in a process of its own that starts without kept plans; importing torch and transformers and building the
model are not counted, `import memopt` is not either.

    plain          the model as it is
    torch          torch.compile(model, backend="aot_eager")
    exact-ahead    memopt.optimize with example_inputs, fp32, recompute and reinplace alone; then the step
    exact-lazy     the same without example_inputs: the step itself plans
    default-ahead  memopt.optimize with example_inputs and its default options; then the step
    default-lazy   the same without example_inputs

memopt runs plain operators (backend "aten") within a budget half-way between the smallest that works and the peak with
nothing recomputed, which a process before these finds (and compiles the solver, if that is still to be done).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "first_step.json"
EXACT = {"precision": "fp32", "allow": {"recompute", "reinplace"}}
WAYS = ("plain", "torch", "exact-ahead", "exact-lazy", "default-ahead", "default-lazy")
TOKENS = 256


@dataclass(frozen=True)
class FirstStep:
    """Median seconds of the first step of one model, run in one way."""

    model: str
    way: str
    cpu_seconds: float
    wall_seconds: float
    second_step_seconds: float
    """CPU seconds of the step after, in which nothing is compiled or planned."""
    of_torch_cpu: float | None = None
    """`cpu_seconds` over those of "torch" in this run."""
    of_torch_wall: float | None = None
    budget_gb: float | None = None


def gpt2() -> Any:
    """GPT-2 as published: 12 layers of width 768, 124 M parameters."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(use_cache=False))


def llama() -> Any:
    """A Llama of 16 layers, 512 wide."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000, hidden_size=512, intermediate_size=1408, num_hidden_layers=16, num_attention_heads=8,
        num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def llama_with_adapters() -> Any:
    """That Llama with low-rank adapters, checkpointed blocks and an input-gradient hook, as PEFT sets it up."""
    from examples.models.adapters import with_adapters

    return with_adapters(llama())


MODELS: dict[str, Callable[[], Any]] = {"GPT-2": gpt2, "Llama": llama, "Llama-LoRA": llama_with_adapters}


def model_and_batch(name: str) -> tuple[Any, dict[str, Any]]:
    """Return a model in train mode that gives its loss, and its batch."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = MODELS[name]().train()
    model.loss_type = "ForCausalLM"  # Left to itself the library looks it up with a warning that breaks the graph.
    tokens = torch.randint(0, model.config.vocab_size, (1, TOKENS))
    return model, {"input_ids": tokens, "labels": tokens}


def cpu_seconds() -> float:
    """Return the processor time of this process and of those that it started and that have ended."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(item.ru_utime + item.ru_stime for item in usage)


def measure(name: str, way: str, budget_gb: float) -> dict[str, float]:
    """Return the seconds of the first and the second step in this process."""
    model, batch = model_and_batch(name)
    import memopt

    call: Any = model
    cpu, wall = cpu_seconds(), time.perf_counter()
    if way == "torch":
        import torch

        call = torch.compile(model, backend="aot_eager")
    elif way != "plain":
        options, when = way.split("-")
        inputs = {"example_inputs": batch} if when == "ahead" else {}
        exact: dict[str, Any] = EXACT if options == "exact" else {}
        memopt.optimize(model, budget_gb, optimizer=None, backend="aten", **inputs, **exact)
    call(**batch).loss.backward()
    first = cpu_seconds() - cpu, time.perf_counter() - wall
    model.zero_grad()
    cpu = cpu_seconds()
    call(**batch).loss.backward()
    return {"cpu": first[0], "wall": first[1], "second": cpu_seconds() - cpu}


def budget(name: str) -> dict[str, float]:
    """Return a budget in GB half-way between the smallest that works and the peak with nothing recomputed."""
    model, batch = model_and_batch(name)
    import memopt

    plan = memopt.plan(model, 1000, batch, optimizer=None, precision="fp32", allow={"recompute", "reinplace"})
    return {"budget_gb": (plan.smallest_gb() + plan.plain_peak_gb) / 2}


def in_a_process(tree: Path, *arguments: str) -> dict[str, float]:
    """Run this file in a new process that takes memopt from `tree`, with an empty folder for plans."""
    code = f"import sys; sys.path.insert(0, {str(tree)!r}); import runpy; runpy.run_path({__file__!r}, {{}}, 'child')"
    with tempfile.TemporaryDirectory() as folder:
        surroundings = {**os.environ, "MEMOPT_CACHE_DIR": folder, "OMP_NUM_THREADS": "1"}
        surroundings.pop("PYTHONDONTWRITEBYTECODE", None)  # installed packages have their bytecode
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], check=True, stdout=subprocess.PIPE, env=surroundings, text=True,
            cwd=tree,
        )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def compare(name: str, ways: list[str], tree: Path, repeats: int, budget_gb: float | None) -> list[FirstStep]:
    """Measure all ways of one model, each in `repeats` processes: in turn, so that noise of the machine is shared."""
    limit_gb = budget_gb or in_a_process(tree, "budget", name)["budget_gb"]
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way in ways:
            runs[way].append(in_a_process(tree, "measure", name, way, str(limit_gb)))
            print(name, way, runs[way][-1], file=sys.stderr, flush=True)
    rows: list[FirstStep] = []
    for way in ways:
        cpu, wall, second = (statistics.median(run[key] for run in runs[way]) for key in ("cpu", "wall", "second"))
        torch_row = next((row for row in rows if row.way == "torch"), None)
        ratios = (cpu / torch_row.cpu_seconds, wall / torch_row.wall_seconds) if torch_row else (None, None)
        rows.append(FirstStep(name, way, cpu, wall, second, *ratios, None if way in ("plain", "torch") else limit_gb))
    return rows


def show(rows: list[FirstStep]) -> None:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Seconds until the first step is done, planning included", title_justify="left")
    for column in ("model", "way", "CPU s", "wall s", "of torch's CPU", "of torch's wall", "second step, CPU s"):
        table.add_column(column, justify="left" if column in ("model", "way") else "right")
    for row in rows:
        ratios = (f"{ratio:.2f}" if ratio else "–" for ratio in (row.of_torch_cpu, row.of_torch_wall))
        seconds = (f"{row.cpu_seconds:.1f}", f"{row.wall_seconds:.1f}", *ratios, f"{row.second_step_seconds:.2f}")
        table.add_row(row.model, row.way, *seconds)
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--repeats", type=int, default=1, help="processes of each way; the median is reported")
    parser.add_argument("--budget-gb", type=float, help="instead of half-way between smallest and plain peak")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the folder that memopt is imported from")
    parser.add_argument("--to", type=Path, default=RESULT, help="the result file; runs under other labels are kept")
    parser.add_argument("--label", default="now", help="the name of this run in the result file, such as 'before'")
    chosen = parser.parse_args()
    from benchmarks.stamp import stamp, write_result

    rows = [
        row
        for name in chosen.only
        for row in compare(name, chosen.ways, chosen.tree.resolve(), chosen.repeats, chosen.budget_gb)
    ]
    known = json.loads(chosen.to.read_text()) if chosen.to.exists() else {}
    write_result(chosen.to, {**known, chosen.label: {**stamp(), "rows": [asdict(row) for row in rows]}})
    show(rows)


def child() -> None:
    """Answer a parent process: one line of JSON."""
    task, name, *rest = sys.argv[1:]
    print(json.dumps(budget(name) if task == "budget" else measure(name, rest[0], float(rest[1]))))


if __name__ == "__main__":
    main()
elif __name__ == "child":
    child()
