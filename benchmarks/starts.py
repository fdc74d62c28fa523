"""The processor time to the plan of a model, by its number of blocks, beside the first step under torch.compile.

    python -m benchmarks.starts [--layers 6 12 24 48] [--models "Llama 8B" T5]

GPT-2s of a width of 64 with 128 tokens, as users plan them (default levers and precision), in a budget that needs a
plan: `plan_s` is `memopt.plan` ahead of the first step, nothing on disk; `aot_eager_s` the first step under
`torch.compile(backend="aot_eager")` in the same process, which records and differentiates alike and plans nothing.
`whole_s` is the plan with every block traced, as for blocks that are not equal. `second_size_s` is the step of the
first smaller batch in training without `example_inputs`, as users run it: it need not be planned at once.
`second_size_planned_s` is that where all calls are planned, so that sizes become symbols, and `second_size_whole_s` the
same with every block traced. One thread; seconds of processor time in a process for each row, in which a GPT-2 of one
block was planned before.

Models at their real sizes are made on the meta device, where nothing is computed, and planned for an H100 with plain
operators and AdamW: `plan_s` in the budget that lies a quarter of the way from the smallest to the plain step's peak,
`refusal_s` in one that is too small for any of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch import nn

import memopt
from benchmarks.card_models import card_models
from benchmarks.gpu_models import Candidate, library, text
from benchmarks.processes import record_of
from benchmarks.stamp import stamp, write_result

TOO_SMALL_GB = 0.01
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


def real_models() -> dict[str, Candidate]:
    """The models of `benchmarks.card_models`, a T5 and a mixture of experts, by name."""
    t5 = library("T5ForConditionalGeneration", transformers.T5Config(d_model=768, d_ff=3072, num_layers=12,
                 num_heads=12, decoder_start_token_id=0, use_cache=False), "ForMaskedLM")  # fmt: skip
    experts = library("Qwen3MoeForCausalLM", transformers.Qwen3MoeConfig(num_hidden_layers=12, use_cache=False,
                      experts_implementation="grouped_mm"), "ForCausalLM")  # fmt: skip
    more = (
        Candidate("T5", t5, text(32128, 512), 8, 512, "T5Block"),
        Candidate("Qwen3-MoE, 12 layers", experts, text(151936, 2048), 4, 2048, "Qwen3MoeDecoderLayer"),
    )
    return {**card_models("real"), **{candidate.name: candidate for candidate in more}}


def measure_real(name: str) -> dict[str, Any]:
    """The row of a model at its real size; to be called in a fresh process."""
    torch.set_num_threads(1)
    candidate, plans = real_models()[name], list[memopt.Plan]()
    options: dict[str, Any] = {"optimizer": torch.optim.AdamW, "device": "h100", "backend": "aten"}

    def timed(step: Callable[[nn.Module, dict[str, torch.Tensor]], object]) -> float:
        with torch.device("meta"):
            model, batch = candidate.make(), candidate.batch(candidate.size)
        began = time.process_time()
        step(model, batch)
        return time.process_time() - began

    def planned(budget_gb: float) -> float:
        return timed(lambda model, batch: plans.append(memopt.plan(model, budget_gb, batch, **options)))

    def refused(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
        with contextlib.suppress(memopt.BudgetError):
            memopt.plan(model, TOO_SMALL_GB, batch, **options)

    def first_step(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
        torch.compiler.reset()
        model.compile(backend="aot_eager")
        result = model(**batch)
        (result if isinstance(result, torch.Tensor) else result.loss).backward()

    plan_seconds(1)
    planned(10_000)
    least, plain = plans[0].smallest_gb(), plans[0].plain_peak_gb
    found = {"plan_s": planned(least + max(0.0, plain - least) / 4), "refusal_s": timed(refused)}
    return {"model": name, **found, "aot_eager_s": timed(first_step), "added_time": plans[-1].added_time}


def measure(layers: int) -> dict[str, Any]:
    """The row of one GPT-2; to be called in a fresh process."""
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
    parser.add_argument("--layers", type=int, nargs="*", default=LAYERS)
    parser.add_argument("--models", nargs="*", default=list(real_models()), metavar="NAME")
    parser.add_argument("--row", help="print the row of a GPT-2 with as many blocks, or of the model of that name")
    chosen = parser.parse_args()
    if chosen.row is not None:
        print(json.dumps(measure(int(chosen.row)) if chosen.row.isdecimal() else measure_real(chosen.row)))
        return
    rows = []
    for row in (*chosen.layers, *chosen.models):
        rows.append(record_of("starts", "--row", str(row), MEMOPT_CACHE="0", OMP_NUM_THREADS="1"))
        print(rows[-1], flush=True)
        write_result(RESULT, {**stamp(), "rows": rows})


if __name__ == "__main__":
    main()
