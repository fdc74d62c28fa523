"""Batches of many lengths: captures, plans, planning time, peaks, losses and memory growth of a whole training loop.

    python -m benchmarks.lengths [--only GPT-2] [--batches 500] [--small] [--keep FOLDER]

GPT-2 of 12 layers and width 768 and a Llama of 16 layers and width 512, random weights, on bytes of Python's own
documentation: two samples a batch, padded to the longer one (more than 100 lengths; 120 at most for GPT-2, 144 for the
Llama), an odd number of samples, so that the last batch of an epoch has one; AdamW, gradients accumulated over 4
batches; one thread; fp32. Each way runs in a process of its own:

    plain       the model as it is
    memopt      memopt.optimize with recompute and reinplace alone, in a budget half-way between the smallest one that
                works for the longest batch and the peak with nothing recomputed
    peaks       the same once more on the first batches, with the peak of every one measured
    torch       torch.compile(backend="aot_eager", dynamic=True), on the first batches
    checkpoint  torch.utils.checkpoint around every block, on the first batches

Seconds are processor time. `compiling_s` is that of the batches in which something was captured, compiled or planned,
less the median of batches of that way; for memopt that is all planning. `growth` is that of resident memory from batch
52 on, `growth_since_last` since the last capture or plan.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import logging
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import transformers
from torch import nn

import memopt
from benchmarks.processes import record_of
from benchmarks.stamp import stamp, write_result
from memopt.account.account import distinct_bytes
from memopt.capture.region import RecordedRegion
from memopt.errors import GIB

RESULTS = Path(__file__).parent / "results"
EXACT: dict[str, Any] = {"precision": "fp32", "allow": {"recompute", "reinplace"}}
WAYS = ("plain", "memopt", "peaks", "torch", "checkpoint")
FIRST = {"peaks": 202, "torch": 120, "checkpoint": 60}
"""The number of batches of ways that are run for their peaks or their speed alone."""
SAMPLES, SHORTEST, ACCUMULATED, PER_EPOCH = 2, 8, 4, 201
LONGEST = {"GPT-2": 120, "Llama": 144}
SETTLED = 52
"""The batch after which resident memory should not grow. Like the last batch, it ends an accumulation: no gradients are
held."""
Batch = dict[str, torch.Tensor]


def make(name: str, *, small: bool) -> nn.Module:
    torch.manual_seed(0)
    tokens: dict[str, Any] = {"vocab_size": 256, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
    config: Any
    if name == "GPT-2":
        config = transformers.GPT2Config(n_embd=96 if small else 768, n_layer=12, n_head=12, **tokens)
    else:
        width = 64 if small else 512
        config = transformers.LlamaConfig(
            hidden_size=width, intermediate_size=2 * width, num_hidden_layers=16, num_attention_heads=8,
            num_key_value_heads=4, max_position_embeddings=LONGEST[name], **tokens,
        )  # fmt: skip
    model: Any = transformers.AutoModelForCausalLM.from_config(config).train()
    model.loss_type = "ForCausalLM"  # as it would be anyway, after a warning
    return model  # type: ignore[no-any-return]


def samples(name: str) -> list[bytes]:
    """Return paragraphs of Python's documentation, cut at random lengths for Llama; for GPT-2, whose steps take long,
    more often short than long, so that all padded lengths are about equally frequent."""
    paragraphs = [" ".join(text.split()).encode() for topic in topics.values() for text in topic.split("\n\n")]
    longest = LONGEST[name]
    if name == "GPT-2":
        chosen = random.Random(0).sample([text for text in paragraphs if len(text) >= longest], PER_EPOCH)
        parts = [(number / PER_EPOCH) ** 2 for number in range(1, PER_EPOCH + 1)]
        return [text[: SHORTEST + round((longest - SHORTEST) * part)] for text, part in zip(chosen, parts, strict=True)]
    chosen = random.Random(0).sample([text for text in paragraphs if len(text) >= SHORTEST], PER_EPOCH)
    chance = random.Random(1)
    return [text[: chance.randint(SHORTEST, longest)] for text in chosen]


def batches(name: str, count: int) -> Iterator[Batch]:
    """Yield batches of shuffled epochs, each padded to its longest sample."""
    data, order = samples(name), random.Random(2)
    while True:
        order.shuffle(data)
        for begin in range(0, PER_EPOCH, SAMPLES):
            if not count:
                return
            count -= 1
            yield collate(data[begin : begin + SAMPLES])


def collate(texts: list[bytes]) -> Batch:
    length = max(map(len, texts))
    ids = torch.tensor([[*text, *[0] * (length - len(text))] for text in texts])
    mask = torch.tensor([[1] * len(text) + [0] * (length - len(text)) for text in texts])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def longest(name: str) -> Batch:
    return collate([b"x" * LONGEST[name]] * SAMPLES)


class Events(logging.Handler):
    """Counts captures, plans and graphs that torch compiled."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.captures = self.plans = 0
        log = logging.getLogger("memopt")
        log.addHandler(self)
        log.setLevel(logging.DEBUG)
        log.propagate = False
        record = RecordedRegion.record.__func__  # type: ignore[attr-defined]

        def counted(cls: Any, *args: Any, **kwargs: Any) -> RecordedRegion:
            self.captures += 1
            return record(cls, *args, **kwargs)  # type: ignore[no-any-return]

        RecordedRegion.record = classmethod(counted)  # type: ignore[assignment, method-assign]

    def emit(self, record: logging.LogRecord) -> None:
        self.plans += str(record.msg).startswith("planned")

    @property
    def seen(self) -> tuple[int, ...]:
        from torch._dynamo.utils import counters

        return self.captures, self.plans, counters["stats"]["unique_graphs"]


