"""Real architectures in tiles, whatever their budget: gradients that are the plain model's to rounding."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from torch.fx import GraphModule

import memopt
from examples.models.families import BY_NAME
from examples.models.step import restored_buffers, train_step
from passes import Pass, TileRows, find_row_segments
from tests.end_to_end.steps import assert_equal

pytestmark = pytest.mark.plans_always
ROUNDING = 4e-6
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


SLOW = ("gpt2-eager", "bert", "whisper", "clip", "mixtral")
"""Others have dropout within their MLPs, which leaves little to run in tiles."""


@pytest.mark.parametrize("tiles", [4, 3])
@pytest.mark.parametrize(
    "name", ["llama", "gpt2-sdpa", "vit", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_forced(name: str, tiles: int) -> None:
    """In four tiles by samples, in three by tokens, where batches are of four samples."""
    family = BY_NAME[name]
    model, batch = family.make(), family.batch("usual")
    with restored_buffers(model):
        plain = train_step(model, batch)
    options = {"optimizer": None, "precision": "fp32", "allow": {"recompute", "reinplace"}, "elsewhere_gb": 0}
    smallest = memopt.plan(model, 1000, batch, passes=[InTiles(tiles)], **options).smallest_gb()
    with restored_buffers(model):
        memopt.optimize(model, 1.05 * smallest, passes=[InTiles(tiles)], **options)
        step = train_step(model, batch)
        plan = memopt.plan_of(model)
        memopt.remove(model)
    assert plan is not None
    assert_equal(step, plain, ROUNDING)
    assert step.peak_bytes <= plan.predicted_peak_bytes
