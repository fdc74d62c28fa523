"""The subjects of `benchmarks.first_day`: each yields lines, which are a key and figures, without the keys that are
known."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.initialization import no_init_weights

import memopt
from benchmarks import card_bytes
from benchmarks.gpu_methods import Method, adamw, peers, within
from benchmarks.gpu_models import Candidate, candidates
from examples.models.card import temporary_bytes
from memopt.device import measure_hardware
from memopt.device.context_probe import measure_context_bytes
from memopt.device.hardware_table import Hardware, reported_chip
from memopt.device.library_run import library_run
from memopt.device.op_call import describe
from memopt.device.workspace_table import estimate_workspace
from memopt.errors import GIB
from passes.ops.fp8_kernels import has_units

Lines = Iterator[tuple[str, dict[str, Any]]]
Known = frozenset[str]
MB = 1024**2
STEPS, WARM = 20, 3
aten = torch.ops.aten


def context(known: Known, small: bool) -> Lines:
    """Bytes beside torch's allocator, as assumed and as measured, and whether the addresses of new segments rise."""
    device = torch.device("cuda", 0)
    measured = measure_context_bytes(device)
    yield "context", {"assumed_mb": Hardware.context_bytes / MB, "measured_mb": measured and measured / MB}
    blocks = [torch.empty(20 * MB, dtype=torch.uint8, device=device) for _ in range(16)]
    addresses = [block.data_ptr() for block in blocks]
    rising = sum(before < after for before, after in pairwise(addresses))
    yield "addresses", {"segments": len(addresses), "rising": rising + 1}


def workspaces(known: Known, small: bool) -> Lines:
    """Bytes that kernels hold beside inputs and results: by rule, by a run as plans take it, and as used."""
    chip = reported_chip(torch.device("cuda"))
    for name, (op, args) in _operators(64 if small else 1024).items():
        call = describe(op, args, {}, op(*args))
        ran = library_run(call, chip)
        used = temporary_bytes(lambda op=op, args=args: op(*args))
        figures = {"rule_mb": estimate_workspace(call, "cuda", chip) / MB, "used_mb": used / MB}
        yield name, figures | ({} if ran is None else {"run_mb": ran.workspace_bytes / MB})


