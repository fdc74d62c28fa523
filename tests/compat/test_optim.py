from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _default_to_fused_or_foreach, _foreach_supported_types

from memopt.compat.fakes import FakeTensor, new_fake_mode
from memopt.compat.modules import eager_optimizers, nonfinite_flags, skips_on_device


def parameter(gradient: float) -> nn.Parameter:
    made = nn.Parameter(torch.ones(2))
    made.grad = torch.full((2,), gradient)
    return made


@pytest.mark.parametrize(("gradient", "flag"), [(1.0, 0.0), (float("inf"), 1.0), (float("nan"), 1.0)])
def test_the_flags_are_those_that_the_scaler_reads(gradient: float, flag: float) -> None:
    optimizer = torch.optim.SGD([parameter(gradient)], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    (found,) = nonfinite_flags(scaler, optimizer)
    assert found.item() == flag
    found.fill_(1.0)
    scaler.step(optimizer)
    assert optimizer.param_groups[0]["params"][0].tolist() == [1, 1]  # skipped, by this very tensor


def test_fused_optimizers_skip_on_the_device() -> None:
    assert skips_on_device(torch.optim.AdamW([parameter(1.0)], fused=True))
    assert not skips_on_device(torch.optim.AdamW([parameter(1.0)]))


def test_optimizers_choose_for_fakes_as_for_tensors() -> None:
    with new_fake_mode():
        fake = nn.Parameter(torch.ones(2))
    before = list(_foreach_supported_types)
    assert _default_to_fused_or_foreach([fake], differentiable=False) == (False, False)
    with eager_optimizers(foreach=True):
        assert FakeTensor in _foreach_supported_types
        assert _default_to_fused_or_foreach([fake], differentiable=False) == (False, isinstance(fake, nn.Parameter))
        assert not torch.compiler.is_compiling()
    assert _foreach_supported_types == before
    assert _default_to_fused_or_foreach([parameter(1.0)], differentiable=False) == (False, False)
