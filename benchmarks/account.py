"""The account of whole training steps, predicted against measured, row by row: JSON and a table.

    python -m benchmarks.account [--only Llama] [--check]

Six models of Hugging Face in fp32 on the CPU, each with six optimizers, in three ways: "roomy", with room for all that
the plain step holds; "zeroed", the same with gradients kept from step to step and zeroed; "tight", halfway between the
smallest budget that works and the plain step's peak, so that much is recomputed. The optimizer is planned from its
class and options before it exists; the step that is measured is the second (third where gradients are kept). `--check`
fails where a row is more than 2% off, or the total more than 1% or too low. The error of a row below a
thousandth of the peak is taken relative to that thousandth.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import nn

import memopt
from benchmarks.stamp import stamp, write_result
from memopt.checks.check import AccountCheck, AccountRow, check

RESULT = Path(__file__).parent / "results" / "account.json"
ROOMY_GB = 1000.0
TIGHT_SHARE = 0.5

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW foreach": partial(torch.optim.AdamW, foreach=True),
    "AdamW fused": partial(torch.optim.AdamW, fused=True),
    "AdamW for-loop": partial(torch.optim.AdamW, foreach=False),
    "SGD": partial(torch.optim.SGD, lr=1e-3),
    "SGD momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "Adafactor": torch.optim.Adafactor,
}

DECODER: dict[str, Any] = {
    "vocab_size": 16000,
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "use_cache": False,
}
ENCODER: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
}


def library(kind: str, head: str, loss: str | None = None, **config: Any) -> Callable[[], nn.Module]:
    """A Hugging Face model from its configuration; the loss is chosen by name, since looking it up breaks the graph."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        model: nn.Module = getattr(transformers, head)(getattr(transformers, f"{kind}Config")(**config))
        if loss is not None:
            model.loss_type = loss  # type: ignore[assignment]
        return model.train()

    return make


def tokens(samples: int, length: int, vocabulary: int = 16000) -> dict[str, torch.Tensor]:
    drawn = torch.randint(0, vocabulary, (samples, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": drawn, "labels": drawn}


def images(samples: int, side: int) -> dict[str, torch.Tensor]:
    drawn = torch.randn(samples, 3, side, side, generator=torch.Generator().manual_seed(1))
    return {"pixel_values": drawn, "labels": torch.arange(samples) % 10}


CLASSES: dict[str, Any] = {"num_labels": 10, "problem_type": "single_label_classification"}
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, torch.Tensor]]] = {
    "GPT-2": (
        library("GPT2", "GPT2LMHeadModel", "ForCausalLM", vocab_size=16000, n_embd=512, n_layer=4, n_head=8,
                use_cache=False),
        tokens(2, 256),
    ),
    "Llama": (
        library("Llama", "LlamaForCausalLM", "ForCausalLM", intermediate_size=1408, num_key_value_heads=4, **DECODER),
        tokens(2, 256),
    ),
    "BERT": (library("Bert", "BertForMaskedLM", vocab_size=16000, **ENCODER), tokens(2, 256)),
    "ViT": (
        library("ViT", "ViTForImageClassification", "ForSequenceClassification", **ENCODER, **CLASSES),
        images(10, 224),
    ),
    "ResNet": (
        library("ResNet", "ResNetForImageClassification", "ForSequenceClassification", depths=[2, 2, 2, 2], **CLASSES),
        images(10, 128),
    ),
    "T5": (
        library("T5", "T5ForConditionalGeneration", vocab_size=16000, d_model=512, d_kv=64, d_ff=2048, num_layers=2,
                num_heads=8, decoder_start_token_id=0, use_cache=False),
        tokens(2, 256),
    ),
}  # fmt: skip


def checks(name: str) -> Iterator[tuple[str, str, AccountCheck]]:
    """Yield for every optimizer and way their names and the checked account of the step."""
    make, batch = MODELS[name]
    model = make()
    for called, make_optimizer in OPTIMIZERS.items():
        plan = memopt.plan(model, ROOMY_GB, batch, optimizer=make_optimizer, precision="fp32")
        tight_gb = plan.smallest_gb() + TIGHT_SHARE * (plan.plain_peak_gb - plan.smallest_gb())
        for way, budget_gb in {"roomy": ROOMY_GB, "zeroed": ROOMY_GB, "tight": tight_gb}.items():
            memopt.optimize(model, budget_gb, optimizer=make_optimizer, precision="fp32")
            found = check(model, make_optimizer(model.parameters()), batch, set_to_none=way != "zeroed")
            memopt.remove(model)
            yield called, way, found


def off(row: AccountRow, peak_bytes: int) -> float:
    """Return a row's error as a fraction of the measured bytes, or of a thousandth of the peak where that is larger."""
    return row.difference_bytes / max(row.measured_bytes, peak_bytes / 1000)


def holds(found: AccountCheck) -> bool:
    peak = found.total.measured_bytes
    return all(abs(off(row, peak)) <= 0.02 for row in found.rows) and 0 <= found.total.difference <= 0.01


def as_json(name: str, optimizer: str, way: str, found: AccountCheck) -> dict[str, Any]:
    rows = {row.name: [row.predicted_bytes, row.measured_bytes] for row in (*found.rows, found.total)}
    return {"model": name, "optimizer": optimizer, "way": way, "holds": holds(found), "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MODELS)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    started, runs, failed = time.monotonic(), [], 0
    table = Table(title="Predicted against measured: the total, and the row that is furthest off")
    for column in ("model", "optimizer", "way", "peak MB", "total off", "worst row", "off", "holds"):
        table.add_column(column, justify="left" if column in ("model", "optimizer", "worst row") else "right")
    for name in [options.only] if options.only else MODELS:
        for called, way, found in checks(name):
            peak = found.total.measured_bytes
            worst = max(found.rows, key=lambda row: abs(off(row, peak)))
            cells = (f"{peak / 2**20:.1f}", f"{found.total.difference:+.3%}", worst.name, f"{off(worst, peak):+.3%}")
            table.add_row(name, called, way, *cells, "yes" if holds(found) else "NO")
            print(name, called, way, *cells, f"{time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
            runs.append(as_json(name, called, way, found))
            failed += not holds(found)
    Console(width=120).print(table)
    result = {**stamp(), "runs": runs}
    if not options.only:
        write_result(RESULT, result)
    if options.check and failed:
        sys.exit(f"{failed} of {len(runs)} steps are off")


if __name__ == "__main__":
    main()
