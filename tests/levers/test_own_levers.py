"""Levers of the user's own, made outside of memopt: tried, priced and shown in the receipt like the built-in ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn, optim

import memopt
from examples.custom_pass import TanhAsSigmoid
from memopt.levers import Decision, GraphChange, Lever, OperatorGraph, OptimizerChange
from memopt.levers.all import check_allow
from memopt.planning.plan import CAPTURE
from passes import EliminateDeadCode, Pipeline


@dataclass(frozen=True)
class Decide:
    """Takes every 0.5 x (1 + tanh(u)) of a region."""

    label: str = "tanh_as_sigmoid"

    def __call__(self, graph: OperatorGraph) -> Decision:
        found = [node.name for node in graph.module.graph.nodes if TanhAsSigmoid().match(node)]
        passes = (TanhAsSigmoid(), EliminateDeadCode()) if found else ()
        return Decision(Pipeline(passes, label=self.label), dict.fromkeys(found, "as a sigmoid"))


TANH_AS_SIGMOID = Lever(
    "tanh_as_sigmoid",
    "0.5 x (1 + tanh(u)) is computed as x sigmoid(2 u), which saves less.",
    "rounding",
    "nothing",
    graph=GraphChange((Decide(),), "before"),
)


def as_sgd(optimizer: optim.Optimizer) -> optim.Optimizer:
    return optim.SGD([parameter for group in optimizer.param_groups for parameter in group["params"]], lr=1e-2)


AS_SGD = Lever(
    "as_sgd",
    "Parameters are stepped by SGD whatever the optimizer is.",
    "approximate",
    "another training",
    optimizer=OptimizerChange(as_sgd, "SGD steps", "another training"),
)


class Gelu(nn.Module):
    """GELU in its tanh form, written out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.04 * x * x * x)))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), Gelu())), nn.Linear(64, 1)).train()


BATCH = torch.ones(2048, 64), torch.zeros(2048, 1)
OPTIONS: dict[str, Any] = {"loss_fn": nn.functional.mse_loss, "precision": "fp32", "effort": "fast"}


def test_a_lever_on_the_graph_is_tried_and_has_its_row() -> None:
    plain = memopt.plan(model(), 1, BATCH, allow=set(), **OPTIONS)
    allow = {"recompute", "reinplace", TANH_AS_SIGMOID}
    tight = 0.9 * plain.predicted_peak_bytes / 2**30
    plan = memopt.plan(model(), tight, BATCH, allow=allow, **OPTIONS)
    assert "tanh_as_sigmoid" in plan.levers
    assert [row.lever for row in plan.receipt][1:3] == [CAPTURE, "tanh_as_sigmoid"]
    assert plan.receipt[2].peak_bytes < plan.receipt[1].peak_bytes
    assert "tanh_as_sigmoid" in str(plan)
    assert "sigmoid" in str(plan.diff("tanh_as_sigmoid"))


def test_it_trains() -> None:
    expected, trained = model(), model()
    memopt.optimize(trained, 1, example_inputs=BATCH, allow={TANH_AS_SIGMOID}, **OPTIONS)
    nn.functional.mse_loss(expected(BATCH[0]), BATCH[1]).backward()
    memopt.training_loss(trained, BATCH).backward()
    for one, other in zip(trained.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_one_that_finds_nothing_is_not_used() -> None:
    plain = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).train()
    least = memopt.plan(plain, 1, BATCH, allow={"recompute"}, **OPTIONS).smallest_gb()
    assert memopt.plan(plain, least, BATCH, allow={"recompute", TANH_AS_SIGMOID}, **OPTIONS).levers == ()


def test_a_lever_on_the_optimizer_is_priced_and_wraps_it() -> None:
    trained = nn.Sequential(nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 1)).train()
    batch = torch.ones(4, 1024), torch.zeros(4, 1)
    least = memopt.plan(trained, 1, batch, **OPTIONS).smallest_gb()
    memopt.optimize(trained, 0.7 * least, example_inputs=batch, allow=memopt.DEFAULT_LEVERS | {AS_SGD}, **OPTIONS)
    plan = memopt.plan_of(trained)
    assert plan.proposals == ("as_sgd",)
    (note,) = (note for note in plan.notes if note.startswith("as_sgd: saves "))
    assert note.endswith("a step; SGD steps; another training")
    assert type(memopt.wrap_optimizer(trained, optim.AdamW(trained.parameters()))) is optim.SGD


def test_a_refusal_names_it() -> None:
    with pytest.raises(memopt.BudgetError) as error:
        memopt.plan(nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1)), 0.001, BATCH_OF_1024, allow={AS_SGD})
    assert ("as_sgd",) in error.value.smallest_with


BATCH_OF_1024 = {"input": torch.ones(4, 1024)}


def test_its_name_is_its_own() -> None:
    assert check_allow({"recompute", memopt.LEVERS["fp8"]})[-1].name == "fp8"
    with pytest.raises(ValueError, match="two levers of the name 'fp8'; give yours another name"):
        check_allow([replace(AS_SGD, name="fp8")])
    with pytest.raises(ValueError, match="two levers of the name 'as_sgd'"):
        check_allow([AS_SGD, replace(AS_SGD, price="nothing")])


def test_the_label_is_asked_for() -> None:
    lever = replace(TANH_AS_SIGMOID, name="other")
    with pytest.raises(ValueError, match="the lever 'other' has no pipeline of that label"):
        memopt.plan(model(), 0.001, BATCH, allow={lever}, **OPTIONS)
