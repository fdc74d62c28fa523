"""A job whose plain step fits its budget: the time of the same steps plain and with memopt, interleaved, on the CPU.

    OMP_NUM_THREADS=1 python -m benchmarks.fits [--only GPT-2] [--steps 200]

Two copies of a model train on the same batches, texts of changing lengths, padded to the longest of each batch, or
images, the last one of an epoch smaller: one plain, one optimised in fp32 (by default memopt computes in bf16 on a
processor with instructions for it, which a plain step does not) and with a budget that is large enough. They take
turns, a block of steps each, so that other work on the machine slows both; which one begins a pair of blocks changes.
Everything that memopt does is in its time: the first call, counts, checks at each call. Process time is that of this
process alone.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import memopt
from benchmarks.stamp import stamp, write_result
from memopt.capture.region import RecordedRegion
from memopt.errors import GIB

RESULT = Path(__file__).parent / "results" / "fits.json"
BLOCK = 5
ROWS, LAST_ROWS, EPOCH = 3, 2, 50
LENGTHS = 16, 64
VOCABULARY = 8000
SIDE, CLASSES = 64, 10
Batch = dict[str, torch.Tensor]
CONFIGS: dict[str, Callable[[], Any]] = {
    "GPT-2": lambda: transformers.GPT2Config(
        n_embd=768, n_layer=3, n_head=12, vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0
    ),
    "GPT-2, width 256": lambda: transformers.GPT2Config(
        n_embd=256, n_layer=12, n_head=4, vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0
    ),
    "Llama": lambda: transformers.LlamaConfig(
        hidden_size=512, intermediate_size=1376, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    ),
    "BERT": lambda: transformers.BertConfig(
        hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4, vocab_size=VOCABULARY
    ),
    "ViT": lambda: transformers.ViTConfig(
        hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4, image_size=SIDE,
        patch_size=8, num_labels=CLASSES,
    ),
    "ViT-S": lambda: transformers.ViTConfig(
        hidden_size=384, intermediate_size=1536, num_hidden_layers=12, num_attention_heads=6, image_size=SIDE,
        patch_size=8, num_labels=CLASSES,
    ),
}  # fmt: skip
IMAGES = "ViT", "ViT-S"


@dataclass
class Spent:
    """The seconds of some steps, and their losses."""

    process_s: float = 0.0
    wall_s: float = 0.0
    first_s: float = 0.0
    """Process time of the first block."""
    losses: list[float] = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self.losses = []


@dataclass(frozen=True)
class Row:
    model: str
    million_parameters: float
    steps: int
    lengths: int
    """The number of different padded lengths; 1 for images."""
    budget_gb: float
    plain_s: float
    """Process time of all steps."""
    memopt_s: float
    over: float
    """memopt's process time over plain's, less 1."""
    over_wall: float
    over_after_first_block: float
    captures: int
    counts: int
    same_losses: bool


def make(name: str) -> nn.Module:
    """A model of `CONFIGS` in train mode, with random weights."""
    kinds = {
        "BERT": transformers.AutoModelForMaskedLM,
        **dict.fromkeys(IMAGES, transformers.AutoModelForImageClassification),
    }
    model: nn.Module = kinds.get(name, transformers.AutoModelForCausalLM).from_config(CONFIGS[name]()).train()
    return model


def batches(name: str, steps: int) -> list[Batch]:
    """Batches for a model, of which the last one of each epoch is smaller."""
    torch.manual_seed(0)
    rows = [LAST_ROWS if step % EPOCH == EPOCH - 1 else ROWS for step in range(steps)]
    return images(rows) if name in IMAGES else texts(rows)


def images(rows_of_batches: Sequence[int]) -> list[Batch]:
    return [
        {"pixel_values": torch.randn(rows, 3, SIDE, SIDE), "labels": torch.randint(CLASSES, (rows,))}
        for rows in rows_of_batches
    ]


def texts(rows_of_batches: Sequence[int]) -> list[Batch]:
    """Batches of changing lengths with padding."""
    chance = random.Random(0)
    made = []
    for rows in rows_of_batches:
        lengths = [chance.randint(*LENGTHS) for _ in range(rows)]
        longest = max(lengths)
        tokens = torch.randint(1, VOCABULARY, (rows, longest))
        mask = torch.tensor([[1] * length + [0] * (longest - length) for length in lengths])
        labels = tokens.masked_fill(mask == 0, -100)
        made.append({"input_ids": tokens, "attention_mask": mask, "labels": labels})
    return made


class Job:
    """A model that is trained, with its optimizer and its own random numbers."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.optimizer = model, torch.optim.AdamW(model.parameters(), lr=1e-4)
        torch.manual_seed(1)
        self.generator = torch.get_rng_state()
        self.spent = Spent()

    def run(self, given: Sequence[Batch]) -> None:
        torch.set_rng_state(self.generator)
        wall, process = time.perf_counter(), time.process_time()
        for batch in given:
            loss = self.model(**batch).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.spent.losses.append(loss.item())
        took = time.process_time() - process
        self.spent.first_s = self.spent.first_s or took
        self.spent.process_s += took
        self.spent.wall_s += time.perf_counter() - wall
        self.generator = torch.get_rng_state()


def counting(owner: Any, name: str) -> list[str]:
    """A list that gets longer with each call of a function, from now on."""
    calls: list[str] = []
    own = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return own(*args, **kwargs)

    setattr(owner, name, counted)
    return calls


def compare(name: str, steps: int, captures: list[str], counts: list[str]) -> Row:
    torch.manual_seed(0)
    model = make(name)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    plain, ours = Job(model), Job(copy.deepcopy(model))
    budget = 16 * parameters / GIB + 4.0
    before = len(captures), len(counts)
    memopt.optimize(ours.model, budget, precision="fp32")
    given = batches(name, steps)
    warm_up(name)
    for number, start in enumerate(range(0, steps, BLOCK)):
        for job in (plain, ours) if number % 2 else (ours, plain):
            job.run(given[start : start + BLOCK])
    a, b = plain.spent, ours.spent
    return Row(
        name,
        parameters / 1e6,
        steps,
        len({next(iter(batch.values())).shape[1:] for batch in given}),
        budget,
        a.process_s,
        b.process_s,
        b.process_s / a.process_s - 1,
        b.wall_s / a.wall_s - 1,
        (b.process_s - b.first_s) / (a.process_s - a.first_s) - 1,
        len(captures) - before[0],
        len(counts) - before[1],
        a.losses == b.losses,
    )


def warm_up(name: str) -> None:
    """Two steps of a third copy, so that neither job pays for what the process does once."""
    Job(make(name)).run(batches(name, 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CONFIGS, default=list(CONFIGS))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--note", default="", help="what else the machine was doing, for the JSON file")
    parser.add_argument("--to", type=Path, default=RESULT, help="the JSON file")
    chosen = parser.parse_args()
    transformers.logging.set_verbosity_error()
    import memopt.run.plain_counter as plain_counter  # its name in this module is what is counted

    captures, counts = counting(RecordedRegion, "record"), counting(plain_counter, "count_plain_step")
    known = json.loads(chosen.to.read_text())["rows"] if chosen.to.exists() else []
    rows = [row for row in known if row["model"] not in chosen.only]
    for name in chosen.only:
        rows.append(asdict(compare(name, chosen.steps, captures, counts)))
        print(rows[-1], flush=True)
        write_result(chosen.to, {**stamp(), "note": chosen.note, "rows": rows})


if __name__ == "__main__":
    main()
