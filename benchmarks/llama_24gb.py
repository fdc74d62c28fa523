"""Llama on a card of 24 GB, planned on the meta device: LoRA on Llama-2-7B, and Llama-3-8B in full.

    python -m benchmarks.llama_24gb [--only full]

LoRA: rank 16 on every linear layer of the blocks, the base frozen in bfloat16, adapters in fp32 with AdamW. The static
sum (parameters, gradients, state) in GB of 10^9 bytes stands beside the article's 14.3 GB; `memopt.max_batch` finds the
largest batch of 2,048 tokens; no activation is offloaded. In full: bfloat16 parameters and AdamW, with what the
refusal says.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import memopt
from benchmarks.real_models import integers
from benchmarks.stamp import stamp, write_result
from memopt.errors import BudgetError
from memopt.levers import DEFAULT_LEVERS
from memopt.planning.advice import RANK, with_low_rank

RESULT = Path(__file__).parent / "results" / "llama_24gb.json"
CARD, CARD_GB, LENGTH = "rtx-4090", 24, 2048
ARTICLE_GB = 14.3
OPTIONS: dict[str, Any] = {
    "device": CARD,
    "optimizer": torch.optim.AdamW,
    "allow": DEFAULT_LEVERS - {"offload_activations"},
}
LLAMA_2_7B = LlamaConfig(
    vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
    use_cache=False,
)  # fmt: skip
LLAMA_3_8B = LlamaConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, use_cache=False,
)  # fmt: skip


def llama(config: LlamaConfig) -> nn.Module:
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.loss_type = "ForCausalLM"
    return model.to(torch.bfloat16).train()


def batch(samples: int) -> dict[str, Tensor]:
    return {"input_ids": integers(samples, LENGTH), "labels": integers(samples, LENGTH)}


def lora() -> dict[str, Any]:
    model, _ = with_low_rank(llama(LLAMA_2_7B), RANK)
    start = time.perf_counter()
    plan = memopt.plan(model, CARD_GB, batch(1), **OPTIONS)
    account = plan.account
    static_gb = (account.parameters + account.gradients + account.optimizer_state) / 1e9
    planned = time.perf_counter() - start
    print(f"static {static_gb:.2f} GB, batch 1 planned in {planned:.0f} s", file=sys.stderr, flush=True)
    largest = memopt.max_batch(model, CARD_GB, batch, **OPTIONS)
    last = memopt.plan(model, CARD_GB, batch(largest), **OPTIONS)
    return {
        "static_gb": static_gb,
        "article_gb": ARTICLE_GB,
        "largest_batch": largest,
        "peak_gb": last.predicted_peak_gb,
        "added_time": last.added_time,
        "largest_batch_30_percent_slower": memopt.max_batch(model, CARD_GB, batch, max_added_time=0.3, **OPTIONS),
        "levers": last.levers,
        "seconds": time.perf_counter() - start,
    }


def in_full() -> dict[str, Any]:
    model = llama(LLAMA_3_8B)
    try:
        plan = memopt.plan(model, CARD_GB, batch(1), **OPTIONS)
    except BudgetError as error:
        return {"refused": str(error), "smallest_gb": error.smallest_gb, "proposals": error.proposals}
    return {"peak_gb": plan.predicted_peak_gb, "receipt": [str(row) for row in plan.receipt]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("lora", "full"))
    only = parser.parse_args().only
    known = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    found = {name: known[name] for name in ("Llama-2-7B, LoRA", "Llama-3-8B, in full") if name in known}
    if only != "full":
        found["Llama-2-7B, LoRA"] = lora()
    if only != "lora":
        found["Llama-3-8B, in full"] = in_full()
    write_result(RESULT, {**stamp(), **found})
    table = Table(title=f"Planned for {CARD}, {CARD_GB} GB, sequences of {LENGTH}", title_justify="left")
    for column in ("model", "", ""):
        table.add_column(column, overflow="fold")
    for name, values in found.items():
        for key, value in values.items():
            table.add_row(name, key, f"{value:.3f}" if isinstance(value, float) else str(value))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
