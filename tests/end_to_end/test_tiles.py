"""Real architectures in tiles, whatever their budget: gradients that are the plain model's to rounding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from torch.fx import GraphModule

import memopt
from examples.models.families import BY_NAME, Family
from examples.models.step import restored_buffers, train_step
from passes import Pass, TileRows, find_row_segments
from tests.end_to_end.steps import assert_equal
from tests.shortened import SHORT

pytestmark = pytest.mark.plans_always
ROUNDING = 4e-6
EXACT: dict[str, Any] = {
    "optimizer": None, "precision": "fp32", "allow": {"recompute", "reinplace"}, "elsewhere_gb": 0
}  # fmt: skip
GIVEN = ("input", "pixel", "images", "inv_freq")
"""In the names of floating-point inputs that are no parameters."""


@dataclass(frozen=True)
class InTiles(Pass):
    """Runs whatever can in tiles."""

    tiles: int

    def rewrite(self, graph_module: GraphModule) -> GraphModule:
        given = graph_module.graph.find_nodes(op="placeholder")
        numbers = {
            number
            for number, node in enumerate(given)
            if node.meta["val"].is_floating_point() and not any(word in node.name for word in GIVEN)
        }
        segments = find_row_segments(graph_module, self.tiles, numbers)
        assert segments
        return TileRows(segments, self.tiles)(graph_module)


NAMES = ("llama", "gpt2-sdpa", "vit", "gpt2-eager", "bert", "whisper", "clip", "mixtral")
"""Others have dropout within their MLPs, which leaves little to run in tiles."""


@pytest.mark.slow
@pytest.mark.parametrize("tiles", [4, 3])
@pytest.mark.parametrize("name", NAMES)
def test_forced(name: str, tiles: int) -> None:
    """In four tiles by samples, in three by tokens, where batches are of four samples."""
    family = BY_NAME[name]
    options = {**EXACT, "passes": [InTiles(tiles)]}
    smallest = memopt.plan(family.make(), 1000, family.batch("usual"), **options).smallest_gb()
    check(family, tiles, 1.05 * smallest)


def test_two_blocks() -> None:
    """Within a budget that asks for nothing else."""
    check(SHORT["gpt2-sdpa"], 3, 1000)


def check(family: Family, tiles: int, budget_gb: float) -> None:
    """Assert that the step in tiles has the plain model's gradients, and the predicted peak at most."""
    model, batch = family.make(), family.batch("usual")
    with restored_buffers(model):
        plain = train_step(model, batch)
    with restored_buffers(model):
        memopt.optimize(model, budget_gb, **EXACT, passes=[InTiles(tiles)])
        step = train_step(model, batch)
        plan = memopt.plan_of(model)
        memopt.remove(model)
    assert_equal(step, plain, ROUNDING)
    assert step.peak_bytes <= plan.predicted_peak_bytes