def own_bits(known: Known, small: bool) -> Lines:
    """Whether a plain step repeats its gradients bit by bit, by kernel of attention."""
    candidate = candidates("tiny" if small else "middle")["GPT-2 medium"]
    for backend in (None, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        name = "as torch chooses" if backend is None else backend.name.lower()
        if name in known:
            continue
        try:
            first, second = (_gradients(candidate, backend) for _ in range(2))
            differ = sum(not torch.equal(one, other) for one, other in zip(first, second, strict=True))
            yield name, {"gradients": len(first), "that_differ": differ}
        except RuntimeError as failure:
            yield name, {"failure": str(failure)[:200]}


def exactness(known: Known, small: bool) -> Lines:
    """memopt.compare of a planned step with the plain one, with dropout."""
    candidate = candidates("tiny" if small else "middle")["GPT-2 medium"]
    for precision in ("fp32", "bf16"):
        for backend in ("aten", "inductor"):
            if (key := f"{precision}, {backend}") in known:
                continue
            model, batch = _made(candidate)
            try:
                least = card_bytes.smallest_gb(model, batch, precision=precision, backend=backend)
                memopt.optimize(model, 1.1 * least, precision=precision, backend=backend)
                yield key, {"said": str(memopt.compare(model, batch)).splitlines()[0][:300]}
            except (RuntimeError, ValueError) as failure:
                yield key, {"failure": str(failure)[:300]}
            _forget()


def capped(known: Known, small: bool) -> Lines:
    """Steps in a process that has the budget and no more, two models on plain operators, then through inductor."""
    for backend in ("aten", "inductor"):
        for model in ("GPT-2 medium", "ViT-L/16"):
            size = "tiny" if small else "middle"
            job = card_bytes.Job(model, "fused", backend, size=size, shares=(0.0, 0.5, 1.0))
            keys = {share: f"{model}, {backend}, {share}" for share in job.shares}
            left = tuple(share for share in job.shares if keys[share] not in known)
            for record in card_bytes.run(replace(job, shares=left)) if left else ():
                yield keys[record.share], asdict(record) | {"off": record.off, "good": record.good}


def step_times(known: Known, small: bool) -> Lines:
    """Step time (median and quartiles of 20 steps) and peak of each way to train; memopt has what per-block
    checkpointing, eager and compiled, and torch.compile reserved."""
    candidate = candidates("tiny" if small else "real")["GPT-2 medium"]
    budgets: dict[str, float] = {}
    for method in peers(small=False):
        figures = _timed(method, candidate)
        budgets[method.name] = figures.get("reserved_gb", 0.0)
        if method.name not in known:
            yield method.name, figures
        for at in ("eager, per block", "compile, per block", "compile"):
            key = f"memopt at {at}"
            if method.name == at and budgets[at] and key not in known:
                method_of_memopt = within(budgets[at] + Hardware.context_bytes / GIB, "inductor", "bf16")
                yield key, _timed(method_of_memopt, candidate)


def overlap(known: Known, small: bool) -> Lines:
    """Copies to the host beside products of matrices: the time of both together over that of the longer one."""
    side, nbytes = (512, 4 * MB) if small else (8192, 512 * MB)
    a = torch.randn(side, side, device="cuda", dtype=torch.bfloat16)
    source, host = torch.empty(nbytes, dtype=torch.uint8, device="cuda"), torch.empty(nbytes, dtype=torch.uint8)
    pinned, other = host.pin_memory(), torch.cuda.Stream()

    def compute() -> None:
        for _ in range(20):
            torch.mm(a, a)

    def copy() -> None:
        with torch.cuda.stream(other):
            pinned.copy_(source, non_blocking=True)
        torch.cuda.current_stream().wait_stream(other)

    def both() -> None:
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            pinned.copy_(source, non_blocking=True)
        compute()
        torch.cuda.current_stream().wait_stream(other)

    alone, moved, together = (_by_events(run) for run in (compute, copy, both))
    yield "copy out", {"compute_ms": alone, "copy_ms": moved, "both_ms": together, "gb_per_s": nbytes / moved / 1e6}


def fp8(known: Known, small: bool) -> Lines:
    """The rates of 8-bit products that are trusted on this card, and those of other dtypes, as calibration measures."""
    measured = measure_hardware(torch.device("cuda", 0))
    yield "rates", {name: round(rate / 1e12, 1) for name, rate in measured.flops.items()}
    yield "device", {"gb_per_s": measured.bytes_per_second / 1e9, "fp8_units": has_units(torch.device("cuda", 0))}


def time_model(known: Known, small: bool) -> Lines:
    """The step time that a calibrated plan expects beside the one measured."""
    candidate = candidates("tiny" if small else "real")["GPT-2 medium"]
    model, batch = _made(candidate)
    plan = memopt.plan(model, 1e5, batch, precision="bf16", backend="aten", calibrate=True, optimizer=adamw(model))
    del model, batch
    _forget()
    timed = _timed(within(1e5, "aten", "bf16"), candidate)
    yield candidate.name, {"expected_ms": 1e3 * plan.step_seconds, **timed}


SUBJECTS: dict[str, Callable[[Known, bool], Lines]] = {
    "context": context,
    "workspaces": workspaces,
    "own bits": own_bits,
    "exactness": exactness,
    "capped": capped,
    "step times": step_times,
    "overlap": overlap,
    "fp8": fp8,
    "time model": time_model,
}
"""In order of worth."""


def _operators(rows: int) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    def tensor(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device="cuda")

    images, weight = tensor(16, 64, 56, 56), tensor(128, 64, 3, 3)
    convolution = ([2, 2], [1, 1], [1, 1], False, [0, 0], 1)
    gradient, row, sums = tensor(16, 128, 28, 28), tensor(1024), tensor(128 * rows, 1, dtype=torch.float32)
    wide = tensor(128 * rows, 1024)
    return {
        "convolution": (aten.convolution.default, (images, weight, None, *convolution)),
        "convolution backward": (
            aten.convolution_backward.default,
            (gradient, images, weight, [0], *convolution, [True, True, False]),
        ),
        "sum of rows": (aten.sum.dim_IntList, (wide, [0])),
        "layer norm backward": (
            aten.native_layer_norm_backward.default,
            (wide, wide, [1024], sums, sums, row, row, [True, True, True]),
        ),
        "embedding backward": (
            aten.embedding_dense_backward.default,
            (wide, torch.zeros(len(wide), dtype=torch.int64, device="cuda"), 32000, -1, False),
        ),
    }


def _made(candidate: Candidate, *, filled: bool = True) -> tuple[torch.nn.Module, Any]:
    with torch.device("cuda"), nullcontext() if filled else no_init_weights():
        return candidate.make(), candidate.batch(candidate.size)


def _gradients(candidate: Candidate, backend: SDPBackend | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model, batch = _made(candidate)
    with torch.autocast("cuda", torch.bfloat16), nullcontext() if backend is None else sdpa_kernel(backend):
        loss = model(**batch).loss
    loss.backward()
    return [one.grad for one in model.parameters() if one.grad is not None]


def _timed(method: Method, candidate: Candidate) -> dict[str, Any]:
    """Median and quartiles of steps, and the allocator's peaks, of a way to train."""
    try:
        model, batch = _made(candidate)
        method.prepare(model, candidate)
        optimizer = adamw(model)

        def step() -> None:
            optimizer.zero_grad()
            with method.autocast("cuda"):
                output = model(**batch)
            (output if isinstance(output, torch.Tensor) else output.loss).backward()
            optimizer.step()

        with method.settings():
            for _ in range(WARM):
                step()
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            times = [_by_events(step) for _ in range(STEPS)]
        low, median, high = statistics.quantiles(times, n=4)
        peak, reserved = torch.cuda.max_memory_allocated() / GIB, torch.cuda.max_memory_reserved() / GIB
        return {"low_ms": low, "median_ms": median, "high_ms": high, "peak_gb": peak, "reserved_gb": reserved}
    except (RuntimeError, ValueError, AssertionError) as failure:
        return {"failure": f"{type(failure).__name__}: {str(failure)[:200]}"}
    finally:
        _forget()


def _by_events(run: Callable[[], Any]) -> float:
    """Milliseconds between two events around a run; of the clock where the card has none."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    clock = time.perf_counter()
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) or 1e3 * (time.perf_counter() - clock)


def _forget() -> None:
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
