"""Models that break, branch, mutate and draw, and losses and outputs of all kinds, at tight budgets."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memopt
from examples.models.families import normals
from tests.end_to_end import odd_models
from tests.end_to_end.odd_models import CLASSES, ROWS, WIDTH, Layered
from tests.end_to_end.pieces import GIB, assert_same, call, check, loss, run, same, step, tight
from tests.end_to_end.usual import Blocks, batch, make, steps, usual
from tests.marks import slow

pytestmark = pytest.mark.plans_always  # the plain steps would fit

CAPTURED = [odd for odd in odd_models.ODD_MODELS if odd.model is not odd_models.NumpyInLoop and odd.capture != "none"]


SLOW = (
    Layered,
    odd_models.LossAndLogits,
    odd_models.OtherOutputs,
    odd_models.CalledTwice,
    odd_models.InPlace,
    odd_models.LowRank,
    odd_models.OwnFunction,
    odd_models.OwnCheckpoint,
    odd_models.Logits,
    odd_models.BreakInLoop,
)
"""Seen elsewhere, in larger or simpler models, or without a budget (tests/capture/test_operators.py)."""
MARKED = [pytest.param(odd, marks=pytest.mark.slow) if odd.model in SLOW else odd for odd in CAPTURED]


@pytest.mark.parametrize("odd", MARKED, ids=str)
def test_odd_models_accumulate_within_the_budget(odd: odd_models.OddModel) -> None:
    model, inputs = odd.make(), odd.inputs()

    def piece(model: nn.Module) -> list[Tensor]:
        losses = []
        for _ in range(2):
            value = loss(model, inputs).float().square().mean()
            value.backward()  # type: ignore[no-untyped-call]
            losses.append(value.detach())
            gc.collect()
        return losses

    budgets = usual(odd.model)
    check(model, piece, budgets.tight + budgets.gradients, inputs)


class Printing(Blocks):
    """Says what it does in the middle, as people do when they look for a mistake."""

    def body(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = x + block(x)
            if number == 1:
                print("half way", x.shape)
        return x


class ScalarAtTheBreak(Layered):
    """An auxiliary loss of the first half is alive where the graph breaks."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](x))
        auxiliary = x.square().mean()
        torch._dynamo.graph_break()
        return self.loss(self.blocks[2](x), labels) + 0.1 * auxiliary


class SharedAcrossABreak(Layered):
    """One block on both sides of the break: autograd sums its gradients before it adds them to what is held."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.body(x)
        torch._dynamo.graph_break()
        return self.loss(self.body(x), labels)


class EagerMiddle(Layered):
    """Breaks around code that its author forbids to compile, which holds activations of its own."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def eager(self, x: Tensor) -> Tensor:
        for _ in range(6):
            x = torch.sin(torch.tanh(x))
        return x

    def body(self, x: Tensor) -> Tensor:
        x = x + self.blocks[1](self.blocks[0](x))
        return self.blocks[2](self.eager(x))


@pytest.mark.parametrize("kind", [Printing, slow(ScalarAtTheBreak), slow(EagerMiddle)])
def test_breaks_in_the_middle_at_the_smallest_budget(kind: type[nn.Module]) -> None:
    model, inputs = make(kind), batch()
    check(model, lambda model: step(model, inputs), usual(kind).smallest, inputs)
    assert len(memopt.plan_of(model).regions) > 1


@pytest.mark.slow
def test_a_block_on_both_sides_of_a_break_accumulates() -> None:
    model, inputs = make(SharedAcrossABreak), batch()
    budgets = usual(SharedAcrossABreak)
    check(model, lambda model: steps(model, inputs, inputs), budgets.tight + budgets.gradients, inputs)
    assert len(memopt.plan_of(model).regions) > 1


class OtherWay(Layered):
    """Takes another way where its input is large."""

    def body(self, x: Tensor) -> Tensor:
        deep = bool(x.detach().sum() > 0)
        for block in self.blocks if deep else self.blocks[:1]:
            x = x + block(x)
        return x


@pytest.mark.parametrize("order", [(0, 1, 0, 1), slow((1, 0, 1))])
def test_a_way_that_was_not_planned_is_planned_when_it_comes(order: tuple[int, ...]) -> None:
    model, (x, labels) = make(OtherWay), batch()
    ways = (-x.abs(), labels), (x.abs(), labels)
    plain = [run(copy.deepcopy(model), lambda model, way=way: step(model, way), way) for way in ways]
    memopt.optimize(model, 1.0, optimizer=None, precision="fp32", allow={"recompute"})
    for number in order:
        model.zero_grad()
        found = run(model, lambda model, way=ways[number]: step(model, way), ways[number])
        assert_same(found, plain[number])


def test_a_loss_outside_of_the_model() -> None:
    model, (x, labels) = make(odd_models.Logits), batch()

    def piece(model: nn.Module) -> Tensor:
        value = F.cross_entropy(model(x), labels)
        value.backward()  # type: ignore[no-untyped-call]
        return value.detach()

    extra = 4 * ROWS * CLASSES * 4 / GIB  # the loss's own activations and gradients, outside of the plan
    check(model, piece, usual(odd_models.Logits).tight + extra, (x, labels))


def test_a_gradient_into_another_output_with_outputs_all() -> None:
    model, inputs = make(odd_models.LossAndLogits), batch()

    def piece(model: nn.Module) -> None:
        value, logits = call(model, inputs)
        (value + 0.1 * logits.square().mean()).backward()

    extra = 4 * ROWS * CLASSES * 4 / GIB
    check(model, piece, tight(model, inputs, outputs="all") + extra, inputs, outputs="all")


def squared_error(output: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(output, targets)


def test_training_loss_is_one_region_with_the_loss() -> None:
    model = make(odd_models.Logits)
    pair = ((normals(ROWS, WIDTH),), normals(ROWS, CLASSES, seed=3))

    def plain_piece(model: nn.Module) -> Tensor:
        value = squared_error(model(*pair[0]), pair[1])
        value.backward()  # type: ignore[no-untyped-call]
        return value.detach()

    def piece(model: nn.Module) -> Tensor:
        value = memopt.training_loss(model, pair)
        value.backward()  # type: ignore[no-untyped-call]
        return value.detach()

    plain = run(copy.deepcopy(model), plain_piece, pair)
    budget = tight(model, pair, loss_fn=squared_error)
    memopt.optimize(model, budget, loss_fn=squared_error, optimizer=None, precision="fp32", allow={"recompute"})
    trained = run(model, piece, pair)
    assert_same(trained, plain)
    assert trained.peak_bytes <= budget * GIB
    assert same(memopt.training_loss(model.eval(), pair).detach(), trained.returned)


class ReturnsDetached(nn.Module):
    """Its output beside a detached part of it, which a caller may turn into an array."""

    def __init__(self, *, view_first: bool) -> None:
        super().__init__()
        self.lin, self.view_first = nn.Linear(8, 8), view_first

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.lin(h).sin()
        return h, h[0].detach() if self.view_first else h.detach()[0]


@pytest.mark.parametrize("view_first", [True, False])
def test_a_detached_part_of_an_output_requires_no_gradient(view_first: bool) -> None:
    model, h = ReturnsDetached(view_first=view_first), torch.randn(4, 8)
    plain, _ = model(h)
    memopt.optimize(model, 1.0, example_inputs=(h,), optimizer=None, precision="fp32", allow={"recompute"})
    output, detached = model(h)
    assert memopt.plan_of(model)
    assert output.requires_grad
    assert not detached.requires_grad
    assert torch.equal(torch.from_numpy(detached.numpy()), plain.detach()[0])
