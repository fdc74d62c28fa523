"""transformers, traced by Dynamo, makes the choices about masks that its eager model makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import masking_utils
from transformers.integrations import sdpa_attention

from memopt.compat.eager_mode import eager_mask_branches

LENGTH = 6


def graph_of(call: Callable[..., Any], *args: Tensor) -> list[torch.fx.GraphModule]:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph_module: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph_module)
        return graph_module.forward

    with eager_mask_branches(args, {}):
        torch.compile(call, backend=keep, fullgraph=True, dynamic=False)(*args)
    return graphs


def is_packed(positions: Tensor) -> Tensor:
    return positions + (0 if masking_utils.find_packed_sequence_indices(positions) is None else 100)


def counted(x: Tensor) -> Tensor:
    return is_packed((torch.arange(LENGTH) + 3).unsqueeze(0).expand(2, -1)) + x


def given(x: Tensor) -> Tensor:
    return is_packed(x)


def strided(x: Tensor) -> Tensor:
    return is_packed(torch.arange(0, 2 * LENGTH, 2)[None]) + x


def repeated(x: Tensor) -> Tensor:
    return is_packed(torch.arange(LENGTH).unsqueeze(-1).expand(-1, LENGTH)) + x.sum()


@pytest.mark.parametrize(("call", "packed"), [(counted, False), (given, True), (strided, True), (repeated, True)])
def test_positions_that_plainly_count_up_are_one_sequence(call: Callable[[Tensor], Tensor], packed: bool) -> None:
    (graph,) = graph_of(call, torch.zeros(2, LENGTH, dtype=torch.int64))
    assert any(node.target is torch.diff for node in graph.graph.nodes) is packed


IDLE = {
    "ones": ({"attention_mask": torch.ones(2, LENGTH)}, True),
    "padding": ({"attention_mask": torch.ones(2, LENGTH).tril()}, False),
    "positions": ({"position_ids": torch.arange(LENGTH)[None]}, True),
    "packed": ({"position_ids": torch.arange(LENGTH)[None] % 3}, False),
    "unknown": ({"attention_mask": torch.ones(2, LENGTH, device="meta")}, False),
    "none": ({}, False),
}


@pytest.mark.parametrize("case", IDLE)
def test_shared_keys_are_repeated_only_for_a_mask_that_masks(case: str) -> None:
    named, shared = IDLE[case]
    original, key = sdpa_attention.use_gqa_in_sdpa, torch.ones(1, 1, 2, 4)
    for args, kwargs in (((), named), ((named,), {})):
        with eager_mask_branches(args, kwargs):
            assert sdpa_attention.use_gqa_in_sdpa(torch.ones(2, 2), key, key) is shared
        assert sdpa_attention.use_gqa_in_sdpa is original
