"""Which lever next: one lever after the other, each with its picture of the memory over a step and its measured row.

    python -m benchmarks.levers [--only NAME ...]

Each lever is tried where it is needed: on a GPT-2 of 4 blocks, or a Llama with LoRA, with a batch of the kind that its
section names. A step is planned for the smallest budget that works without the lever, and for the smallest with it, and
both are run on a CPU with one thread, for three steps of AdamW on the same batch. Measured are the
processor's time (the least of the second and third step, as a share of that without the lever, in one process), how far
the loss of the third step is from that without the lever, and by `memopt.measure_peak` what a fourth step holds. Levers
that copy to host memory run with a simulated link: the CPU's memory stands for a card's, and buffers that would be
pinned, and an optimizer's state there, are not counted; their time says nothing of a card's, and is left out. Writes
`docs/which_lever.md`, `docs/pictures/levers/*.svg` and `results/levers.json`.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from matplotlib import rc_context
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import memopt
from benchmarks.pictures import AFTER, BEFORE, binned, blank
from benchmarks.processes import record_of
from benchmarks.stamp import stamp, write_result
from memopt.device import hardware_of
from memopt.meter import PeakMeter
from memopt.optimizers import OffloadedOptimizer
from memopt.planning import call_accounts, terms

ROOT = Path(__file__).parent.parent
PAGE, FOLDER = ROOT / "docs" / "which_lever.md", ROOT / "docs" / "pictures" / "levers"
RESULT = ROOT / "benchmarks" / "results" / "levers.json"
EXACT = frozenset({"recompute", "reinplace"})
STEPS, MB = 3, 2**20
LINKED, NARROW = "not of a card", "not of 16-bit kernels"
Batch = dict[str, torch.Tensor]


def gpt2(samples: int, length: int, **more: Any) -> tuple[nn.Module, Batch]:
    """A GPT-2 of 4 blocks, 256 wide, and tokens for it."""
    sizes = {"vocab_size": 2048, "n_positions": length, "n_embd": 256, "n_layer": 4, "n_head": 4, **more}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = GPT2LMHeadModel(GPT2Config(**sizes, **dropouts, use_cache=False, bos_token_id=0, eos_token_id=0))
    return model.train(), tokens(samples, length, int(sizes["vocab_size"]))


def lora(samples: int, length: int) -> tuple[nn.Module, Batch]:
    """A Llama of 4 blocks with the adapters of PEFT on its queries and values."""
    import peft

    config = LlamaConfig(
        vocab_size=2048, hidden_size=512, intermediate_size=2048, num_hidden_layers=4, num_attention_heads=8,
        use_cache=False,
    )  # fmt: skip
    adapters = peft.LoraConfig(r=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(LlamaForCausalLM(config), adapters).train(), tokens(samples, length, 2048)


def tokens(samples: int, length: int, vocabulary: int) -> Batch:
    ids = torch.randint(0, vocabulary, (samples, length))
    return {"input_ids": ids, "labels": ids}


@dataclass(frozen=True)
class Rung:
    """A lever, and the step in which it is needed."""

    when: str
    """The text of its section: the situation in which it helps, and what fills the memory there."""
    make: Callable[[], tuple[nn.Module, Batch]]
    step: str
    """The step in words."""
    allow: frozenset[str] = EXACT
    """The levers that are allowed beside it."""
    precision: str = "fp32"
    share: float | None = None
    """The budget as a share of the smallest without the lever; by default it is the smallest with it."""
    no_time: str = ""
    """Why its time is left out."""


RUNGS = {
    "recompute": Rung(
        "Activations that the forward saves fill the memory: long sequences, large batches, many blocks. It is on by "
        "default, comes first since it changes no bit, and costs time only as far as the budget needs. The row is for "
        "the smallest budget that works; larger ones cost less ([frontier.md](frontier.md)).",
        lambda: gpt2(4, 512), "4 × 512 tokens",
    ),
    "reinplace": Rung(
        "Always: it costs nothing. Gradients then take the place of what is not read again. On by default; backend "
        "'inductor' does it by itself.",
        lambda: gpt2(4, 512), "4 × 512 tokens",
    ),
    "precision": Rung(
        "You may round: `precision=\"bf16\"`, the default on a device that has it, halves what is saved and what lies "
        "between operators. Parameters and the optimizer's state stay in fp32. In this row nothing is recomputed.",
        lambda: gpt2(4, 512), "4 × 512 tokens", allow=frozenset({"reinplace"}), no_time=NARROW,
    ),
    "chunked_loss": Rung(
        "The peak is at the loss: a large vocabulary, whose logits are many times as wide as the model. On by default.",
        lambda: gpt2(2, 512, vocab_size=16384), "2 × 512 tokens, 16,384 words",
    ),
    "fused_attention": Rung(
        "The model writes attention out, and holds its probabilities, which grow with the square of the length. On by "
        "default.",
        lambda: gpt2(1, 1024, attn_implementation="eager"), "1 × 1,024 tokens, attention written out",
    ),
    "fused_ops": Rung(
        "GELU, SiLU or norms are written out in several operators, each of which saves something. On by default.",
        lambda: gpt2(4, 512), "4 × 512 tokens, GELU written out",
    ),
    "microbatch": Rung(
        "No plan of the whole batch fits, and `TrainStep` may split it. On by default for `TrainStep`; gradients are "
        "those of the whole batch but for rounding.",
        lambda: gpt2(8, 256), "8 × 256 tokens, 0.7 of the smallest budget", share=0.7,
    ),
    "tiles": Rung(
        "One sample is so long that the working set of a single MLP is the peak, which neither recomputation nor "
        "offloading makes smaller. Named in `allow`.",
        lambda: gpt2(1, 4096), "1 × 4,096 tokens",
    ),
    "optimizer_in_backward": Rung(
        "Parameters fill the memory, not activations: short sequences, small batches. Gradients then need not exist "
        "together. Named in `allow`; no clipping by the norm of all gradients.",
        lambda: gpt2(1, 64), "1 × 64 tokens",
    ),
    "low_bit_optimizer": Rung(
        "As before; Adam's state is twice the parameters, and 8 bits a value are enough for its moments. Named in "
        "`allow`.",
        lambda: gpt2(1, 64), "1 × 64 tokens",
    ),
    "bf16_parameters": Rung(
        "As before, and you may change how updates are rounded: parameters, gradients and state at half the bytes. "
        "Named in `allow`.",
        lambda: gpt2(1, 64), "1 × 64 tokens, bf16", precision="bf16", no_time=NARROW,
    ),
    "fp8": Rung(
        "What is saved in 16 bits still fills the memory, and you may round further: linear layers save their inputs "
        "in 8 bits, and multiply so. Named in `allow`; `fp8_delayed`, `fp8_block` and `mxfp8` scale otherwise. In this "
        "row nothing is recomputed.",
        lambda: gpt2(4, 512), "4 × 512 tokens, bf16, 0.9 of the smallest budget", allow=frozenset({"reinplace"}),
        precision="bf16", share=0.9, no_time=NARROW,
    ),
    "fp8_activations": Rung(
        "As before; operands of activation functions and products are saved in 8 bits, too. Named in `allow`. Both "
        "steps of this row have `fp8`, and nothing is recomputed.",
        lambda: gpt2(4, 512), "4 × 512 tokens, bf16", allow=frozenset({"reinplace", "fp8"}), precision="bf16",
        no_time=NARROW,
    ),
    "offload_activations": Rung(
        "The card is full, the host is not, and steps are long enough to hide the copies. On by default, on cards; the "
        "search weighs it against recomputation for each value. In this row nothing is recomputed.",
        lambda: gpt2(4, 512), "4 × 512 tokens, simulated link", allow=frozenset({"reinplace"}), no_time=LINKED,
    ),
    "offload_parameters": Rung(
        "A frozen base fills the card, as under LoRA. Named in `allow`.",
        lambda: lora(1, 128), "LoRA, 1 × 128 tokens, simulated link", no_time=LINKED,
    ),
    "offload_optimizer": Rung(
        "Adam's state fills the card, as when all parameters of a model are trained on few tokens. Named in `allow`.",
        lambda: gpt2(1, 64), "1 × 64 tokens, simulated link", no_time=LINKED,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """One step as it was run."""

    budget_gb: float | None
    peak_bytes: int
    seconds: float
    loss: float
    curve: tuple[tuple[float, ...], tuple[float, ...]]
    """The part of the step's allocations that has passed, and the most MB held in it."""


