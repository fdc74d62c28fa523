"""Models that are hard to trace into operators: a step on their operator graphs equals the plain model's bit for
bit."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import memopt
from examples.models.families import integers, normals
from memopt.capture.operators import Decide, Decision, OperatorGraph, Operators, Rewriting
from memopt.run.session import session_of
from passes import EliminateDeadCode, Pipeline, format_graph
from passes.graphs.node_facts import module_path
from tests.end_to_end import odd_models
from tests.end_to_end.odd_models import CLASSES, WIDTH, Layered
from tests.end_to_end.pieces import assert_same, loss, run
from tests.end_to_end.usual import make
from tests.marks import slow

pytestmark = pytest.mark.plans_always  # the plain steps would fit

Around = Callable[[], AbstractContextManager[Any]]
BF16: Around = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731


SKIPPED = (odd_models.Uncapturable, odd_models.NumpyInLoop)
"""Models that cannot be captured, or not the same way twice."""


def no_passes(_: OperatorGraph) -> Decision:
    return Decision(Pipeline(()))


def batch() -> dict[str, Tensor]:
    return {"x": normals(32, WIDTH), "labels": integers(CLASSES, 32)}


def check(
    model: nn.Module, around: Around = nullcontext, inputs: Any = None, *, deciders: tuple[Decide, ...] = (no_passes,)
) -> memopt.Plan:
    """Assert that a step on the operator graphs equals the plain model's bit for bit; returns its plan. Only the
    forward runs inside `around`, because autocast is not meant for backwards."""
    inputs = batch() if inputs is None else inputs

    def piece(model: nn.Module) -> Tensor:
        with around():
            value = loss(model, inputs)
        value.backward()  # type: ignore[no-untyped-call]
        return value.detach()

    plain = run(copy.deepcopy(model), piece, inputs)
    memopt.optimize(model, 1.0, optimizer=None, precision="fp32")
    vars(session_of(model).forward.planner.terms)["rewriting"] = Rewriting(deciders)  # type: ignore[union-attr]
    assert_same(run(model, piece, inputs), plain)
    return memopt.plan_of(model)


def operators(plan: memopt.Plan) -> tuple[Operators, ...]:
    assert plan.captured is not None
    return plan.captured.operators


def text(plan: memopt.Plan) -> str:
    return "\n".join(format_graph(module) for module in plan.graphs["operators"])


QUICK = (odd_models.OwnCheckpoint, odd_models.OwnFunction, odd_models.RunningStatistics, odd_models.InPlace)
"""The others are in every run with a budget, in tests/end_to_end/test_odd_models.py, or much like these."""


@pytest.mark.parametrize(
    "odd",
    [
        odd if odd.model in QUICK else slow(odd)
        for odd in odd_models.ODD_MODELS
        if odd.returns_loss and odd.model not in SKIPPED
    ],
    ids=str,
)
def test_odd_models(odd: odd_models.OddModel) -> None:
    assert operators(check(odd.make(), inputs=odd.inputs()))


class NoGradInside(Layered):
    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y = block(x)
            with torch.no_grad():
                size = (y * y).mean(-1, keepdim=True).sqrt()
            x = x + y / (1 + size) * torch.sigmoid(x.detach())
        return x


class WritesUnderNoGrad(Layered):
    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y = block(x)
            with torch.no_grad():
                y.mul_(0.5)
            x = x + y
        return x


class Island(Layered):
    """Autocast is disabled for one part, and enabled again for a part of that."""

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            with torch.autocast("cpu", enabled=False):
                y = block[0](x.float())
                with torch.autocast("cpu", torch.bfloat16):
                    y = block[1](y)
                z = block[3](block[2](y.float()))
            x = x + z
        return x


class ChangesShapesInPlace(Layered):
    """Adds, swaps and removes dimensions in place and writes through the results; BigBird does the first."""

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y = torch.einsum("bi,ji->bj", block[:3](x), block[3].weight)
            y.unsqueeze_(1)
            y.transpose_(0, 1).mul_(0.5)
            z = y.squeeze(0)
            z.add_(0.1)
            x = x + torch.einsum("bij->ij", y) + y.squeeze_(0).t_().t()
        return x


class TwiceUnderAutocast(Layered):
    """Weights that are cast once and used three times, so that their gradients are summed in 16 bits."""

    def body(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + self.blocks[0](x)
        return x


class OwnFunctionBeforeAnIsland(odd_models.OwnFunction):
    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.head(x)
        return F.cross_entropy(logits.float(), labels)


class CheckpointWithDropout(Layered):
    """Drops with probability one half: captured dropout scales 16-bit values by 1 / (1 - p) with another rounding than
    eager."""

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(lambda x, block=block: F.dropout(block(x), 0.5), x, use_reentrant=False)
        return F.dropout(x, 0.5)


class Tied(Layered):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1][1].weight = self.blocks[0][1].weight  # type: ignore[index]


class Constants(Layered):
    def body(self, x: Tensor) -> Tensor:
        return super().body(x * torch.tensor([0.5, 2.0]).repeat(WIDTH // 2))


class WithBatchNorm(Layered):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def body(self, x: Tensor) -> Tensor:
        return super().body(self.norm(x))


@torch.library.custom_op("memopt_tests::cube", mutates_args=())
def cube(x: Tensor) -> Tensor:
    return x * x * x


@cube.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _half_gradient(ctx: Any, gradient: Tensor) -> Tensor:
    return gradient * ctx.saved_tensors[0]


cube.register_autograd(_half_gradient, setup_context=_keep)


class CustomOperator(Layered):
    def body(self, x: Tensor) -> Tensor:
        return super().body(torch.ops.memopt_tests.cube(super().body(x)))


KINDS = (
    NoGradInside,
    Island,
    TwiceUnderAutocast,
    CheckpointWithDropout,
    Tied,
    Constants,
    WithBatchNorm,
    CustomOperator,
    ChangesShapesInPlace,
)


PLAIN = (NoGradInside,)
"""Without autocast, which most of the models are made for, every run tries these."""


@pytest.mark.parametrize(
    ("kind", "around"),
    [
        *(pytest.param(kind, BF16, id=f"{kind.__name__}-autocast") for kind in KINDS),
        *(
            pytest.param(
                kind, nullcontext, id=f"{kind.__name__}-plain", marks=[] if kind in PLAIN else [pytest.mark.slow]
            )
            for kind in KINDS
        ),
    ],
)
def test_kept_bit_for_bit(kind: type[nn.Module], around: Around) -> None:
    assert operators(check(make(kind), around))


@pytest.mark.parametrize("kind", [odd_models.OwnFunction, WritesUnderNoGrad])
def test_regions_that_cannot_be_traced_into_operators_run_without_passes_and_the_plan_says_so(
    kind: type[nn.Module],
) -> None:
    plan = check(make(kind), nullcontext if kind is WritesUnderNoGrad else BF16)
    assert not operators(plan)
    assert "a region is not rewritten by passes, since" in str(plan.notes)


def test_shape_changes_in_place_are_traced_out_of_place() -> None:
    plan = memopt.plan(make(ChangesShapesInPlace), 1.0, batch(), precision="bf16")
    assert plan.predicted_peak_bytes > 0
    assert "unsqueeze_(" not in text(plan)


def test_an_own_function_is_one_opaque_node() -> None:
    plan = check(make(OwnFunctionBeforeAnIsland))
    assert text(plan).count("autograd_function_apply(") == 3


def test_autocast_needs_no_passes_to_be_written_out() -> None:
    plan = check(make(TwiceUnderAutocast), BF16, deciders=())
    assert operators(plan)
    weights = [line for line in text(plan).splitlines() if "aten.to.dtype(blocks_0_1_weight" in line]
    assert len(weights) == 1, "a weight used three times is cast once"


def test_plain_regions_have_no_operator_graph_without_passes() -> None:
    plan = check(make(Layered), deciders=())
    assert not operators(plan)
    assert list(plan.graphs) == ["captured", "scheduled"]


def test_author_typed_nodes() -> None:
    seen: list[OperatorGraph] = []

    def decide(graph: OperatorGraph) -> Decision:
        seen.append(graph)
        return no_passes(graph)

    check(make(Island), deciders=(decide,))
    nodes = {node.name: node for node in seen[0].module.graph.nodes}
    inside = {str(nodes[name].target) for name in seen[0].author_typed}
    assert {"aten.linear.default", "aten.layer_norm.default", "aten.gelu.default", "aten.to.dtype"} <= inside
    assert not any("cross_entropy" in target for target in inside)
    assert not any("custom" in node.meta for node in nodes.values())


def test_composites_stay_whole_and_know_their_modules() -> None:
    module = check(make(Layered)).graphs["operators"][0]
    places = {str(node.target): module_path(node) for node in module.graph.nodes if node.op == "call_function"}
    assert places["aten.layer_norm.default"] == "blocks.2.0"
    assert places["aten.linear.default"] == "head"
    assert "aten.cross_entropy_loss.default" in places
    assert [node.name for node in module.graph.find_nodes(op="placeholder")][:2] == [
        "blocks_0_0_weight",
        "blocks_0_0_bias",
    ]


@pytest.mark.parametrize(
    "kind",
    [
        odd_models.GraphBreak,
        *map(slow, (CheckpointWithDropout, odd_models.BreakInLoop, Layered)),
    ],
)
def test_an_operator_graph_without_passes_does_not_change_the_plan(kind: type[nn.Module]) -> None:
    direct, through = (check(make(kind), deciders=deciders) for deciders in ((), (no_passes,)))
    if kind is not CheckpointWithDropout:
        assert through.regions == direct.regions
    assert through.modules == direct.modules
    assert [op.block for op in through.joined.problem.ops] == [op.block for op in direct.joined.problem.ops]  # type: ignore[union-attr]


def test_diff_shows_what_passes_changed() -> None:
    def decide(_: OperatorGraph) -> Decision:
        return Decision(Pipeline((EliminateDeadCode(),), label="clean"))

    class Dead(Layered):
        def body(self, x: Tensor) -> Tensor:
            x.sin()
            return super().body(x)

    plan = check(make(Dead), deciders=(decide,))
    for name in ("clean", "EliminateDeadCode", "operators"):
        assert plan.diff(name).summary() in ("1 removed", "no change")
    assert list(plan.graphs) == ["operators", "rewritten", "captured", "scheduled"]
    with pytest.raises(ValueError, match=r"no stage 'none' to show; .*, 'operators', 'clean', 'EliminateDeadCode'"):
        plan.diff("none")


def test_a_backward_within_autocast_warns_where_it_changes_gradients() -> None:
    for kind, warned in ((Island, True), (Layered, False)):
        model = make(kind)
        memopt.optimize(model, 1.0, optimizer=None, precision="fp32")
        with warnings.catch_warnings(record=True) as found, BF16():
            warnings.simplefilter("always")
            loss(model, batch()).backward()
        assert any("backward was called within torch.autocast" in str(warning.message) for warning in found) is warned
