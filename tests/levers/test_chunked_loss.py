"""The decisions on cross entropies of linear layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memopt
from memopt.capture.operators import OperatorGraph
from memopt.levers.chunked_loss import _ChunkLosses
from tests.passes.capture import Sketch, aten

CLASSES = 4096


def loss(*, returned: bool = False, frozen: bool = False) -> OperatorGraph:
    sketch = Sketch()
    hidden, weight = sketch.input("hidden", 64, 16), sketch.input("weight", CLASSES, 16)
    target = sketch.input("target", 64, dtype=torch.int64)
    logits = sketch.call(aten.linear.default, hidden, weight)
    entropy = sketch.call(aten.cross_entropy_loss.default, logits, target)
    return OperatorGraph(sketch.returns(entropy, *([logits] if returned else [])), frozenset(() if frozen else {1}))


def called(decide: _ChunkLosses, graph: OperatorGraph) -> list[str]:
    after = decide(graph).pipeline(graph.module)
    return [str(node.target) for node in after.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("later", [False, True])
def test_the_logits_are_gone(later: bool) -> None:
    decide = _ChunkLosses(weight_in_backward=later)
    assert called(decide, loss()) == ["memopt.linear_cross_entropy.default"]
    (note,) = decide(loss()).notes
    assert "without holding its 1 MB of logits whole" in note
    assert ("gradient of the layer's weight only in the backward" in note) == later
    assert note.endswith("equal but for rounding")


def test_a_frozen_weight_has_no_gradient_to_compute_later() -> None:
    assert called(_ChunkLosses(), loss(frozen=True)) == ["memopt.linear_cross_entropy.default"]
    assert len(_ChunkLosses(weight_in_backward=True)(loss(frozen=True)).pipeline) == 0


class _FrozenHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(16, 16), nn.Linear(16, CLASSES, bias=False).requires_grad_(False)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.layer(x)), target)


def test_a_plan_names_the_lever_where_the_weight_is_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_PLAN", "always")
    batch = torch.empty(512, 16, device="meta"), torch.empty(512, dtype=torch.int64, device="meta")
    with torch.device("meta"):
        model = _FrozenHead()
    plan = memopt.plan(model, 0.006, batch, precision="fp32", allow={"recompute", "chunked_loss"}, elsewhere_gb=0)
    assert plan.levers == ("chunked_loss",)


def test_logits_that_are_returned_stay() -> None:
    decision = _ChunkLosses()(loss(returned=True))
    assert len(decision.pipeline) == 0
    assert "the logits are returned as well" in decision.notes[0]
