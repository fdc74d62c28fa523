"""Values on the host: the same bits back, memory used again, and none of it left behind."""

import gc

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import memopt
from passes.ops.offload_ops import AWAIT_BACK, AWAIT_OUT, COPY_BACK, COPY_OUT, _HostMemory, host_memory

PAGE = 4096


def there_and_back(value: torch.Tensor) -> torch.Tensor:
    host = AWAIT_OUT(COPY_OUT(value), value)
    return AWAIT_BACK(COPY_BACK(host, value.device), host)


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(5, 7),
        torch.randn(5, 7).t(),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(4, 6)[1:, ::2],
        torch.randn(3, 1).expand(3, 8),
        torch.randn(4, 3).to(torch.bfloat16),
        torch.randn(4, 3).to(torch.float8_e4m3fn),
        torch.tensor([True, False, True]),
        torch.tensor([float("nan"), -0.0]),
        torch.tensor(3),
        torch.zeros(0, 4),
    ],
    ids=lambda value: f"{str(value.dtype)[6:]}-{tuple(value.shape)}-{value.stride()}",
)
def test_the_same_bits_in_the_same_layout(value: torch.Tensor) -> None:
    back = there_and_back(value)
    assert (back.dtype, back.shape, back.stride()) == (value.dtype, value.shape, value.stride())
    ours, theirs = (item.clone(memory_format=torch.contiguous_format) for item in (back, value))
    assert torch.equal(ours.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8))
    assert value.numel() == 0 or back.data_ptr() != value.data_ptr()


def test_what_is_on_the_host_is_not_on_the_device() -> None:
    with memopt.measure_peak("cpu") as peak:
        values = [torch.ones(2**18) for _ in range(2)]
        for _ in range(8):
            hosts = [COPY_OUT(value) for value in values]
            values.clear()
            values += [COPY_BACK(host, torch.device("cpu")) for host in hosts]
            del hosts
    assert peak.allocated_bytes == 2 * 2**20


def test_a_copy_is_of_the_moment() -> None:
    value = torch.zeros(3)
    host = COPY_OUT(value)
    value.fill_(1.0)
    first = COPY_BACK(host, value.device)
    assert torch.equal(first, torch.zeros(3))
    first.fill_(2.0)
    assert torch.equal(COPY_BACK(host, value.device), torch.zeros(3)), "a retained graph fetches twice"


def test_fakes_have_the_layout_and_the_memory() -> None:
    with FakeTensorMode():
        value = torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last)
        back = there_and_back(value)
    assert (back.shape, back.stride(), back.device) == (value.shape, value.stride(), value.device)
    assert back.untyped_storage().nbytes() == value.untyped_storage().nbytes()


def test_hooks_on_saved_tensors_are_refused() -> None:
    host = COPY_OUT(torch.ones(3)).clone()
    with pytest.raises(RuntimeError, match="hooks on saved tensors"):
        COPY_BACK(host, torch.device("cpu"))


def test_blocks_are_used_again() -> None:
    memory = _HostMemory(pinned=False)
    first, block = memory.lease(10 * PAGE)
    view = first[10:]
    del first
    assert memory.leased_bytes == 10 * PAGE
    del view
    assert (memory.leased_bytes, memory.mapped_bytes) == (0, 10 * PAGE)
    again, same = memory.lease(9 * PAGE)
    assert same is block
    assert again.nbytes == 9 * PAGE
    _other, another = memory.lease(9 * PAGE)
    assert another is not block
    assert memory.most_leased_bytes == 19 * PAGE
    del again
    _small, fresh = memory.lease(2 * PAGE)
    assert fresh is not block, "it would hold five times as much as is asked for"


def test_no_more_is_kept_than_was_ever_in_use() -> None:
    memory = _HostMemory(pinned=False)
    for pages in (1, 4, 16, 64):
        memory.lease(pages * PAGE)
        gc.collect()
    assert memory.leased_bytes == 0
    assert memory.mapped_bytes <= 2 * 64 * PAGE


def test_one_pool_for_each_kind_of_device() -> None:
    assert host_memory("cpu") is host_memory("cpu")
    assert not host_memory("cpu").pinned


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu() -> None:
    """Copies beside compute bring the same bits, and the device's memory is free as soon as the value is let go of."""
    values = [torch.randn(2**22, device="cuda") for _ in range(4)]
    expected = [value.cpu() for value in values]
    held = torch.cuda.memory_allocated()
    for _ in range(3):
        hosts = [COPY_OUT(value) for value in values]
        assert all(host.is_pinned() for host in hosts)
        hosts = [AWAIT_OUT(host, value) for host, value in zip(hosts, values, strict=True)]
        values.clear()
        assert torch.cuda.memory_allocated() == held - 4 * 2**24
        overwritten = [torch.full((2**22,), 7.0, device="cuda") for _ in range(4)]
        del overwritten
        fetched = [COPY_BACK(host, torch.device("cuda", torch.cuda.current_device())) for host in hosts]
        values = [AWAIT_BACK(*item) for item in zip(fetched, hosts, strict=True)]
        del hosts, fetched
        assert all(torch.equal(value.cpu(), item) for value, item in zip(values, expected, strict=True))
    assert torch.cuda.memory_allocated() == held
    assert host_memory("cuda").leased_bytes == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_nobody_waits_for_is_let_go_on_a_gpu() -> None:
    host = COPY_OUT(torch.ones(2**20, device="cuda"))
    held = torch.cuda.memory_allocated()
    COPY_BACK(host, torch.device("cuda", torch.cuda.current_device()))
    assert torch.cuda.memory_allocated() > held, "it is being written to"
    del host
    assert host_memory("cuda").leased_bytes == 0
    assert torch.cuda.memory_allocated() == held