def smallest_gb(rung: Rung, **options: Any) -> float:
    """The smallest budget in GB that works, as a refusal names it."""
    model, batch = rung.make()
    try:
        memopt.plan(model, 1e-4, batch, effort="fast", **options)
    except memopt.BudgetError as error:
        return error.smallest_gb
    raise AssertionError("0.1 MB are enough")


def measured(rung: Rung, budget_gb: float | None, *, split: bool = False, **options: Any) -> Measured:
    """Run and measure three steps within a budget, or plain ones if it is None."""
    gc.collect()  # of the step before, which would lie beside this one
    torch.manual_seed(0)
    model, batch = rung.make()
    optimizer: Any = torch.optim.AdamW(model.parameters())
    step: Callable[[], float]
    if budget_gb is not None:
        ahead = {} if split else {"example_inputs": batch}
        memopt.optimize(model, budget_gb, optimizer=optimizer, **ahead, **options)
        optimizer = memopt.wrap_optimizer(model, optimizer) if ahead else optimizer
    if split:
        trained = memopt.TrainStep(model, optimizer, max_grad_norm=None)
        step = lambda: float(trained(batch).loss)  # noqa: E731
    else:
        step = lambda: one_step(model, optimizer, batch)  # noqa: E731
    seconds, loss = [], 0.0
    for number in range(STEPS):
        start = time.process_time()
        loss = step()
        seconds += [time.process_time() - start] * bool(number)
    events: list[int] = []
    PeakMeter.listeners.append(events.extend)
    with memopt.measure_peak() as peak:
        step()
    states = optimizer.state.values() if isinstance(optimizer, OffloadedOptimizer) else ()
    hosted = sum(one.nbytes for state in states for one in state.values() if one.dim())
    held = np.array([peak.resident_bytes - hosted + at for at in accumulate(events)]) / MB
    at, most = binned(np.linspace(0, 1, len(held)), held)
    return Measured(budget_gb, peak.bytes - hosted, min(seconds), loss, (tuple(at), tuple(most)))


