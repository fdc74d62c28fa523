"""The rules for workspaces are upper bounds of what the operators of torch's own tests take on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode

from memopt.compat.operators import tree_leaves, tree_map
from memopt.device.op_call import OpCall, describe
from memopt.device.workspace import _is_cheap, _measure, estimate_workspace
from memopt.device.workspace_rules import SCALARS

aten = torch.ops.aten
SAMPLES = 12
"""The samples of an operator that are run."""


GROW = ("combinations", "cartesian_prod", "kron", "meshgrid", "masked.logsumexp")
"""Operators whose results are too large for longer inputs."""


class Calls(TorchDispatchMode):
    """Collects the calls of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[OpCall] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        with suppress(Exception):  # a call that cannot be described has no price either
            self.found.add(describe(func, args, kwargs or {}, result))
        return result


def with_gaps(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([longer(tensor)] * 2, -1)[..., 0]


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    return longer(tensor).transpose(0, -1).contiguous().transpose(0, -1)


def longer(tensor: torch.Tensor) -> torch.Tensor:
    """With 32 times as many rows, so that what a kernel takes beside copies is little."""
    return tensor.repeat(32, *[1] * (tensor.dim() - 1))


def laid_out(values: Any, layout: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    def change(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.dim() or value.numel() > 2**12:
            return value
        return layout(value.detach()).requires_grad_(value.requires_grad)

    return tree_map(change, values)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda tensor: tensor,
    "with gaps": with_gaps,
    "transposed": transposed,
}


def calls_of(operator: Any, dtype: torch.dtype, layout: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[OpCall]:
    samples = list(operator.sample_inputs("cpu", dtype, requires_grad=operator.supports_autograd))[:SAMPLES]
    calls = Calls()
    for sample in samples:
        with suppress(Exception), calls:  # samples that torch skips in its own tests, and sizes that must agree
            given = laid_out((sample.input, sample.args, sample.kwargs), layout)
            result = operator.op(given[0], *given[1], **given[2])
            ends = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
            torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
    yield from calls.found


def exceeds(call: OpCall) -> bool:
    measured = None if call.op.is_view or not _is_cheap(call) else _measure(call)
    return measured is not None and measured.workspace_bytes > estimate_workspace(call, "cpu") + SCALARS


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_operator_takes_more_than_its_rule_says(part: int, dtype: torch.dtype, layout: str) -> None:
    operators = [one for one in op_db[part::8] if one.supports_dtype(dtype, "cpu") and one.name not in GROW]
    calls = {call for operator in operators for call in calls_of(operator, dtype, LAYOUTS[layout])}
    assert len(calls) > 500
    assert [str(call) for call in calls if exceeds(call)] == []


CASES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "roll of two dimensions": (aten.roll.default, (torch.randn(4, 64, 64), (3, 3), (1, 2))),
    "isinf": (aten.isinf.default, (torch.randn(100, 100),)),
    "matrices whose batch is not contiguous": (aten.tril.default, (torch.randn(65, 8, 64)[:64].transpose(0, 1),)),
    "int32 index": (aten.gather.default, (torch.randn(64, 64), 0, torch.zeros(64, 64, dtype=torch.int32))),
    "mean by an index": (
        aten.scatter_reduce.two,
        (torch.randn(64, 64), 0, torch.zeros(64, 64, dtype=torch.int64), torch.randn(64, 64), "mean"),
    ),
    "mask that is broadcast": (aten.masked_select.default, (torch.randn(64, 1, 64), torch.ones(64, 64).bool())),
    "images of one channel": (
        aten.convolution.default,
        (torch.randn(8, 1, 64, 64), torch.randn(1, 1, 3, 3), None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_rules_of_single_operators(case: str) -> None:
    operator, arguments = CASES[case]
    call = describe(operator, arguments, {}, operator(*arguments))
    measured = _measure(call)
    assert measured is not None
    assert measured.workspace_bytes > 8192
    assert not exceeds(call)
