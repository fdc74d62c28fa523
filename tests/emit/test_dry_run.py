"""Code as inductor writes it, run dry: what it allocates, frees, reuses and draws counts; its kernels do not run."""

from __future__ import annotations

import torch

from memopt.compat.fakes import FakeTensorMode
from memopt.emit.footprint import _HeldBlocks, dry_run

HEAD = """\
import torch
from torch._inductor.async_compile import AsyncCompile
aten = torch.ops.aten
empty_strided_cpu = torch._C._dynamo.guards._empty_strided_cpu
reinterpret_tensor = torch._C._dynamo.guards._reinterpret_tensor
assert_size_stride = torch._C._dynamo.guards.assert_size_stride
async_compile = AsyncCompile()
kernel = async_compile.cpp_pybinding(['float*'], 'no C++ at all')
async_compile.wait(globals())
del async_compile

def call(args):
    x, = args
    args.clear()
"""
KB = 1024


def run(body: str, *, known: bool = True) -> tuple[int, int, int]:
    """Peak, what is left, and how many results, for an input of 1 kB."""
    mode = FakeTensorMode()
    held_blocks = _HeldBlocks("cpu")
    with mode:
        inputs = [torch.empty(256)]
    (held_blocks.exclude if known else held_blocks.count)(inputs)
    results = dry_run(HEAD + "".join(f"    {line}\n" for line in body.splitlines()), inputs, mode, held_blocks)
    return held_blocks.peak_bytes, held_blocks.live_bytes, len(results)


def test_what_is_deleted_is_free() -> None:
    body = """\
assert_size_stride(x, (256, ), (1, ))
buf0 = empty_strided_cpu((256, ), (1, ), torch.float32)
kernel(x, buf0)
buf1 = empty_strided_cpu((512, ), (1, ), torch.float32)
kernel(buf0, buf1)
del buf0
buf2 = empty_strided_cpu((256, ), (1, ), torch.float32)
return (buf2, buf1, )"""
    assert run(body) == (3 * KB, 3 * KB, 2)


def test_reused_and_reinterpreted_memory_counts_once() -> None:
    body = """\
buf0 = empty_strided_cpu((256, ), (1, ), torch.float32)
buf1 = reinterpret_tensor(buf0, (16, 8), (8, 1), 128); del buf0  # reuse
return (buf1, reinterpret_tensor(x, (128, ), (1, ), 0), )"""
    assert run(body) == (KB, KB, 2)


def test_an_input_that_its_caller_gave_away_is_freed_at_its_last_use() -> None:
    body = """\
kernel(x)
del x
buf0 = empty_strided_cpu((128, ), (1, ), torch.float32)
return (buf0, )"""
    assert run(body, known=False) == (KB, KB // 2, 1)


def test_operators_are_called_with_their_workspace() -> None:
    body = """\
buf0 = torch.ops.aten.sort.default(x)
buf1 = buf0[0]
del buf0
return (buf1, )"""
    peak, left, _ = run(body)
    assert left == KB
    assert peak > 3 * KB, "values, indices of 8 bytes each, and what the kernel needs to sort"


def test_generator_states_are_counted() -> None:
    body = """\
buf0 = torch.ops.higher_order.run_and_save_rng_state(torch.ops.aten.rand_like.default, x)
state = buf0[0]
drawn = buf0[1]
del buf0
again = torch.ops.higher_order.run_with_rng_state(state, torch.ops.aten.rand_like.default, x)
return (state, drawn, again, )"""
    assert run(body) == (5056 + 2 * KB + 5056, 5056 + 2 * KB, 3)
