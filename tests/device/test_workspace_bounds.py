"""The rules for workspaces are upper bounds of what the operators of torch's own tests take on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode

from memopt.compat.operators import tree_leaves
from memopt.device.op_call import OpCall, describe
from memopt.device.workspace import _is_cheap, _measure, estimate_workspace
from memopt.device.workspace_rules import SCALARS

aten = torch.ops.aten
SAMPLES = 12
"""The samples of an operator that are run."""


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


def calls_of(operator: Any, dtype: torch.dtype) -> Iterator[OpCall]:
    samples = list(operator.sample_inputs("cpu", dtype, requires_grad=operator.supports_autograd))[:SAMPLES]
    calls = Calls()
    for sample in samples:
        with suppress(Exception), calls:  # samples that torch skips in its own tests
            result = operator.op(sample.input, *sample.args, **sample.kwargs)
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
def test_no_operator_takes_more_than_its_rule_says(part: int, dtype: torch.dtype) -> None:
    operators = [one for one in op_db[part::8] if one.supports_dtype(dtype, "cpu")]
    calls = {call for operator in operators for call in calls_of(operator, dtype)}
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