def one_step(model: nn.Module, optimizer: Any, batch: Batch) -> float:
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def tried(name: str) -> tuple[Measured, Measured]:
    """Run a step without a lever, and with it."""
    rung = RUNGS[name]
    os.environ["MEMOPT_PLAN"] = "always"
    if rung.no_time == LINKED:  # as tests/linked.py has it
        terms.hardware_of = lambda device: replace(  # type: ignore[attr-defined]
            hardware_of(device), link_bytes_per_second=20e9, link_efficiency=1.0
        )
        not_host = SimpleNamespace(is_host=False, caching=False)
        call_accounts.device_of = lambda card: not_host  # type: ignore[attr-defined]
    without: dict[str, Any] = {"precision": rung.precision, "allow": rung.allow - {name}}
    with_it: dict[str, Any] = {"precision": rung.precision, "allow": rung.allow | {name}}
    if name == "offload_optimizer":
        with_it["elsewhere_gb"] = 0  # a search of the device would find the state, whose host is the CPU too
    if name == "precision":
        with_it = {"precision": "bf16", "allow": rung.allow}
    if name == "recompute":
        return measured(rung, None), measured(rung, smallest_gb(rung, **with_it), **with_it)
    least = smallest_gb(rung, **without)
    budget_gb = rung.share * least if rung.share else smallest_gb(rung, **with_it)
    return measured(rung, least, **without), measured(rung, budget_gb, split=name == "microbatch", **with_it)


