"""The rule for what a convolution by groups holds on the CPU is at least what it is measured to hold."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from memopt.compat.host import MemoryEvents
from memopt.device.op_call import describe
from memopt.device.workspace import estimate_workspace
from tests.marks import slow

aten = torch.ops.aten
SHAPES = {
    "ConvNeXt, stage 3": (8, 384, 14, 7, 384),
    "ConvNeXt, stage 4": (8, 768, 7, 7, 768),
    "ResNeXt": (8, 256, 14, 3, 32),
}


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.bfloat16)])
@pytest.mark.parametrize("name", SHAPES)
def test_the_rule_is_an_upper_bound(name: str, dtype: torch.dtype, layout: torch.memory_format) -> None:
    samples, channels, side, kernel, groups = SHAPES[name]
    x = torch.randn(samples, channels, side, side).to(dtype).contiguous(memory_format=layout)
    weight = torch.randn(channels, channels // groups, kernel, kernel).to(dtype)
    geometry = ([1, 1], [kernel // 2] * 2, [1, 1], False, [0, 0], groups)
    gradient = torch.randn_like(aten.convolution(x, weight, None, *geometry))
    arguments = (gradient, x, weight, [channels], *geometry, [True] * 3)
    events = MemoryEvents()
    events.start()
    results = aten.convolution_backward(*arguments)
    held = max(accumulate(events.stop()))
    made = sum(result.untyped_storage().nbytes() for result in results)
    call = describe(aten.convolution_backward.default, arguments, {}, results)
    assert held - made <= estimate_workspace(call, "cpu")
