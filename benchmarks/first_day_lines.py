"""The subjects of `benchmarks.first_day`: each yields lines, which are a key and figures, without the keys that are
known."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from itertools import combinations
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import memopt
from benchmarks import card_bytes
from benchmarks.first_day_timing import (
    BESIDE,
    budgets_beside,
    by_events,
    forget,
    steps_timed,
    timed,
    timed_within,
)
from benchmarks.gpu_methods import adamw, peers
from benchmarks.gpu_models import Candidate, candidates, gpt2, made
from examples.models.card import temporary_bytes
from memopt.account.caching_allocator import CachingAllocator
from memopt.device import measure_hardware
from memopt.device.context_probe import measure_context_bytes
from memopt.device.cuda_libraries import library_run
from memopt.device.hardware import assumed_context, reported_chip
from memopt.device.op_call import describe
from memopt.device.workspace import estimate_workspace
from passes.ops.fp8_kernels import has_units

Lines = Iterator[tuple[str, dict[str, Any]]]
Known = Mapping[str, Mapping[str, Any]]
"""The figures of the lines that an earlier call wrote, by their keys."""
MB = 1024**2
ROOMY_GB = 100_000.0
EXACT = frozenset({"recompute", "reinplace"})
STAND_IN = hasattr(ctypes.CDLL(None), "memopt_card_stand_in")
"""Whether there is no card, but what stands in for one (docs/card.md)."""
LAYERS = 2 if STAND_IN else 8
"""How many of GPT-2 medium's 24 layers are trained where step times are measured, since the time to compile grows with
them. On the stand-in times mean nothing, and two are enough."""
aten = torch.ops.aten


def context(known: Known, small: bool) -> Lines:
    """Bytes beside torch's allocator, as assumed and as measured, and how many pairs of segments lie in the order that
    the model of the allocator expects."""
    device = torch.device("cuda", 0)
    assumed, measured = assumed_context(torch.cuda.get_device_capability(device)[0]), measure_context_bytes(device)
    yield "context", {"assumed_mb": assumed / MB, "measured_mb": measured and measured / MB}
    sizes = [MB * size for size in (20, 20, 50, 14, 12, 300, 18, 102, 64, 20, 30, 30, 2, 2)]
    blocks = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
    model = CachingAllocator()
    both = [(block.data_ptr(), model.malloc(size)) for block, size in zip(blocks, sizes, strict=True)]
    pairs = [(one[0] < other[0]) == (one[1] < other[1]) for one, other in combinations(both, 2)]
    yield "addresses", {"segments": len(sizes), "pairs": len(pairs), "as_modelled": sum(pairs)}


def workspaces(known: Known, small: bool) -> Lines:
    """Bytes that kernels hold beside inputs and results: by rule, by the run that plans rely on, and as measured."""
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
    """memopt.compare of a planned step with the plain one, with dropout: in fp32 with exact levers alone, in bf16 with
    all that are on by default."""
    candidate = candidates("tiny" if small else "middle")["GPT-2 medium"]
    for precision, allow in (("fp32", EXACT), ("bf16", memopt.DEFAULT_LEVERS)):
        for backend in ("aten", "inductor"):
            if (key := f"{precision}, {backend}") in known:
                continue
            model, batch = made(candidate)
            options: dict[str, Any] = {"precision": precision, "backend": backend, "allow": allow}
            try:
                memopt.optimize(model, ROOMY_GB, example_inputs=batch, **options)
                least = card_bytes.smallest_gb(model, batch, **options)
                memopt.optimize(model, 1.1 * least, example_inputs=batch, **options)
                yield key, {"said": str(memopt.compare(model, batch))[:600]}
            except (RuntimeError, ValueError) as failure:
                yield key, {"failure": str(failure)[:300]}
            forget()


def capped(known: Known, small: bool) -> Lines:
    """Steps in a process that has the budget and no more, two models on plain operators, then through inductor."""
    for backend in ("aten", "inductor"):
        for model in ("GPT-2 medium", "ViT-L/16"):
            size = "tiny" if small else "middle"
            job = card_bytes.Job(model, "fused", backend, size=size, shares=(0.0, 0.5, 1.0))
            keys = {share: f"{model}, {backend}, {share}" for share in job.shares}
            left = tuple(share for share in job.shares if keys[share] not in known)
            # In a process of its own: where another model was trained, the allocator's blocks lie otherwise.
            for record in card_bytes.in_process(replace(job, shares=left)) if left else ():
                yield keys[record.share], asdict(record) | {"off": record.off, "good": record.good}


def step_times(known: Known, small: bool) -> Lines:
    """Step time (median and quartiles of 20 steps) and peak of each way to train GPT-2 medium with `LAYERS` layers;
    memopt's budgets are what per-block checkpointing reserved, eager and compiled, 0.9 of what torch.compile did, and
    all of that less half of its activations."""
    candidate = timed_model(small)
    found = dict(known)

    def of_peers(*, first: bool) -> Lines:
        for method in peers(small=False):
            if (method.name in BESIDE) == first and method.name not in known:
                found[method.name] = timed(method, candidate)
                yield method.name, found[method.name] | of_layers(small)

    yield from of_peers(first=True)
    budgets = {f"memopt at {at}": nbytes for at, nbytes in budgets_beside(found).items()}
    left = {key: gb for key, gb in budgets.items() if key not in known}
    for key, figures in timed_within(left, candidate):
        yield key, figures | of_layers(small)
    yield from of_peers(first=False)


def timed_model(small: bool) -> Candidate:
    """The model whose steps are timed."""
    return gpt2("tiny") if small else gpt2("real", first_layers=LAYERS)


def of_layers(small: bool) -> dict[str, Any]:
    """The number of layers of the model whose steps are timed, as a part of a line; nothing for the tiny one."""
    return {} if small else {"layers": LAYERS}


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

    both()  # the first products choose their kernels
    alone, moved, together = (by_events(run) for run in (compute, copy, both))
    yield "copy out", {"compute_ms": alone, "copy_ms": moved, "both_ms": together, "gb_per_s": nbytes / moved / 1e6}


def fp8(known: Known, small: bool) -> Lines:
    """The rates of 8-bit products that are trusted on this card, and those of other dtypes, as calibration measures."""
    measured = measure_hardware(torch.device("cuda", 0))
    yield "rates", {name: round(rate / 1e12, 1) for name, rate in measured.flops.items()}
    yield "device", {"gb_per_s": measured.bytes_per_second / 1e9, "fp8_units": has_units(torch.device("cuda", 0))}


def time_model(known: Known, small: bool) -> Lines:
    """The step time that a calibrated plan expects beside the one measured."""
    candidate = timed_model(small)
    model, batch = made(candidate)
    optimizer = adamw(model)
    options: dict[str, Any] = {"precision": "bf16", "backend": "aten", "calibrate": True, "optimizer": optimizer}
    memopt.optimize(model, ROOMY_GB, example_inputs=batch, **options)
    expected = memopt.plan_of(model).step_seconds
    yield candidate.name, {"expected_ms": 1e3 * expected, **steps_timed(model, batch, optimizer), **of_layers(small)}


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


def _gradients(candidate: Candidate, backend: SDPBackend | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model, batch = made(candidate)
    with torch.autocast("cuda", torch.bfloat16), nullcontext() if backend is None else sdpa_kernel(backend):
        loss = model(**batch).loss
    loss.backward()
    return [one.grad for one in model.parameters() if one.grad is not None]
