from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from memopt.compat.fakes import FakeTensor, broadcast_masks, failing_on_fakes, new_fake_mode, to_fake
from memopt.compat.symbols import limit_of
from memopt.compat.tensors import with_memory
from passes.compat import replaced_all

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("source", ["cpu", "meta"])
def test_a_fake_has_all_but_memory(source: str) -> None:
    tensor = torch.zeros(3, 2, device=source, dtype=torch.float64).t().requires_grad_()
    fake = to_fake(new_fake_mode(), tensor, CUDA)
    assert isinstance(fake, FakeTensor)
    assert (fake.shape, fake.stride(), fake.dtype, fake.device) == ((2, 3), (1, 2), torch.float64, CUDA)
    assert fake.requires_grad


def test_the_fake_of_a_parameter_is_a_parameter() -> None:
    fake = to_fake(new_fake_mode(), nn.Parameter(torch.zeros(2), requires_grad=False), CUDA, torch.bfloat16)
    assert isinstance(fake, nn.Parameter)
    assert fake.dtype == torch.bfloat16
    assert not fake.requires_grad


class Scales:
    def __init__(self, values: torch.Tensor) -> None:
        self.values, self.again, self.blocks = values, self, 4


class Packed(nn.Parameter):
    """A weight with scales in its attributes, as bitsandbytes has them."""


def test_tensors_in_the_attributes_of_a_parameter_have_fakes_too() -> None:
    weight = Packed(torch.zeros(8, dtype=torch.uint8), requires_grad=False)
    weight.scales, weight.layer = Scales(torch.ones(2)), nn.Linear(2, 2)  # type: ignore[attr-defined]
    fake: Any = to_fake(new_fake_mode(), weight, CUDA)
    assert isinstance(fake.scales.values, FakeTensor)
    assert fake.scales.values.device == CUDA
    assert fake.scales.again is fake.scales or isinstance(fake.scales.again.values, FakeTensor)
    assert (fake.scales.blocks, fake.layer) == (4, weight.layer)  # type: ignore[attr-defined]
    assert not isinstance(weight.scales.values, FakeTensor)  # type: ignore[attr-defined]
    plain = nn.Parameter(torch.zeros(8))
    plain.master = plain  # type: ignore[attr-defined]
    assert not hasattr(to_fake(new_fake_mode(), plain, CUDA), "master")
    assert [one.nbytes for one in with_memory([weight])] == [8, 8]


def test_a_fake_parameter_gets_the_mode_and_the_device_asked_for() -> None:
    mode, parameter = new_fake_mode(), to_fake(new_fake_mode(), nn.Parameter(torch.zeros(2)), torch.device("cpu"))
    fake: Any = to_fake(mode, parameter, CUDA)
    assert (fake.device, fake.fake_mode) == (CUDA, mode)


def test_each_mode_has_its_own_symbols() -> None:
    assert new_fake_mode().shape_env is not new_fake_mode().shape_env


def test_failures_on_fakes_are_not_logged() -> None:
    log = logging.getLogger("torch._subclasses.fake_tensor")
    with failing_on_fakes():
        assert log.disabled
    assert not log.disabled
    with pytest.raises(KeyError), failing_on_fakes():
        raise KeyError
    assert not log.disabled


def test_a_mask_larger_than_its_operand_may_select_more_elements() -> None:
    mode = new_fake_mode()
    value, mask = (to_fake(mode, tensor, torch.device("cpu")) for tensor in (torch.ones(5), torch.ones(4, 5).bool()))
    with replaced_all([broadcast_masks()]), mode:
        assert limit_of(value.masked_select(mask).shape[0]) == 20  # type: ignore[arg-type]
    with mode:
        assert limit_of(value.masked_select(mask).shape[0]) == 5  # type: ignore[arg-type]