def draw(name: str, without: Measured, with_it: Measured) -> None:
    """The memory over both steps, as it was measured."""
    figure, axes = blank(7.0, 2.2)
    for one, colour, words in ((without, BEFORE, "without"), (with_it, AFTER, name)):
        axes.fill_between(*one.curve, step="pre", alpha=0.12, color=colour, linewidth=0)
        axes.step(*one.curve, where="pre", color=colour, linewidth=1.0, label=f"{words}, {one.peak_bytes / MB:.1f} MB")
    axes.set(xlabel="allocations of the step, in their order", ylabel="MB held", ylim=(0, None), xticks=[])
    axes.margins(x=0)
    axes.legend(frameon=False, fontsize=8, loc="lower center", ncols=2, bbox_to_anchor=(0.5, 1.0))
    FOLDER.mkdir(exist_ok=True)
    text = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "memopt"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    (FOLDER / f"{name}.svg").write_text(short(text.getvalue()), encoding="utf-8")


def short(svg: str) -> str:
    """The picture with coordinates to a tenth of a point, which makes it half as large."""
    return re.sub(r"(\d\.\d)\d+", r"\1", svg)


def record(without: Measured, with_it: Measured) -> dict[str, Any]:
    """Both steps' entries in the result file."""
    kept = {"budget_gb", "peak_bytes", "seconds", "loss"}
    return {
        name: {key: value for key, value in asdict(one).items() if key in kept}
        for name, one in (("without", without), ("with", with_it))
    }


def section(name: str, found: dict[str, Any]) -> str:
    """A lever's part of the page."""
    rung, lever, (without, with_it) = RUNGS[name], memopt.LEVERS[name], (found["without"], found["with"])
    time_more = rung.no_time or f"{with_it['seconds'] / without['seconds'] - 1:+.0%}"
    apart = abs(with_it["loss"] - without["loss"]) / abs(without["loss"])
    budgets = [f"{1024 * one['budget_gb']:.1f} MB" if one["budget_gb"] else "none" for one in (without, with_it)]
    peaks = [f"{one['peak_bytes'] / MB:.1f} MB" for one in (without, with_it)]
    fewer = 1 - with_it["peak_bytes"] / without["peak_bytes"]
    return "\n\n".join((
        f"## {name}",
        rung.when,
        f"What it does: {lever.what} Exactness: {lever.exactness}. Price: {lever.price}.",
        f"![Memory over a step without and with {name}](pictures/levers/{name}.svg)",
        "| step | budget without → with | peak without → with | less | processor time | loss of the third step |\n"
        "|---|---|---|---|---|---|\n"
        f"| {rung.step} | {' → '.join(budgets)} | {' → '.join(peaks)} | {fewer:.0%} | {time_more} | "
        f"{'the same bits' if not apart else f'{apart:.1g} apart'} |",
    ))  # fmt: skip


def page(results: dict[str, dict[str, Any]]) -> str:
    assert __doc__ is not None
    how = " ".join(" ".join(__doc__.split("\n\n")[2].split("Writes")[0].split()).split(" Measured are")[:1])
    order = ", ".join(f"[{name}](#{name})" for name in results)
    return "\n\n".join((
        "# Which lever next",
        "Written by `python -m benchmarks.levers`: do not edit. The levers in the order in which people need them: "
        f"{order}. [levers.md](levers.md) describes all of them; `memopt.optimize` tries those that are allowed by "
        "itself, and a `BudgetError` names those that would help.",
        how + " Peaks are measured; the time is the processor's, more or less than without the lever; on a card it is "
        "another. A step that would fit as the plain model runs it is run by its plan all the same "
        "(`MEMOPT_PLAN=always`). How training goes in 8 bits is in [results.md](results.md#8-bit-layers).",
        *(section(name, found) for name, found in results.items()),
    )) + "\n"  # fmt: skip


def main(arguments: Sequence[str] | None = None, names: Collection[str] = RUNGS) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=names, default=list(names))
    parser.add_argument("--one", choices=names, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.one:
        without, with_it = tried(chosen.one)
        draw(chosen.one, without, with_it)
        print(json.dumps(record(without, with_it)))
        return
    results = json.loads(RESULT.read_text(encoding="utf-8"))["levers"] if RESULT.exists() else {}
    for name in chosen.only:
        results[name] = record_of("levers", "--one", name)  # the new process draws its picture
        print(name, results[name], file=sys.stderr, flush=True)
        results = {one: results[one] for one in names if one in results}
        write_result(RESULT, {**stamp(), "levers": results})
        PAGE.write_text(page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
