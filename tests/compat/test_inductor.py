from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx

from memopt.compat.inductor import _nearby_fusions, compile_by_inductor
from memopt.errors import CaptureError


class Kernel:
    """A node of inductor's scheduler, at one place in its order."""

    def __init__(
        self, order: int, *, reduction: bool = False, extern: bool = False, ancestors: frozenset[str] = frozenset()
    ) -> None:
        self.min_order = self.max_order = order
        self.reduction, self.extern, self.ancestors = reduction, extern, ancestors

    def is_extern(self) -> bool:
        return self.extern

    def is_reduction(self) -> bool:
        return self.reduction

    def get_nodes(self) -> list[Kernel]:
        return [self]

    def get_operation_names(self) -> set[str]:
        return {f"op{self.min_order}"}


@pytest.fixture(autouse=True)
def inductor_would_fuse_all(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.choices import InductorChoices

    monkeypatch.setattr(InductorChoices, "can_fuse", staticmethod(lambda *_: True))


def fuses(nodes: list[Kernel], one: int, other: int) -> bool:
    scheduler: Any = SimpleNamespace(nodes=nodes)
    return bool(_nearby_fusions()().can_fuse(scheduler, nodes[one], nodes[other], 0))


def test_neighbors_are_fused() -> None:
    assert fuses([Kernel(0), Kernel(1), Kernel(2)], 0, 2)


def test_nothing_is_fused_across_a_kernel() -> None:
    nodes = [Kernel(0), Kernel(1, extern=True), Kernel(2)]
    assert not fuses(nodes, 0, 2)
    assert not fuses(nodes, 2, 0)


@pytest.mark.parametrize(("kernels", "fused"), [(3, True), (4, False)])
def test_a_reduction_moves_up_past_a_few_kernels(kernels: int, fused: bool) -> None:
    between = [Kernel(1 + number, extern=True) for number in range(kernels)]
    nodes = [Kernel(0), *between, Kernel(1 + kernels, reduction=True)]
    assert fuses(nodes, 0, -1) is fused


def test_a_reduction_does_not_move_past_what_it_needs() -> None:
    needs = frozenset({"op1"})
    assert not fuses([Kernel(0), Kernel(1, extern=True), Kernel(2, reduction=True, ancestors=needs)], 0, 2)


def test_inductor_can_write_the_class_into_the_key_of_its_cache() -> None:
    made = _nearby_fusions()
    assert pickle.loads(pickle.dumps(made)) is made


def test_where_inductor_fails_the_user_is_told_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.exc import InductorError

    def failing(*_args: Any, **_kwargs: Any) -> Any:
        raise InductorError(RuntimeError("no\n  compiler"), None)

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", failing)
    with pytest.raises(CaptureError) as raised:
        compile_by_inductor(fx.symbolic_trace(torch.nn.ReLU()), [], failing, failing, lambda: "no plan")
    told = "inductor cannot compile a region of the model: RuntimeError: no compiler; give optimize backend='aten'"
    assert str(raised.value) == told
