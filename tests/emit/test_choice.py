from __future__ import annotations

import pytest
import torch

from memopt.emit import ATEN, INDUCTOR, lowering_for, lowering_of_region
from tests.passes.capture import dynamic_mlp, rows_above_zero


@pytest.mark.parametrize(
    ("backend", "device", "expected"),
    [("auto", "cpu", ATEN), ("auto", "cuda", INDUCTOR), ("aten", "cuda", ATEN), ("inductor", "cpu", INDUCTOR)],
)
def test_auto_is_inductor_on_cuda(backend: str, device: str, expected: object) -> None:
    assert lowering_for(backend, torch.device(device)) is expected


def test_sizes_that_depend_on_data_are_for_plain_operators() -> None:
    for captured, expected in ((dynamic_mlp(), INDUCTOR), (rows_above_zero(), ATEN)):
        for node in captured.graph_module.graph.nodes:
            node.meta["example_value"] = node.meta.get("val")
        assert lowering_of_region(captured.graph_module, INDUCTOR) is expected
