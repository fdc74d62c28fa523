from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node

from passes.patterns.mask_rows import MaskRows
from tests.passes.operators import capture_operators

LENGTH = 6
INFINITE, LEAST = float("-inf"), torch.finfo(torch.float32).min


def causal(number: float = LEAST) -> Tensor:
    places = torch.arange(LENGTH)
    return torch.where(places[:, None] >= places, 0.0, number)


def all_masked() -> Tensor:
    return causal().masked_fill((torch.arange(LENGTH) == 2)[:, None], LEAST)


MASKS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int | None]] = {
    "causal": (lambda x, seen: causal(), 1),
    "causal, infinite": (lambda x, seen: causal(INFINITE), 1),
    "nothing": (lambda x, seen: torch.zeros(LENGTH, LENGTH), 0),
    "a whole row": (lambda x, seen: all_masked(), None),
    "an input": (lambda x, seen: x, None),
    "an input's bools": (lambda x, seen: torch.where(seen, 0.0, LEAST), None),
    "an input's bools, infinite": (lambda x, seen: torch.where(seen, 0.0, INFINITE), 0),
    "a bias": (lambda x, seen: (x @ x).unsqueeze(0), 0),
    "a bias and a mask": (lambda x, seen: x @ x + causal(), 1),
    "two masks": (lambda x, seen: causal().expand(2, -1, -1) + (causal() + x @ x), 2),
    "a bias, filled": (lambda x, seen: (x @ x).masked_fill(causal() < 0, LEAST), 1),
    "a bias, filled by an input": (lambda x, seen: torch.where(seen, x @ x, LEAST), None),
    "at random": (lambda x, seen: torch.rand(LENGTH, LENGTH), None),
}


def mask_of(name: str) -> tuple[MaskRows, Node]:
    """The mask as the argument of the last call but the sum that makes it a scalar."""
    make, _ = MASKS[name]
    x = torch.randn(LENGTH, LENGTH, requires_grad=True)
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    graph_module = capture_operators(lambda x, seen: (make(x, seen) * x).sum(), x=x, seen=seen).graph_module
    (product,) = (node for node in graph_module.graph.nodes if node.name.startswith("mul") and node.users)
    return MaskRows(), product.args[0]


@pytest.mark.parametrize("name", MASKS)
def test_masking_terms(name: str) -> None:
    rows, mask = mask_of(name)
    assert rows.masking_terms(mask) == MASKS[name][1]


def test_known_under_a_fake_mode_too() -> None:
    rows, mask = mask_of("causal")
    with FakeTensorMode():
        assert rows.masking_terms(mask) == 1


def test_bools() -> None:
    make = lambda x: torch.where(torch.arange(LENGTH)[:, None] >= torch.arange(LENGTH), x, 0.0).sum()  # noqa: E731
    graph_module = capture_operators(make, x=torch.randn(LENGTH, LENGTH)).graph_module
    (ge,) = (node for node in graph_module.graph.nodes if node.name.startswith("ge"))
    rows = MaskRows()
    assert rows.masks_no_row_whole(ge, False)
    assert not rows.masks_no_row_whole(ge, True)
