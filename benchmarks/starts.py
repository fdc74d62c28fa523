"""The processor time to the plan of a model, by its number of blocks, beside the first step under torch.compile.

    python -m benchmarks.starts [--layers 6 12 24 48]

GPT-2s of a width of 64 with 128 tokens, as users plan them (default levers and precision), in a budget that needs a
plan: `plan_s` is `memopt.plan` ahead of the first step, nothing on disk; `aot_eager_s` the first step under
`torch.compile(backend="aot_eager")` in the same process, which records and differentiates alike and plans nothing.
`whole_s` is the plan with every block traced, as for blocks that are not equal. `second_size_s` is the step of the
first smaller batch in training without `example_inputs`, as users run it: it need not be planned at once.
`second_size_planned_s` is that where all calls are planned, so that sizes become symbols, and `second_size_whole_s` the
same with every block traced. One thread; seconds of processor time in a process for each row, in which a GPT-2 of one
block was planned before.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch import nn

import memopt
from benchmarks.stamp import stamp, write_result

RESULT = Path(__file__).parent / "results" / "starts.json"
LAYERS = (6, 12, 24, 48)


def make(layers: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = transformers.GPT2Config(
        vocab_size=256, n_positions=128, n_embd=64, n_layer=layers, n_head=2, bos_token_id=1, eos_token_id=2
    )
    model: Any = transformers.GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"  # as it would be anyway, after a warning
    return model, dict.fromkeys(("input_ids", "labels"), torch.randint(0, 256, (4, 128)))


def plan_seconds(layers: int) -> float:
    model, batch = make(layers)
    began = time.process_time()
    memopt.plan(model, 0.01 + layers / 300, batch)
    return time.process_time() - began


def first_step_seconds(layers: int) -> float:
    torch.compiler.reset()
    model, batch = make(layers)
    model.compile(backend="aot_eager")
    began = time.process_time()
    model(**batch).loss.backward()
    return time.process_time() - began


def second_size_seconds(layers: int, wanted: str) -> float:
    model, batch = make(layers)
    with mock.patch.dict(os.environ, {"MEMOPT_PLAN": wanted}):
        memopt.optimize(model, 0.01 + layers / 300, optimizer=torch.optim.AdamW)
    model(**batch).loss.backward()
    began = time.process_time()
    model(**{name: given[:3] for name, given in batch.items()}).loss.backward()
    return time.process_time() - began


def measure(layers: int) -> dict[str, Any]:
    """The row of one model; to be called in a fresh process."""
    torch.set_num_threads(1)
    plan_seconds(1)
    planned, second = plan_seconds(layers), second_size_seconds(layers, "")
    second_planned = second_size_seconds(layers, "always")
    with mock.patch("memopt.capture.stamp.find_runs", return_value=()):
        whole, second_whole = plan_seconds(layers), second_size_seconds(layers, "always")
    compiled = first_step_seconds(layers)
    seconds = {"plan_s": planned, "whole_s": whole, "aot_eager_s": compiled, "ratio": planned / compiled}
    sizes = {"second_size_s": second, "second_size_planned_s": second_planned, "second_size_whole_s": second_whole}
    return {"layers": layers, **seconds, **sizes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    parser.add_argument("--row", type=int, help="print the row of a GPT-2 with as many blocks")
    chosen = parser.parse_args()
    if chosen.row is not None:
        print(json.dumps(measure(chosen.row)))
        return
    environment = {**os.environ, "MEMOPT_CACHE": "0", "OMP_NUM_THREADS": "1"}
    rows = []
    for layers in chosen.layers:
        command = [sys.executable, "-m", "benchmarks.starts", "--row", str(layers)]
        printed = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
        rows.append(json.loads(printed.splitlines()[-1]))
        print(rows[-1], flush=True)
        write_result(RESULT, {**stamp(), "rows": rows})


if __name__ == "__main__":
    main()
