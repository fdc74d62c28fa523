"""A planned model inside `DistributedDataParallel`, on small models with several buckets."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import memopt
from memopt.planning.plan_search import PlanSearch
from memopt.run import kept_plans
from tests.two_ranks import on_two_ranks

pytestmark = pytest.mark.slow  # each case is captured on two ranks
EXACT: dict[str, Any] = {"precision": "fp32", "allow": {"recompute", "reinplace"}}
ROOMY = 1.0
SMALL_BUCKETS = {"bucket_cap_mb": 0.1}  # one or two layers fit


class Layers(nn.Module):
    """Eight layers whose output is the loss; the last one is not used."""

    def __init__(self, *, broken: bool = False, unused: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(8))
        self.broken, self.used = broken, 7 if unused else 8

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers[:4]:
            x = layer(x).tanh()
        if self.broken:
            torch._dynamo.graph_break()
        for layer in self.layers[4 : self.used]:
            x = layer(x).tanh()
        return {"loss": x.square().mean(), "features": x}


def batch(rank: int, number: int) -> torch.Tensor:
    return torch.randn(16, 128, generator=torch.Generator().manual_seed(10 * rank + number))


def gradients_of(
    model: nn.Module, rank: int, accumulate: int, *, set_to_none: bool = True
) -> list[torch.Tensor | None]:
    """The gradients of three steps of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[torch.Tensor | None] = []
    for step in range(3):
        for number in range(accumulate):
            with nullcontext() if number == accumulate - 1 else model.no_sync():  # type: ignore[operator]
                model(batch(rank, 3 * step + number))["loss"].backward()
        found += [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    return found


def both(
    rank: int, order: str, accumulate: int = 1, *, model: dict[str, bool] | None = None, none: bool = True, **ddp: Any
) -> bool:
    """Whether the gradients of the planned model are those of the plain one, under DDP with these options."""
    torch.manual_seed(0)
    plain = Layers(**(model or {}))
    planned = copy.deepcopy(plain)
    if order == "before":
        wrapped: nn.Module = DistributedDataParallel(memopt.optimize(planned, ROOMY, **EXACT), **SMALL_BUCKETS, **ddp)
    else:
        given = {"example_inputs": (batch(rank, 0),)} if order == "ahead" else {}
        wrapped = memopt.optimize(DistributedDataParallel(planned, **SMALL_BUCKETS, **ddp), ROOMY, **EXACT, **given)
    expected = gradients_of(DistributedDataParallel(plain, **SMALL_BUCKETS, **ddp), rank, accumulate, set_to_none=none)
    found = gradients_of(wrapped, rank, accumulate, set_to_none=none)
    assert memopt.plan_of(wrapped) is memopt.plan_of(planned)
    pairs = zip(found, expected, strict=True)
    return all((one is other is None) or torch.equal(one, other) for one, other in pairs)  # type: ignore[arg-type]


class Operators(TorchDispatchMode):
    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.events.append(str(function))
        return function(*args, **(kwargs or {}))


def noting_exchange(events, bucket):
    """Not annotated: torch compares annotations, which are strings here."""
    events.append("exchange")
    return default_hooks.allreduce_hook(None, bucket)


def overlap(rank: int, **ddp: Any) -> list[str]:
    """The matrix products and exchanges of the third backward, in their order."""
    model = memopt.optimize(DistributedDataParallel(Layers(), **SMALL_BUCKETS, **ddp), ROOMY, **EXACT)
    events: list[str] = []
    model.register_comm_hook(events, noting_exchange)
    for number in range(3):
        loss = model(batch(rank, number))["loss"]
        events.clear()
        with Operators(events):
            loss.backward()
        model.zero_grad()
    return [event for event in events if event in ("exchange", "aten.mm.default")]


def buckets_of(rank: int, *, views: bool) -> dict[str, int]:
    """Rows of the plan of a step that exchanges gradients."""
    model = DistributedDataParallel(Layers(), gradient_as_bucket_view=views)
    account = memopt.plan(model, ROOMY, (batch(rank, 0),), **EXACT).account
    return {"buckets": account.buckets, "gradients": account.gradients}


def other_plans(rank: int) -> bool:
    """Whether rank 1, which would save less, runs by the plan of rank 0."""
    torch.manual_seed(0)
    model = memopt.optimize(DistributedDataParallel(Layers()), ROOMY, **EXACT)
    fastest, agreed = PlanSearch.fastest, kept_plans.agreed
    if rank == 1:  # plans after rank 0

        def later(*args: Any) -> memopt.Plan:
            torch.distributed.barrier()
            return tight(fastest(*args))

        PlanSearch.fastest = later  # type: ignore[method-assign]
    else:

        def first(*args: Any) -> Any:
            found = agreed(*args)
            torch.distributed.barrier()
            return found

        kept_plans.agreed = first
    try:
        loss = model(batch(rank, 0))["loss"]
    finally:
        PlanSearch.fastest, kept_plans.agreed = fastest, agreed  # type: ignore[method-assign]
    loss.backward()
    return memopt.plan_of(model).method == "save all"


def tight(plan: memopt.Plan) -> memopt.Plan:
    assert plan.source is not None
    return plan.source.at(plan, plan.source.smallest_bytes(plan), plan.effort)


def with_loss(rank: int) -> bool:
    """Whether `training_loss` and `TrainStep` exchange gradients of a loss computed by memopt."""
    weights = []
    for optimised in (False, True):
        torch.manual_seed(0)
        model: nn.Module = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5)))
        if optimised:
            memopt.optimize(model, ROOMY, loss_fn=nn.functional.cross_entropy, **EXACT)
        data = torch.randn(6, 8, generator=torch.Generator().manual_seed(rank)), torch.arange(6) % 5
        loss = memopt.training_loss(model, data) if optimised else nn.functional.cross_entropy(model(data[0]), data[1])
        loss.backward()
        weights += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad()
        loss_fn = None if optimised else nn.functional.cross_entropy
        memopt.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=loss_fn)(data)
        weights += [parameter.detach() for parameter in model.parameters()]
    return all(map(torch.equal, weights[:8], weights[8:]))


