"""Code of torch at which Dynamo breaks the graph, or which it leaves out: what the model runs through it is planned."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

import memopt

pytestmark = pytest.mark.plans_always  # the plain steps would fit

LENGTH, BATCH, WIDTH = 32, 8, 32


class Encoder(nn.Module):
    """The language model of torch's tutorial: an encoder with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(64, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH)
        self.layers, self.head = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), nn.Linear(WIDTH, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(len(tokens))
        logits = self.head(self.layers(self.words(tokens), mask=mask))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class Translation(Encoder):
    """An encoder and a decoder, which has a mask of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Transformer(WIDTH, 4, 2, 2, 4 * WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(len(tokens))
        hidden = self.both(self.words(tokens), self.words(tokens), tgt_mask=mask)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


def trained(model: nn.Module, tokens: Tensor) -> list[Tensor]:
    """The gradients of two steps."""
    found: list[Tensor] = []
    for seed in range(2):
        torch.manual_seed(seed)
        model.zero_grad()
        model(tokens).backward()
        found += [one.grad.clone() for one in model.parameters() if one.grad is not None]
    return found


@pytest.mark.parametrize("kind", [Encoder, Translation])
def test_layers_behind_a_mask_are_in_the_plan(kind: type[Encoder]) -> None:
    torch.manual_seed(0)
    plain = kind().train()
    planned, tokens = copy.deepcopy(plain), torch.randint(0, 64, (LENGTH, BATCH))
    with memopt.measure_peak() as peak:
        expected = trained(plain, tokens)
    lasting = 2 * sum(one.nbytes for one in plain.parameters())
    budget = lasting + 0.6 * (peak.bytes - lasting)
    memopt.optimize(planned, budget / 2**30, precision="fp32", allow={"recompute", "reinplace"}, optimizer=None)
    found = trained(planned, tokens)
    assert all(map(torch.equal, expected, found))
    plan = memopt.status(planned).plan
    assert plan is not None
    assert plan.captured is not None
    operators = {str(node.target) for region in plan.captured.regions for node in region.module.graph.nodes}
    assert any("bmm" in name for name in operators)  # of attention, with dropout


class Sequential(nn.Module):
    """Two segments of layers, of which one is a checkpoint of the author's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = checkpoint_sequential(self.layers, 2, x, use_reentrant=False)
        return hidden.square().mean()


def test_sequential_checkpoints_are_one_region() -> None:
    plan = memopt.plan(Sequential().train(), 1, (torch.randn(BATCH, WIDTH),), precision="fp32")
    assert plan.captured is not None
    assert len(plan.captured.regions) == 1
