import pytest
import torch

from memopt.rewrite.search import differentiated, influence
from tests.passes.capture import Sketch, aten


def test_a_residual_stream_weighs_all_and_its_branches_their_share() -> None:
    """Two blocks: the stream grows from 1 to 2 to 3, so that the branches are a half and a third of it."""
    sketch = Sketch()
    table, weight = sketch.input("table", 8, 8), sketch.input("weight", 8, 8)
    tokens, labels = (sketch.input(name, 4, dtype=torch.int64) for name in ("tokens", "labels"))
    stream = [sketch.call(aten.embedding.default, table, tokens)]
    branches = []
    for _ in range(2):
        normed = sketch.call(aten.layer_norm.default, stream[-1], [8])
        branches.append(sketch.call(aten.linear.default, normed, weight))
        stream.append(sketch.call(aten.add.Tensor, stream[-1], branches[-1]))
    loss = sketch.call(aten.cross_entropy_loss.default, stream[-1], labels)
    graph = sketch.returns(loss).graph
    found = influence(graph, differentiated(graph, {0, 1}))
    assert [found.of[value] for value in stream] == [pytest.approx(1.0)] * 3
    assert found.of[branches[1]] == pytest.approx(1 / 3)
    assert found.of[branches[0]] == pytest.approx(1 / 2 * (2 / 3 + 1 / 3))
    assert found.edge(stream[1], stream[2]) == pytest.approx(2 / 3)
    assert found.edge(loss, stream[0]) == 0.0


def test_masks_and_detached_values_do_not_weigh() -> None:
    sketch = Sketch()
    x, mask = sketch.input("x", 4, 8), sketch.input("mask", 4, 8)
    masked = sketch.call(aten.add.Tensor, x, mask)
    stopped = sketch.call(aten.detach.default, masked)
    result = sketch.call(aten.mul.Tensor, masked, stopped)
    graph = sketch.returns(sketch.call(aten.sum.default, result)).graph
    flowing = differentiated(graph, {0})
    assert mask not in flowing
    assert stopped not in flowing
    found = influence(graph, flowing)
    assert found.edge(x, masked) == 1.0
    assert mask not in found.of


def test_without_a_loss_all_results_weigh() -> None:
    sketch = Sketch()
    x = sketch.input("x", 4, 8)
    results = [sketch.call(aten.relu.default, x), sketch.call(aten.neg.default, x)]
    graph = sketch.returns(*results).graph
    found = influence(graph, differentiated(graph, {0}))
    assert [found.of[item] for item in (*results, x)] == [1.0, 1.0, 1.0], "no value weighs more than the loss"
