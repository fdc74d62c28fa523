"""Ways to train beside each other on a CPU, ratio by ratio: what people use today, and memopt at the same peaks.

    python -m benchmarks.ways [--only "Llama 1B" U-Net] [--size tiny]

GPT-2, Llama, ViT, BERT, ResNet, U-Net, and a LongT5 whose forward breaks into regions, at sizes that take a CPU a
part of a second, fp32, AdamW, one thread: eager, by activation checkpoints, compiled, compiled with checkpoints and
within five activation budgets; then memopt by both backends: with room for all, at the checkpoints' measured peak, and
with half of what the compiled step holds beside parameters and the optimizer's state. Each way has a process and an
empty cache of compiled code of its own. All of them then take steps in turns, and begin at another one in each round,
so that what slows the machine slows all: a time is the median of a way's seconds of processor time. The first step is
counted from the untouched model on, with capture, plan and compilation.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

import memopt
from benchmarks.gpu_methods import Method, adamw, lasting_bytes, peers, within
from benchmarks.gpu_models import Candidate, Size, candidates, library, text
from benchmarks.report import ways as table_of
from benchmarks.stamp import stamp, write_result
from memopt.errors import GIB

RESULT = Path(__file__).parent / "results" / "ways.json"
ROOMY = "a budget for all"
BESIDE = {"aten": "eager, per block", "inductor": "compile, per block"}
"""For each backend of memopt the way whose peak is one of its budgets."""
HALF = "half of compile's"
ROOMY_GB, ROUNDS = 1000.0, 15
PEERS = {method.name: method for method in peers(small=False) if "second product" not in method.name}


def models(size: Size) -> Mapping[str, Candidate]:
    """The models by name: those of `benchmarks.gpu`, and one whose forward breaks into regions."""
    return {**candidates(size), "LongT5": long_t5(size)}


def long_t5(size: Size) -> Candidate:
    config = transformers.LongT5Config(
        encoder_attention_type="local",
        local_radius=31,
        dropout_rate=0.0,
        vocab_size=2000,
        **{"middle": MIDDLE_T5, "tiny": TINY_T5}[size],
    )
    make = library("LongT5ForConditionalGeneration", config, "ForConditionalGenerationLoss")
    samples = 8 if size == "middle" else 2
    return Candidate("LongT5", make, text(2000, 256), samples, tokens=512, block="LongT5Block")


TOKENS = {"decoder_start_token_id": 0, "pad_token_id": 0}
MIDDLE_T5: dict[str, Any] = {**TOKENS, "d_model": 256, "d_kv": 64, "d_ff": 1024, "num_layers": 4, "num_heads": 4}
TINY_T5: dict[str, Any] = {**TOKENS, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(models("tiny"))
    parser.add_argument("--only", nargs="+", choices=names, help="the rows of other models remain in the file")
    parser.add_argument("--size", choices=("middle", "tiny"), default="middle")
    parser.add_argument("--worker", nargs=3, metavar=("MODEL", "WAY", "GB"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        work(models(chosen.size)[chosen.worker[0]], chosen.worker[1], float(chosen.worker[2]))
        return
    torch.set_num_threads(1)  # for the stamp: as the processes of ways have it
    known = json.loads(RESULT.read_text())["rows"] if chosen.only and RESULT.exists() else []
    rows = [row for row in known if row["model"] not in (chosen.only or names)]
    for name in chosen.only or names:
        rows += compare(name, chosen.size)
        document = {**stamp(), "size": chosen.size, "rounds": ROUNDS, "rows": rows}
        write_result(RESULT, document)
    print(table_of(document))


def compare(model: str, size: str) -> list[dict[str, Any]]:
    """The rows of all ways for one model."""
    with contextlib.ExitStack() as stack:
        ways = [stack.enter_context(way_of(model, size, name, 0.0)) for name in PEERS]
        trained = {way.row["way"]: way.row for way in ways if "peak_gb" in way.row}
        budgets = [(backend, ROOMY, ROOMY_GB) for backend in BESIDE]
        budgets += [(backend, at, trained[at]["peak_gb"]) for backend, at in BESIDE.items() if at in trained]
        if compiled := trained.get("compile"):
            half = (compiled["peak_gb"] + compiled["held_gb"]) / 2
            budgets += [(backend, HALF, half) for backend in BESIDE]
        for backend, at, budget_gb in budgets:
            way = stack.enter_context(way_of(model, size, f"memopt ({backend})", budget_gb))
            way.row["at"] = at
            ways.append(way)
        running = [way for way in ways if "peak_gb" in way.row]
        seconds: dict[int, list[float]] = {id(way): [] for way in running}
        for number in range(ROUNDS):
            begin = number * 5 % len(running)
            for way in (*running[begin:], *running[:begin]):
                seconds[id(way)].append(way.step())
        for way in running:
            way.row["step_ms"] = 1e3 * statistics.median(seconds[id(way)])
        return [way.row for way in ways]


class Way:
    """A process that trains one way, step by step as it is asked; `row` has what it says of itself."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.row: dict[str, Any] = self._read()
        print(self.row, file=sys.stderr, flush=True)

    def _read(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:  # libraries print, too
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"a way ended with {self._process.wait()}")

    def step(self) -> float:
        """One step; its seconds of processor time."""
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        return float(self._read()["seconds"])


@contextlib.contextmanager
def way_of(model: str, size: str, name: str, budget_gb: float) -> Iterator[Way]:
    """A way that trains as long as the context lasts."""
    command = [sys.executable, "-m", "benchmarks.ways", "--size", size, "--worker", model, name, str(budget_gb)]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "MEMOPT_CACHE": "0", "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": folder}
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            yield Way(process)
        finally:
            process.kill()
            process.wait()


def work(candidate: Candidate, name: str, budget_gb: float) -> None:
    """Train one way: print its row, then take a step for each line that is read, and print its seconds."""
    torch.set_num_threads(1)
    row = {"model": candidate.name, "way": name} | ({"budget_gb": budget_gb} if budget_gb else {})
    model, batch = candidate.make(), candidate.batch(candidate.size)
    method = PEERS.get(name) or within(budget_gb, name.partition("(")[2].rstrip(")"), "fp32")
    try:
        step, figures = begun(method, candidate, model, batch)
    except (RuntimeError, ValueError, AssertionError) as failure:  # refused, or not to be compiled
        print(json.dumps({**row, "failure": f"{type(failure).__name__}: {str(failure)[:200]}"}), flush=True)
        return
    print(json.dumps({**row, **figures}), flush=True)
    for _ in sys.stdin:
        begin = time.process_time()
        step()
        print(json.dumps({"seconds": time.process_time() - begin}), flush=True)


def begun(method: Method, candidate: Candidate, model: torch.nn.Module, batch: Any) -> tuple[Any, dict[str, float]]:
    """A function that takes a step, warmed up, and the figures of its first steps: seconds, measured peak, and the
    bytes that last from step to step."""
    begin = time.process_time()
    method.prepare(model, candidate)
    optimizer = adamw(model)

    def step() -> None:
        with method.settings():
            optimizer.zero_grad()
            output = model(**batch)
            (output if isinstance(output, torch.Tensor) else output.loss).backward()
            optimizer.step()

    step()
    first = time.process_time() - begin
    step()
    gc.collect()
    with memopt.measure_peak("cpu") as peak:
        step()
    held = lasting_bytes(model, optimizer, batch)
    return step, {"first_s": first, "peak_gb": peak.bytes / GIB, "held_gb": held / GIB}


if __name__ == "__main__":
    main()
