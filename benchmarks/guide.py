"""What fits which card: the largest Llama and Qwen that trains, in full and with LoRA, and with which levers.

    python -m benchmarks.guide [--only Llama-3.1-8B] [--upto 8] [--ways host qlora]

Planned on the meta device with the shapes of the published models, nothing is run: one sequence of 2,048 tokens at a
time (TrainStep accumulates), bf16 compute, AdamW, logits computed on demand only, no activation offloaded. In full:
fp32 parameters, gradients and state; LoRA: adapters of rank 16 on all linear layers of the blocks, a base in bf16, on
the card or in the host's memory ("offload_parameters"); QLoRA: the same on bitsandbytes' NF4 with quantised scales,
embedding and head in bf16. For each model the smallest budget is found, with the levers
that are on by default and with each combination of levers on the optimizer. Writes `results/guide.json` model by
model, and from all that is in there `docs/guide.md`.
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

import memopt
from benchmarks.real_models import integers
from benchmarks.stamp import stamp, write_result
from memopt.cli.names import on_meta, with_lora
from memopt.errors import GIB, BudgetError
from memopt.levers import DEFAULT_LEVERS, OPTIMIZER_LEVERS
from memopt.planning.advice import with_low_rank
from memopt.planning.options import check_options
from memopt.run.session import Session

RESULT = Path(__file__).parent / "results" / "guide.json"
GUIDE = Path(__file__).parent.parent / "docs" / "guide.md"
CARDS = (8, 12, 16, 24, 48, 80, 141)
LENGTH = 2048
LONGER = 8192
"""With the weights on the host, what longer sequences take is measured at this length, and is about linear between."""
PUBLISHED = (
    ("torchtune, 2 × 2,048 tokens, in full", 18.9, "Llama-3.1-8B", "full"),
    ("torchtune, 2 × 2,048 tokens, LoRA", 16.2, "Llama-3.1-8B", "lora"),
    ("Unsloth, 3B", 8.0, "Llama-3.2-3B", "lora"),
    ("Unsloth, 7B", 19.0, "Qwen2.5-7B", "lora"),
    ("Unsloth, 8B", 22.0, "Llama-3.1-8B", "lora"),
    ("Unsloth, 14B", 33.0, "Qwen2.5-14B", "lora"),
    ("Unsloth, 32B", 76.0, "Qwen2.5-32B", "lora"),
    ("Unsloth, 70B", 164.0, "Llama-3.1-70B", "lora"),
    ("Unsloth, 3B, 4 bits", 3.5, "Llama-3.2-3B", "qlora"),
    ("Unsloth, 7B, 4 bits", 5.0, "Qwen2.5-7B", "qlora"),
    ("Unsloth, 8B, 4 bits", 6.0, "Llama-3.1-8B", "qlora"),
    ("Unsloth, 14B, 4 bits", 8.5, "Qwen2.5-14B", "qlora"),
    ("Unsloth, 32B, 4 bits", 26.0, "Qwen2.5-32B", "qlora"),
    ("Unsloth, 70B, 4 bits", 41.0, "Llama-3.1-70B", "qlora"),
)
"""Figures of others in GB, each with the model and the way of this guide that are nearest to it."""
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
WAYS = ("full", "lora", "qlora", "host")
EXACT = "exact levers"
HERE = DEFAULT_LEVERS - {"offload_activations"}
Needs = dict[str, float]
"""The smallest budget in GB of 1024³ bytes, by the levers that are allowed."""


def made(name: str, way: str) -> nn.Module:
    with torch.device("meta"):
        model = MODELS[name][1]()
    if way == "qlora":
        model, _ = on_meta(with_lora(lambda: (model, None), 16, torch.bfloat16, packed=True))
    elif way != "full":
        model, _ = with_low_rank(model.to(torch.bfloat16))
    model.loss_type = "ForCausalLM"  # type: ignore[assignment]
    return model.train()


def needs(name: str, way: str) -> Needs:
    """Return the smallest budgets of a step in GB: with default levers, and with combinations of optimizer levers."""
    allow = HERE | OPTIMIZER_LEVERS if way == "full" else HERE
    batch = {"input_ids": integers(1, LENGTH), "labels": integers(1, LENGTH)}
    options = check_options(0.6, precision="bf16", allow=allow, device=CARD)
    try:
        Session(made(name, way), options).plan(batch, advise=False)
    except BudgetError as error:
        return {" + ".join(names) or EXACT: nbytes / GIB for names, nbytes in error.smallest_with.items()}
    raise AssertionError("0.6 GB fit")


def on_host(name: str, length: int) -> float:
    """Return the smallest budget in GB of a LoRA step of `length` tokens with the frozen weights on the host."""
    allow = HERE | {"offload_parameters"}
    batch = {"input_ids": integers(1, length), "labels": integers(1, length)}
    plan = memopt.plan(
        made(name, "host"), 4096, batch, precision="bf16", allow=allow, device=CARD, host_gb=1024, effort="fast"
    )
    assert plan.source is not None
    assert plan.source.tightest is not None
    return float(plan.source.tightest(1).smallest()[0]) / GIB


def lengths(budgets: Needs, card: float) -> str:
    """Return about how many tokens a LoRA step with its weights on the host may have on a card, in words."""
    short, long = budgets[str(LENGTH)], budgets[str(LONGER)]
    tokens = LENGTH + (card - short) * (LONGER - LENGTH) / (long - short)
    return "–" if tokens < LENGTH / 4 else f"{int(tokens) // 256 * 256:,}"


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

    lines = [
        "| card | in full, exact levers | in full, with proposals | LoRA, exact levers | QLoRA |",
        "|---" * 5 + "|",
    ]
    lines += [
        f"| {card} GB | {cell('full', card, exact=True)} | {cell('full', card, exact=False)} "
        f"| {cell('lora', card, exact=True)} | {cell('qlora', card, exact=True)} |"
        for card in CARDS
    ]
    lines_of_models = ["| model | in full | with proposals | LoRA | its base on the host | QLoRA |", "|---" * 6 + "|"]
    for name, modes in found.items():
        full, lora = modes["full"], modes["lora"]
        proposals = {words: gb for words, gb in full.items() if words != EXACT}
        least = min(proposals, key=proposals.__getitem__)
        there = f"{modes['host'][str(LENGTH)]:.1f}" if "host" in modes else "not run"
        packed = f"{modes['qlora'][EXACT]:.1f}" if "qlora" in modes else "not run"
        exact = f"{full[EXACT]:.1f} | {proposals[least]:.1f} ({least}) | {lora[EXACT]:.1f}"
        lines_of_models.append(f"| {name} | {exact} | {there} | {packed} |")
    hosted = {name: modes["host"] for name, modes in found.items() if "host" in modes}
    by_length = ["| model | " + " | ".join(f"{card} GB" for card in CARDS) + " |", "|---" * (1 + len(CARDS)) + "|"]
    by_length += [
        f"| {name} | {' | '.join(lengths(budgets, card) for card in CARDS)} |" for name, budgets in hosted.items()
    ]
    beside = ["| published | GB | here | GB | apart |", "|---|---|---|---|---|"]
    for words, published, name, mode in PUBLISHED:
        ways = found[name].get(mode, {})
        if not ways:
            continue
        here, how = ways[EXACT], "QLoRA" if mode == "qlora" else "LoRA"
        if mode == "full":
            how = min(ways, key=ways.__getitem__)
            here = ways[how]
        beside.append(f"| {words} | {published} | {name}, {how} | {here:.1f} | {here / published - 1:+.0%} |")
    assert __doc__ is not None
    how = " ".join(__doc__.split("\n\n")[2].split("For each")[0].split())
    parts = [
        "# What fits which card",
        f"Written by `python -m benchmarks.guide`: do not edit. {how} Of each size up to the card's the largest model "
        "is named, with the smallest budget in GB of 1024³ bytes that has a plan, CUDA context included. Proposals "
        "are used only where `allow` names them; with offload_optimizer the host holds 8 bytes a parameter, 2 with "
        "low_bit_optimizer too.",
        "\n".join(lines),
        f"With QLoRA, models of up to {max(MODELS[name][0] for name in found if 'qlora' in found[name]):.0f} billion "
        "parameters have been planned. The smallest budget of each model, in GB:",
        "\n".join(lines_of_models),
        "## LoRA with the base on the host",
        f'With `allow=memopt.DEFAULT_LEVERS | {{"offload_parameters"}}` the frozen weights lie in the host\'s '
        "memory, 2 bytes each, and are copied to the card before each use. About how many tokens a step may then "
        f"have, by card, from the smallest budgets at {LENGTH:,} and {LONGER:,} tokens:",
        "\n".join(by_length),
        "Where a card is just large enough, each weight is copied twice a step: at PCIe 4.0's 25 GB/s that is 1.3"
        " s for 8 billion. `memopt plan CONFIG --lora 16 --host-gb 64` says what bounds the step.",
        "## Beside published figures",
        "\n".join(beside),
        "torchtune's figures are those of its README of September 2024, of 2 sequences of 2,048 tokens; those"
        " of this guide have one sequence, with the CUDA context. Unsloth's are its table of requirements for"
        " LoRA in 16 bits, called an absolute minimum, without a length. Read as GB of 10⁹ bytes, they are 7%"
        " smaller than here, and all but those of 8B (-18%) and 70B (-10.2%) lie within 10%. The smallest "
        "plans recompute all that they can; what Unsloth holds beyond is not published. Its figures for 4 bits are "
        "about what the weights take by themselves (8B: 5.7 GB of 10⁹ bytes, of which embedding and head in bf16 "
        "are 2.1); here adapters with AdamW, the CUDA context and the step of a sequence come on top.",
        "A LoRA whose 16-bit base lies on the host takes less of the card than a 4-bit base on it, and more time. "
        "`memopt plan CONFIG --lora 16 --bits 4` plans a QLoRA of any model. Of mixtures of"
        " experts, axolotl#3787 has 6.00 GB with 4-bit experts on the card and 2.60 GB with experts streamed "
        "from the host (OLMoE-1B-7B, 256 tokens, the step 11% longer; at 2,048 tokens 5.84 and 4.11 GB, the "
        "step twice as long): no such 4-bit experts are built here, so that these figures have no counterpart"
        " yet.",
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--upto", type=float, default=1000, help="billions of parameters")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    chosen = parser.parse_args()
    found: dict[str, dict[str, Needs]] = json.loads(RESULT.read_text())["models"] if RESULT.exists() else {}
    for name in chosen.only:
        if MODELS[name][0] <= chosen.upto:
            start = time.perf_counter()
            ways = found.setdefault(name, {})
            for way in chosen.ways:
                if way == "host":
                    ways[way] = {str(length): on_host(name, length) for length in (LENGTH, LONGER)}
                else:
                    ways[way] = needs(name, way)
            print(name, f"{time.perf_counter() - start:.0f} s", found[name], file=sys.stderr, flush=True)
            found = {model: found[model] for model in MODELS if model in found}
            write_result(RESULT, {**stamp(), "models": found})
            GUIDE.write_text(guide(found))
    print(GUIDE.read_text())


if __name__ == "__main__":
    main()
