"""The meter against allocations whose bytes are known."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from memopt.compat.host import LEGACY_PROFILER, MemoryEvents, profiler_is_active
from memopt.errors import GIB
from memopt.meter import measure_peak, resident_cpu_blocks

KB = 1024


def kilobytes(n: int) -> torch.Tensor:
    return torch.empty(n * 256)


def resident_cpu_bytes() -> int:
    return sum(resident_cpu_blocks().values())


@pytest.fixture(autouse=True)
def no_garbage() -> None:
    gc.collect()


def test_temporaries_and_frees_make_the_peak() -> None:
    with measure_peak("cpu") as peak:
        a = kilobytes(100)
        b = kilobytes(50)
        del b
        c = kilobytes(20)
        del a
        d = kilobytes(60)
    assert peak.allocated_bytes == 150 * KB
    assert peak.bytes == peak.resident_bytes + 150 * KB
    assert peak.gb == peak.bytes / GIB
    assert c.numel() + d.numel() == 80 * 256


def test_views_and_in_place_ops_are_free() -> None:
    with measure_peak("cpu") as peak:
        a = kilobytes(64)
        b = a.view(2, -1).t()[1:, None].expand(-1, 5, 2)
        a.mul_(2).relu_()
        del a
        c = torch.empty(10 * 256)
    assert peak.allocated_bytes == 74 * KB
    assert b.dim() + c.dim() == 4


def test_freeing_what_was_there_makes_room() -> None:
    for _ in range(3):  # torch itself would miss such frees, or report them by the size of an older block
        a = kilobytes(64)
        with measure_peak("cpu") as peak:
            del a
            b = kilobytes(16)
            c = kilobytes(56)
            del b
        assert peak.allocated_bytes == 8 * KB
        with measure_peak("cpu") as peak:
            del c
            b = kilobytes(16)
        assert peak.allocated_bytes == 0
        assert b.numel() == 16 * 256
        del b


def test_a_training_loop_measures_the_same_each_time() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    figures = []
    for step in range(6):
        if step == 3:  # an unmetered step between
            model(torch.ones(16, 64)).sum().backward()
            optimizer.step()
        with measure_peak("cpu") as peak:
            optimizer.zero_grad()
            model(torch.ones(16, 64)).sum().backward()
            optimizer.step()
        figures.append(peak.bytes)
    assert len(set(figures[1:])) == 1, figures


def test_resident_counts_each_storage_once() -> None:
    before = resident_cpu_bytes()
    a = kilobytes(100)
    views = [a[:10], a.view(4, -1), nn.Parameter(a), a.detach()]
    assert resident_cpu_bytes() - before == 100 * KB
    slice_of_freed = torch.empty(64 * 256)[:1]
    assert resident_cpu_bytes() - before == 164 * KB
    array = a.numpy()
    views.append(torch.from_numpy(array[: 50 * 256]))
    assert resident_cpu_bytes() - before == 164 * KB
    assert slice_of_freed.numel() == 1


def test_resident_counts_parameters_and_their_gradients() -> None:
    before = resident_cpu_bytes()
    layer = nn.Linear(64, 64, bias=False)
    assert resident_cpu_bytes() - before == 16 * KB
    layer(torch.ones(64)).sum().backward()
    assert resident_cpu_bytes() - before == 32 * KB
    embedding = nn.Embedding(100, 64, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    assert resident_cpu_bytes() - before == 32 * KB + 100 * 64 * 4 + 2 * 64 * 4 + 2 * 8


def test_resident_counts_a_view_that_autograd_says_nothing_of() -> None:
    before = resident_cpu_bytes()
    base = kilobytes(4).mul(1)
    with torch.no_grad():
        view = base[:256]
    base.mul_(torch.ones(1, requires_grad=True))
    with pytest.raises(RuntimeError, match="A view was created in no_grad mode"):
        _ = view.is_leaf
    del base
    assert 4 * KB <= resident_cpu_bytes() - before < 5 * KB


def test_fake_and_meta_tensors_hold_nothing() -> None:
    before = resident_cpu_bytes()
    with FakeTensorMode() as mode:
        fake = [torch.empty(1000), nn.Parameter(torch.empty(1000)), mode.from_tensor(torch.empty(0, device="meta"))]
        inside = resident_cpu_bytes()
    meta = torch.empty(1000, device="meta")
    assert resident_cpu_bytes() == inside == before
    assert len(fake) + meta.dim() == 4


def test_a_kernels_own_workspace_is_seen() -> None:
    # The kernel repeats the replicated padding's neighbour: im2col columns of a dilated double convolution.
    x, w = torch.ones(1, 8, 32, 32, dtype=torch.float64), torch.ones(4, 8, 3, 3, dtype=torch.float64)
    with measure_peak("cpu") as peak:
        y = torch.ops.aten.slow_conv_dilated2d(x, w, [3, 3], None, [1, 1], [2, 2], [2, 2])
    columns = 8 * 9 * 32 * 32 * 8
    assert peak.allocated_bytes >= y.nbytes + columns


def test_the_backward_pass_and_a_thread_of_our_own_are_seen() -> None:
    figures: list[int] = []

    def train() -> None:
        x = torch.ones(256, 64, requires_grad=True)
        with measure_peak("cpu") as peak:
            (x * x).sum().backward()
        figures.append(peak.allocated_bytes)

    train()
    worker = threading.Thread(target=train)
    with measure_peak("cpu") as peak:  # a profiler belongs to its thread: both meters run at once
        worker.start()
        worker.join()
    assert figures[0] == figures[1] >= 2 * 64 * KB
    assert peak.allocated_bytes == 0


def test_an_exception_passes_and_the_meter_stops() -> None:
    def fails() -> None:
        a = kilobytes(8)
        a.mul_(1 / 0)

    meter = measure_peak("cpu")
    with pytest.raises(ZeroDivisionError), meter:
        fails()
    assert meter.allocated_bytes == 8 * KB
    assert not profiler_is_active()
    with measure_peak("cpu"):
        pass


def test_reading_too_early_nesting_and_reuse_are_refused() -> None:
    with measure_peak("cpu") as peak:
        with pytest.raises(RuntimeError, match="once the `with"):
            _ = peak.bytes
        assert "running" in repr(peak)
        with pytest.raises(RuntimeError, match="already active"), measure_peak("cpu"):
            pass
        a = kilobytes(4)
    assert peak.allocated_bytes == a.nbytes
    with pytest.raises(RuntimeError, match="has been used"), peak:
        pass
    with torch.profiler.profile(), pytest.raises(RuntimeError, match="already active"), measure_peak("cpu"):
        pass


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="not 'meta'"):
        measure_peak("meta")


def test_nothing_is_written_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    with measure_peak("cpu"):
        kilobytes(1)
    if LEGACY_PROFILER:
        assert capfd.readouterr().err == ""


def test_both_profilers_tell_the_same() -> None:
    def events(legacy: bool) -> list[int]:
        recorder = MemoryEvents(legacy=legacy)
        recorder.start()
        x = torch.ones(100, requires_grad=True)
        (x.exp() * 2).sum().backward()
        return recorder.stop()

    kineto = events(False)
    assert len(kineto) > 5
    if LEGACY_PROFILER:
        assert events(True) == kineto


def test_metering_many_events_is_cheap() -> None:
    a = torch.ones(4)
    with measure_peak("cpu") as peak:
        for _ in range(20_000):
            a = a + 1
    assert peak.allocated_bytes < 64


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_is_metered_by_its_allocator() -> None:
    held = torch.empty(1024, device="cuda")
    with measure_peak() as peak:
        a = torch.empty(2048, device="cuda")
        del a
        with pytest.raises(RuntimeError, match="another memopt meter"), measure_peak("cuda"):
            pass
    assert peak.resident_bytes >= held.nbytes
    assert peak.allocated_bytes == 8192


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the resident set from /proc")
def test_metering_does_not_splinter_the_heap() -> None:
    script = """
import torch, memopt
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
x = torch.randn(1024, 1024)
before = resident()
with memopt.measure_peak("cpu"):
    for _ in range(200):
        y = x * 2
        z = y + 1
assert resident() - before < 100 * 2**20, (resident() - before) / 2**20
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.skipif(not LEGACY_PROFILER, reason="kineto tells of its events at the end only")
def test_a_running_meter_says_what_is_held_now() -> None:
    with measure_peak("cpu") as peak:
        before = peak.held_bytes()
        held = [torch.zeros(2**18) for _ in range(3)]
        assert peak.held_bytes() == before + 3 * 2**20
        del held[0]
        assert peak.held_bytes() == before + 2 * 2**20
        leaf = torch.zeros(2**18, requires_grad=True)
        seen: list[int] = []
        leaf.register_hook(lambda gradient: seen.append(peak.held_bytes()))
        doubled = leaf * 2
        assert (forward := peak.held_bytes()) == pytest.approx(before + 4 * 2**20, abs=64)  # the number 2, too
        doubled.sum().backward()
    assert seen == [forward]
    assert peak.allocated_bytes >= 5 * 2**20
