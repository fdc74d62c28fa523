"""What fits which card: the largest Llama and Qwen that trains, in full and with LoRA, and with which levers.

    python -m benchmarks.guide [--only Llama-3.1-8B] [--upto 8]

Planned on the meta device with the shapes of the published models, nothing is run: one sequence of 2,048 tokens at a
time (TrainStep accumulates), bf16 compute, AdamW, logits computed on demand only, no activation offloaded. In full:
fp32 parameters, gradients and state; LoRA: adapters of rank 16 on all linear layers of the blocks, a base in bf16.
For each model the smallest budget is found, with the levers that are on by default and with each combination of
levers on the optimizer. Writes `results/guide.json` model by model, and from all that is in there
`docs/guide.md`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from benchmarks.real_models import integers
from benchmarks.stamp import stamp, write_result
from memopt.errors import GIB, BudgetError
from memopt.levers import DEFAULT_LEVERS, OPTIMIZER_LEVERS
from memopt.planning.advice import with_low_rank
from memopt.planning.options import check_options
from memopt.run.session import Session

RESULT = Path(__file__).parent / "results" / "guide.json"
GUIDE = Path(__file__).parent.parent / "docs" / "guide.md"
CARDS = (8, 12, 16, 24, 40, 80, 141)
LENGTH = 2048
CARD = "h100"


def llama(hidden: int, intermediate: int, layers: int, heads: int, keys: int, *, tied: bool = False) -> nn.Module:
    config = LlamaConfig(
        vocab_size=128256, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=keys, tie_word_embeddings=tied, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def qwen(
    hidden: int, intermediate: int, layers: int, heads: int, keys: int, vocabulary: int = 152064, *, tied: bool = False
) -> nn.Module:
    config = Qwen2Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=keys, tie_word_embeddings=tied, use_cache=False,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


# As in the published configurations, by billions of parameters.
MODELS: dict[str, tuple[float, Callable[[], nn.Module]]] = {
    "Llama-3.2-1B": (1.24, lambda: llama(2048, 8192, 16, 32, 8, tied=True)),
    "Qwen2.5-1.5B": (1.54, lambda: qwen(1536, 8960, 28, 12, 2, 151936, tied=True)),
    "Qwen2.5-3B": (3.09, lambda: qwen(2048, 11008, 36, 16, 2, 151936, tied=True)),
    "Llama-3.2-3B": (3.21, lambda: llama(3072, 8192, 28, 24, 8, tied=True)),
    "Qwen2.5-7B": (7.62, lambda: qwen(3584, 18944, 28, 28, 4)),
    "Llama-3.1-8B": (8.03, lambda: llama(4096, 14336, 32, 32, 8)),
    "Qwen2.5-14B": (14.8, lambda: qwen(5120, 13824, 48, 40, 8)),
    "Qwen2.5-32B": (32.8, lambda: qwen(5120, 27648, 64, 40, 8)),
    "Llama-3.1-70B": (70.6, lambda: llama(8192, 28672, 80, 64, 8)),
    "Qwen2.5-72B": (72.7, lambda: qwen(8192, 29568, 80, 64, 8)),
}
EXACT = "exact levers"
HERE = DEFAULT_LEVERS - {"offload_activations"}
Needs = dict[str, float]
"""The smallest budget in GB of 1024³ bytes, by the levers that are allowed."""


def made(name: str, *, lora: bool) -> nn.Module:
    with torch.device("meta"):
        model = MODELS[name][1]()
    if lora:
        model, _ = with_low_rank(model.to(torch.bfloat16))
    model.loss_type = "ForCausalLM"  # type: ignore[assignment]
    return model.train()


def needs(name: str, *, lora: bool) -> Needs:
    """Return the smallest budgets of a step in GB: with default levers, and with combinations of optimizer levers."""
    allow = HERE if lora else HERE | OPTIMIZER_LEVERS
    batch = {"input_ids": integers(1, LENGTH), "labels": integers(1, LENGTH)}
    options = check_options(0.6, precision="bf16", allow=allow, device=CARD)
    try:
        Session(made(name, lora=lora), options).plan(batch, advise=False)
    except BudgetError as error:
        return {" + ".join(names) or EXACT: nbytes / GIB for names, nbytes in error.smallest_with.items()}
    raise AssertionError("0.6 GB fit")


def largest(found: dict[str, dict[str, Needs]], mode: str, card: float, *, exact: bool) -> Iterator[tuple[str, str]]:
    """Yield the largest model that fits a card, if any, with the fewest levers that make it fit."""
    for name in sorted(found, key=lambda model: -MODELS[model][0]):
        budgets = found[name].get(mode, {})
        fitting = [words for words, gb in budgets.items() if gb <= card and (words == EXACT or not exact)]
        if fitting:
            # What changes the training least: fewest proposals, and of those the one that needs least memory.
            yield name, min(fitting, key=lambda words: (words != EXACT, words.count("+"), budgets[words]))
            return


def guide(found: dict[str, dict[str, Needs]]) -> str:
    def cell(mode: str, card: float, *, exact: bool) -> str:
        words = next(largest(found, mode, card, exact=exact), None)
        if words is None:
            return "–"
        name, takes = words
        how = "" if takes == EXACT else f", {takes}"
        return f"{name} ({found[name][mode][takes]:.1f} GB{how})"

    lines = ["| card | in full, exact levers | in full, with proposals | LoRA, exact levers |", "|---|---|---|---|"]
    lines += [
        f"| {card} GB | {cell('full', card, exact=True)} | {cell('full', card, exact=False)} "
        f"| {cell('lora', card, exact=True)} |"
        for card in CARDS
    ]
    lines_of_models = ["| model | in full | with proposals | LoRA |", "|---|---|---|---|"]
    for name, modes in found.items():
        full, lora = modes["full"], modes["lora"]
        proposals = {words: gb for words, gb in full.items() if words != EXACT}
        least = min(proposals, key=proposals.__getitem__)
        lines_of_models.append(f"| {name} | {full[EXACT]:.1f} | {proposals[least]:.1f} ({least}) | {lora[EXACT]:.1f} |")
    assert __doc__ is not None
    how = " ".join(__doc__.split("\n\n")[2].split("For each")[0].split())
    parts = [
        "# What fits which card",
        f"Written by `python -m benchmarks.guide`: do not edit. {how} Of each size up to the card's the largest model "
        "is named, with the smallest budget in GB of 1024³ bytes that has a plan, CUDA context included. Proposals "
        "are used only where `allow` names them; with offload_optimizer the host holds 8 bytes a parameter, 2 with "
        "low_bit_optimizer too.",
        "\n".join(lines),
        "The smallest budget of each model, in GB:",
        "\n".join(lines_of_models),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--upto", type=float, default=1000, help="billions of parameters")
    chosen = parser.parse_args()
    found: dict[str, dict[str, Needs]] = json.loads(RESULT.read_text())["models"] if RESULT.exists() else {}
    for name in chosen.only:
        if MODELS[name][0] <= chosen.upto:
            start = time.perf_counter()
            found[name] = {mode: needs(name, lora=mode == "lora") for mode in ("full", "lora")}
            print(name, f"{time.perf_counter() - start:.0f} s", found[name], file=sys.stderr, flush=True)
            found = {model: found[model] for model in MODELS if model in found}
            write_result(RESULT, {**stamp(), "models": found})
            GUIDE.write_text(guide(found))
    print(GUIDE.read_text())


if __name__ == "__main__":
    main()
