"""Measures the bytes that a process holds on a GPU beside torch's allocator, in another process that runs this file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from threading import Timer

import torch

# Figures outside of these bounds are discarded: other processes may take or free memory in the meantime.
_LEAST, _MOST = 64 * 1024**2, 4 * 1024**3


def measure_context_bytes(device: torch.device, limit_seconds: float = 60.0) -> int | None:
    """The bytes that a process holds on a GPU outside of torch's allocator once it has called the libraries that
    training uses: the fall of the GPU's free memory when such a process is started. CUDA loads modules when their
    kernels are first called, so a large model may hold somewhat more. None where that process fails or takes longer
    than `limit_seconds`, or where the figure is not credible."""
    before = torch.cuda.mem_get_info(device)[0]
    command = [sys.executable, str(Path(__file__)), str(device)]
    try:
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            limit = Timer(limit_seconds, child.kill)
            limit.start()
            reserved = child.stdout.readline()  # it waits until its input is closed; empty where it was killed
            during = torch.cuda.mem_get_info(device)[0]
            child.communicate()
            limit.cancel()
    except OSError:
        return None
    return context_bytes(before, during, reserved)


def context_bytes(free_before: int, free_during: int, reserved: str) -> int | None:
    """The bytes by which a GPU's free memory has fallen since a process started, without those that torch's allocator
    has `reserved` there, as the process printed it. None where that is no number or the result is not credible."""
    if not reserved.strip().isdecimal():
        return None
    found = free_before - free_during - int(reserved)
    return found if _LEAST <= found <= _MOST else None


def call_libraries(device: torch.device, dtype: torch.dtype) -> None:
    """Run a forward and backward through the libraries that training uses, and an optimizer's step."""
    torch.manual_seed(0)
    model = torch.nn.ModuleList(
        [
            torch.nn.Conv2d(3, 64, 8, 8),
            torch.nn.BatchNorm2d(64),
            torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True),
            torch.nn.Embedding(100, 64),
            torch.nn.Linear(64, 100),
        ]
    ).to(device, dtype)
    convolution, norm, layer, embedding, head = model
    optimizer = torch.optim.AdamW(model.parameters())
    hidden = norm(convolution(torch.randn(2, 3, 64, 64, device=device, dtype=dtype))).flatten(2).transpose(1, 2)
    tokens = torch.randint(0, 100, (2, 64), device=device)
    logits = head(layer(hidden + embedding(tokens)))
    torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten()).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def _main() -> None:
    device = torch.device(sys.argv[1])
    for dtype in (torch.float32, torch.bfloat16):
        call_libraries(device, dtype)
    torch.cuda.synchronize(device)
    print(torch.cuda.memory_reserved(device), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    _main()
