"""The processor time that memopt takes in a step beside the operators, by models of several depths.

    python -m benchmarks.host_time [--steps 60]

GPT-2s so narrow that the time of a step is nearly all Python and dispatch: planned in a budget in which nothing is
recomputed, beside the plain model and torch.compile(backend="aot_eager"), one thread, fp32, steps of the three in turn;
medians of processor time. `host_ms` is what `memopt.price.price` says of the
difference between memopt and plain; `fit` is the line through those differences.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

import memopt
from benchmarks.stamp import stamp, write_result
from memopt.price.price import host_seconds

RESULT = Path(__file__).parent / "results" / "host_time.json"
LAYERS = (1, 2, 4, 8, 16)


def make(layers: int) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=32, n_layer=layers, n_head=4, vocab_size=256, use_cache=False, bos_token_id=1, eos_token_id=2
    )
    model: Any = transformers.GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"  # as it would be anyway, after a warning
    return model  # type: ignore[no-any-return]


def step_seconds(model: nn.Module, batch: dict[str, torch.Tensor]) -> float:
    began = time.process_time()
    model(**batch).loss.backward()
    for parameter in model.parameters():
        parameter.grad = None
    return time.process_time() - began


def measure(layers: int, steps: int) -> dict[str, Any]:
    plain = make(layers)
    planned, compiled = copy.deepcopy(plain), copy.deepcopy(plain)
    memopt.optimize(planned, 1000, precision="fp32", allow={"recompute", "reinplace"})
    compiled.compile(backend="aot_eager")
    tokens = torch.randint(0, 256, (2, 16))
    batch = {"input_ids": tokens, "labels": tokens}
    models = {"plain_ms": plain, "aot_eager_ms": compiled, "memopt_ms": planned}
    for model in models.values():
        for _ in range(5):
            step_seconds(model, batch)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(steps):
        for name, model in models.items():
            seconds[name].append(step_seconds(model, batch))
    parameters = len(list(plain.parameters()))
    medians = {name: 1e3 * statistics.median(times) for name, times in seconds.items()}
    return {"layers": layers, "parameters": parameters, **medians, "host_ms": 1e3 * host_seconds(1, parameters)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    chosen = parser.parse_args()
    os.environ["MEMOPT_PLAN"] = "always"  # the plain steps would fit
    torch.set_num_threads(1)
    rows = []
    for layers in LAYERS:
        rows.append(measure(layers, chosen.steps))
        print(rows[-1], flush=True)
    taken = [row["memopt_ms"] - row["plain_ms"] for row in rows]
    slope, constant = np.polyfit([row["parameters"] for row in rows], taken, 1)
    fit = {"call_ms": float(constant), "gradient_ms": float(slope)}
    write_result(RESULT, {**stamp(), "fit": fit, "rows": rows})
    print(fit)


if __name__ == "__main__":
    main()
