from __future__ import annotations

import torch

from memopt.account.eager_bytes import EagerBytes
from memopt.compat.fakes import FakeTensor, FakeTensorMode


def test_storages_count_once_and_until_they_die() -> None:
    count = EagerBytes("cpu", "cpu")
    with FakeTensorMode(), count:
        x = torch.zeros(1000)
        view = x[10:].view(-1, 9)
        x.add_(1)
        assert count.live_bytes == 4000
        y = x * 2
        assert count.live_bytes == 8000
        del y
        pair = torch._foreach_mul([x, x], 2.0)
        assert count.live_bytes == 12000
        del pair
        assert count.live_bytes == 4000
        del x
        assert count.live_bytes == 4000, "the view holds it"
        del view
    assert count.live_bytes == 0
    assert 12000 <= count.peak_bytes <= 12000 + 64


def test_only_what_lies_on_the_device_counts() -> None:
    count = EagerBytes("cuda", "cuda")
    with FakeTensorMode(), count:
        there = torch.zeros(100, device="cuda")
        here = torch.zeros(100)
        assert count.live_bytes == 512, "in whole blocks"
        assert here.device.type == "cpu"
        assert there.device.type == "cuda"


def test_single_numbers_are_real() -> None:
    count = EagerBytes("cpu", "cpu")
    with FakeTensorMode(allow_non_fake_inputs=True), count:
        step = torch.zeros(())
        steps = [step, torch.tensor(7.0)]
        torch._foreach_add_(steps, torch.tensor(1.0), alpha=1.0)
        step += 1
        large = torch.ones(3) * step
        assert isinstance(large, FakeTensor)
        assert [number.item() for number in steps] == [2.0, 8.0]
        assert count.live_bytes == 4 + 4 + 12
        assert large.sum().item() == 0.5, "of a fake number nothing is known"


def test_kernels_are_run_for_what_they_hold_where_their_rule_would_be_the_peak() -> None:
    """A mask with one value fills: no coordinates are made of it, as the rule for masks has it."""
    count = EagerBytes("cpu", "cpu")
    with FakeTensorMode(allow_non_fake_inputs=True), count:
        x = torch.zeros(100, 100)
        x[x.gt(0)] = 1.0
    assert count.peak_bytes <= 4 * 100 * 100 + 100 * 100 + 128


def test_the_kernels_that_ran() -> None:
    count = EagerBytes("cpu", "cpu")
    with FakeTensorMode(), count:
        torch._foreach_mul([torch.zeros(2)], 2.0)
    assert "aten::_foreach_mul" in count.kernels