def resident_bytes() -> int:
    """Return the memory of this process, without what the C library keeps of freed memory for later."""
    gc.collect()
    with suppress(AttributeError):  # other libraries than glibc
        ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(name: str, way: str, budget_gb: float, count: int, *, small: bool) -> dict[str, Any]:
    """Train in this process."""
    torch.set_num_threads(1)
    model: Any = make(name, small=small)
    events = Events()
    if way in ("memopt", "peaks"):
        memopt.optimize(model, budget_gb, **EXACT)
    elif way == "torch":
        model.compile(backend="aot_eager", dynamic=True)
    elif way == "checkpoint":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters())
    losses, seconds, eventful, peaks, resident = [], [], [], [], dict[int, int]()
    torch.manual_seed(1)
    for number, batch in enumerate(batches(name, count), 1):
        before, began = events.seen, time.process_time()
        if way == "peaks":
            peaks.append(peak_of(model, batch, losses))
        else:
            losses.append(backward(model, batch))
        if number % ACCUMULATED == 0:
            optimizer.step()
            optimizer.zero_grad()
        seconds.append(time.process_time() - began)
        eventful.append(events.seen != before)
        late = any(eventful[max(resident, default=0) :])
        if number % ACCUMULATED == 0 and (number in (SETTLED, count) or (number > SETTLED and late)):
            resident[number] = resident_bytes()
    quiet = statistics.median(second for second, event in zip(seconds, eventful, strict=True) if not event)
    compiling = sum(second - quiet for second, event in zip(seconds, eventful, strict=True) if event)
    return {
        "batches": count,
        "captures": events.captures,
        "plans": events.plans,
        "seconds": seconds,
        "compiling_s": compiling,
        "losses": losses,
        "growth": growth(resident, SETTLED),
        "growth_since_last": growth(resident, max([n for n in resident if n < count], default=SETTLED)),
        "largest_peak_gb": max(peaks, default=None),
    }


def growth(resident: dict[int, int], since: int) -> float | None:
    """The fraction by which resident memory has grown from a batch to the last one where it was read, or None."""
    return resident[max(resident)] / resident[since] - 1 if since in resident else None


def backward(model: nn.Module, batch: Batch) -> float:
    loss = model(**batch).loss
    (loss / ACCUMULATED).backward()
    return loss.item()  # type: ignore[no-any-return]