def removed(rank: int) -> bool:
    """Whether gradients are exchanged after `remove`, too."""
    model = memopt.optimize(DistributedDataParallel(Layers()), ROOMY, **EXACT)
    model(batch(rank, 0))["loss"].backward()
    planned = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    memopt.remove(model)(batch(rank, 0))["loss"].backward()
    plain = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return all(map(torch.equal, planned, plain))


CASES: dict[str, Callable[[int], Any]] = {
    "before": lambda rank: both(rank, "before"),
    "ahead": lambda rank: both(rank, "ahead"),
    "views, accumulating": lambda rank: both(rank, "after", 3, gradient_as_bucket_view=True),
    "views that remain": lambda rank: both(rank, "after", 2, none=False, gradient_as_bucket_view=True),
    "unused parameters": lambda rank: both(rank, "after", model={"unused": True}, find_unused_parameters=True),
    "static graph": lambda rank: both(rank, "after", static_graph=True, gradient_as_bucket_view=True),
    "two regions": lambda rank: both(rank, "before", model={"broken": True}, gradient_as_bucket_view=True),
    "loss function": with_loss,
    "removed": removed,
    "one plan": other_plans,
}


def all_cases(rank: int) -> dict[str, Any]:
    found = {name: case(rank) for name, case in CASES.items()}
    found["overlap"] = overlap(rank)
    found["overlap of views"] = overlap(rank, gradient_as_bucket_view=True)
    found["rows"] = buckets_of(rank, views=False)
    found["rows of views"] = buckets_of(rank, views=True)
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return on_two_ranks(all_cases)


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_the_plain_model(ranks: list[dict[str, Any]], case: str) -> None:
    assert [rank[case] for rank in ranks] == [True, True]


@pytest.mark.parametrize("case", ["overlap", "overlap of views"])
def test_buckets_are_exchanged_while_the_backward_runs(ranks: list[dict[str, Any]], case: str) -> None:
    for rank in ranks:
        exchanges = [number for number, event in enumerate(rank[case]) if event == "exchange"]
        products = [number for number, event in enumerate(rank[case]) if event != "exchange"]
        assert len(exchanges) >= 4
        assert exchanges[2] < products[-1]


def test_buckets_are_a_row(ranks: list[dict[str, Any]]) -> None:
    own = sum(parameter.nbytes for parameter in Layers().parameters())
    assert ranks[0]["rows"] == {"buckets": own, "gradients": own}
    assert ranks[0]["rows of views"] == {"buckets": own, "gradients": 0}
