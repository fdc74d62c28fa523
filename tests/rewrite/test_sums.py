"""Kernels of the CPU that precision takes to sum in fp32 though their input has 16 bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from memopt.compat.host import HOST
from memopt.device.devices import device_of
from memopt.rewrite.dtypes import KERNELS_SUM_IN_FP32

ROWS, WIDTH = 16384, 32
SUMS = device_of(HOST).sums_in_16_bits
IMAGES = (16, WIDTH, 32, 32)
KERNELS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "layer_norm": lambda x, w, b: F.layer_norm(x, (WIDTH,), w, b),
    "rms_norm": lambda x, w, b: F.rms_norm(x, (WIDTH,), w),
    "batch_norm": lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
    "group_norm": lambda x, w, b: F.group_norm(x.view(IMAGES), 4, w, b),
    "instance_norm": lambda x, w, b: F.instance_norm(x.view(IMAGES), None, None, w, b),
    "avg_pool2d": lambda x, w, b: F.avg_pool2d(x.view(IMAGES), 8),
    "adaptive_avg_pool2d": lambda x, w, b: F.adaptive_avg_pool2d(x.view(IMAGES), 1),
    "upsample_nearest2d": lambda x, w, b: F.interpolate(x.view(IMAGES), scale_factor=4),
}


def off(run: Callable[..., Tensor]) -> float:
    """The largest relative error of a gradient in bf16 against float64."""
    torch.manual_seed(0)
    given = [torch.randn(ROWS, WIDTH), torch.rand(WIDTH) + 0.5, torch.randn(WIDTH)]
    low = [one.bfloat16().requires_grad_() for one in given]
    wide = [one.detach().double().requires_grad_() for one in low]
    result = run(*low)
    tangent = (torch.randn(result.shape) + 0.05).bfloat16()
    result.backward(tangent)
    run(*wide).backward(tangent.double())
    pairs = [(one.grad.double(), two.grad) for one, two in zip(low, wide, strict=True) if two.grad is not None]
    return max(float((one - two).norm() / two.norm()) for one, two in pairs)


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_sum_as_precision_takes_them_to(name: str) -> None:
    assert name in KERNELS_SUM_IN_FP32
    assert (off(KERNELS[name]) < 0.01) == (name not in SUMS)