def peak_of(model: nn.Module, batch: Batch, losses: list[float]) -> float:
    """Run a batch, and return its peak in GB, with all that the training holds."""
    state = torch.get_rng_state()
    model(**batch)  # plans, if that is to be done: the meter would note every operator of it
    torch.set_rng_state(state)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    held = distinct_bytes([*model.parameters(), *model.buffers(), *gradients, *batch.values()])
    trained = distinct_bytes(parameter for parameter in model.parameters() if parameter.requires_grad)
    gc.collect()
    with memopt.measure_peak("cpu") as peak:
        losses.append(backward(model, batch))
    return (held + 2 * trained + peak.allocated_bytes) / GIB


def budget(name: str, *, small: bool) -> dict[str, float]:
    """Return a budget in GB half-way between the smallest for the longest batch and the peak of its plain step, both
    with the gradients of earlier batches held."""
    model = memopt.optimize(make(name, small=small), 1000, **EXACT)
    for _ in range(2):
        backward(model, longest(name))
    plan = memopt.plan_of(model)
    assert plan.account.gradients_held
    return {"budget_gb": (plan.smallest_gb() + plan.plain_peak_gb) / 2, "plain_gb": plan.plain_peak_gb}


def in_a_process(*arguments: str) -> dict[str, Any]:
    """Run this file in a new process, with an empty folder for plans."""
    with tempfile.TemporaryDirectory() as folder:
        always = {"MEMOPT_PLAN": "always"} if "budget" in arguments else {}
        found: dict[str, Any] = record_of(
            "lengths", "--child", *arguments, MEMOPT_CACHE_DIR=folder, OMP_NUM_THREADS="1", **always
        )
        return found


def kept(folder: Path | None, *arguments: str) -> dict[str, Any]:
    """The result of `in_a_process`, read from its file in `folder` if an earlier run wrote it there."""
    if folder is None:
        return in_a_process(*arguments)
    path = folder / ("_".join(arguments).replace("--", "") + ".json")
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(in_a_process(*arguments)))
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def compare(name: str, count: int, ways: list[str], folder: Path | None, *, small: bool) -> Iterator[dict[str, Any]]:
    """Measure the ways of one model, and compare each with plain on the batches that both ran; yields what is known
    after each way."""
    size = ["--small"] if small else []
    limits = kept(folder, name, "budget", *size)
    lengths = len({batch["input_ids"].shape[1] for batch in batches(name, count)})
    plain_losses, plain_seconds = list[float](), list[float]()
    rows = []
    for way in ways:
        most = min(count, FIRST.get(way, count))
        limit = str(limits["budget_gb"])
        run = kept(folder, name, way, *size, "--batches", str(most), "--budget-gb", limit)
        losses, seconds = run.pop("losses"), run.pop("seconds")
        if way == "plain":
            plain_losses, plain_seconds = losses, seconds
        bitwise = losses == plain_losses[: len(losses)]
        of_plain = sum(seconds) / sum(plain_seconds[: len(seconds)])
        rows.append({"way": way, **run, "total_s": sum(seconds), "losses_bitwise": bitwise, "of_plain": of_plain})
        print(name, rows[-1], flush=True)
        yield {"model": name, **limits, "lengths": lengths, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=("GPT-2", "Llama"), default=["GPT-2", "Llama"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--batches", type=int, default=500)
    parser.add_argument("--small", action="store_true", help="narrow models: minutes instead of an hour")
    parser.add_argument("--keep", type=Path, help="a folder for the results of each way, to go on after a stop")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--budget-gb", type=float, default=0, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        name, task = chosen.child
        measured = (
            budget(name, small=chosen.small)
            if task == "budget"
            else measure(name, task, chosen.budget_gb, chosen.batches, small=chosen.small)
        )
        print(json.dumps(measured))
        return
    ways = ["plain", *(way for way in WAYS if way in chosen.ways and way != "plain")]
    result = RESULTS / ("lengths_small.json" if chosen.small else "lengths.json")
    known = json.loads(result.read_text())["models"] if result.exists() else []
    models = {model["model"]: model for model in known}
    for name in chosen.only:
        for measured in compare(name, chosen.batches, ways, chosen.keep, small=chosen.small):
            models[name] = measured
            write_result(result, {**stamp(), "models": list(models.values())})


if __name__ == "__main__":
    main()
