from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from memopt.compat.operators import TorchDispatchMode, tree_leaves
from memopt.device import context_probe
from memopt.device.context_probe import call_libraries, context_bytes, measure_context_bytes

MB = 1024**2


def test_what_is_neither_free_nor_reserved() -> None:
    assert context_bytes(10_000 * MB, 9_000 * MB, f"{400 * MB}\n") == 600 * MB


@pytest.mark.parametrize(
    ("before", "during", "reserved"),
    [(1000, 400, ""), (1000, 400, "Traceback"), (1000, 1100, "0"), (1000, 990, "0"), (90_000, 1000, "0")],
)
def test_what_cannot_be_right_is_not_believed(before: int, during: int, reserved: str) -> None:
    assert context_bytes(before * MB, during * MB, reserved) is None


class Called(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The names of the operators that run, with the dtype of their first tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: set[tuple[str, torch.dtype]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = next((leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)), None)
        if first is not None:
            self.operators.add((func._schema.name.removeprefix("aten::"), first.dtype))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_libraries_are_called_forward_and_backward(dtype: torch.dtype) -> None:
    with Called() as called:  # type: ignore[no-untyped-call]
        call_libraries(torch.device("cpu"), dtype)
    for operator in ("convolution", "convolution_backward", "addmm", "mm", "native_batch_norm", "native_layer_norm"):
        assert (operator, dtype) in called.operators, operator
    names = {name for name, _ in called.operators}
    assert {"embedding", "embedding_dense_backward", "native_batch_norm_backward"} <= names
    assert "_softmax_backward_data" in names or any("attention" in name and "backward" in name for name in names)
    assert any(name.startswith(("addcdiv", "_foreach_addcdiv", "_fused_adamw")) for name in names), "a step is taken"


def test_it_is_another_process_that_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A stand-in for the process: says what it reserves, then waits for the end of its input."""
    child = tmp_path / "child.py"
    child.write_text(f"import sys\nprint({100 * MB}, flush=True)\nassert not sys.stdin.read()\n")
    monkeypatch.setattr(context_probe, "__file__", str(child))
    free = iter([(4000 * MB, 0), (3500 * MB, 0)])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: next(free))
    assert measure_context_bytes(torch.device("cuda")) == 400 * MB


def test_a_process_that_fails_measures_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    child = tmp_path / "child.py"
    child.write_text("raise SystemExit(1)\n")
    monkeypatch.setattr(context_probe, "__file__", str(child))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4000 * MB, 0))
    assert measure_context_bytes(torch.device("cuda")) is None
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nowhere"))
    assert measure_context_bytes(torch.device("cuda")) is None
