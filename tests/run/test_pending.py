"""Forwards that wait for their backward: what they hold, and what may change meanwhile."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn

import memopt
from memopt.compat.autograd import nodes_since
from memopt.errors import round_up
from memopt.run.ledger import Moment
from memopt.run.pending import PendingForward, hold_over, release_all
from memopt.run.session import session_of
from memopt.run.share import Share
from tests.elsewhere import counted

__all__ = ["counted"]


class Value:
    def release(self) -> None:
        pass


def held() -> weakref.ref[Value]:
    value = Value()
    hold_over([value])
    return weakref.ref(value)


def test_a_value_is_held_until_an_optimizer_has_stepped() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    value = held()
    assert value() is not None
    torch.optim.SGD([parameter], lr=0.1).step()
    assert value() is None


def test_a_value_is_held_no_longer_than_to_the_next_forward() -> None:
    value = held()
    release_all()
    assert value() is None


class Normalised(nn.Module):
    """Batch normalisation, whose running statistics change in each forward; in two regions where `breaks`."""

    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(3)
        )
        self.first, self.breaks = nn.Conv2d(1, 8, 3, padding=1), breaks

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.first(images)
        if self.breaks:
            torch._dynamo.graph_break()
        for layer in self.layers:
            x = layer(x)
        return x.mean((2, 3))


IMAGES = torch.rand(4, 8, 1, 16, 16, generator=torch.Generator().manual_seed(1))


def step(call: Callable[[torch.Tensor], torch.Tensor], model: nn.Module) -> list[torch.Tensor]:
    """The gradients and buffers after a step whose backward goes through several forwards."""
    torch.stack([call(images) for images in IMAGES]).square().mean().backward()
    return [*(one.grad for one in model.parameters() if one.grad is not None), *model.buffers()]


@pytest.mark.plans_always
@pytest.mark.parametrize("breaks", [False, True])
def test_running_statistics_change_between_the_forwards_of_one_backward(breaks: bool) -> None:
    plain, planned = Normalised(), Normalised(breaks=breaks)
    optimized = memopt.optimize(planned, 1, precision="fp32", allow={"recompute", "reinplace"})
    assert all(map(torch.equal, step(optimized, planned), step(plain, plain)))


@pytest.mark.plans_always
def test_a_planned_forward_may_follow_one_that_ran_plain() -> None:
    plain, planned = Normalised(), Normalised()
    memopt.optimize(planned, 1, precision="fp32", allow={"recompute", "reinplace"})
    calls = iter(range(len(IMAGES)))

    def call(images: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = planned(images) if next(calls) % 2 else Normalised.forward(planned, images)
        return outputs

    assert all(map(torch.equal, step(call, planned), step(plain, plain)))


class Between(nn.Module):
    """Much of it is code between regions, which autograd sees as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(_between(self.first(x)))


@torch._dynamo.disable
def _between(x: torch.Tensor) -> torch.Tensor:
    return x.sin().cos().tanh()


@pytest.mark.plans_always
def test_what_code_between_regions_saved_belongs_to_the_forward() -> None:
    model = Between()
    memopt.optimize(model, 1, precision="fp32", allow={"recompute", "reinplace"})
    before = torch.randn(16, 32).requires_grad_().sin()
    loss = model(before).sum()
    forward = session_of(model).share.entry.latest()
    held = {tensor.data_ptr() for tensor in forward.held()}
    node = next(node for node in nodes_since([loss.grad_fn], 0) if type(node).__name__ == "TanhBackward0")
    values = node._raw_saved_result.data
    assert values.data_ptr() in held
    assert before.grad_fn._raw_saved_self.data.data_ptr() not in held
    with torch.no_grad():
        values.add_(0)  # autograd counts it, and refuses all that a region has saved
    assert {tensor.data_ptr() for tensor in forward.held()} == held


class _Skip(nn.Module):
    """Three regions, of which the last one takes what the first one returned, too."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.parts[0](x)
        torch._dynamo.graph_break()
        second = self.parts[1](first)
        torch._dynamo.graph_break()
        return (self.parts[2](second) * first).square().mean()


@pytest.mark.slow
@pytest.mark.usefixtures("counted")
def test_gradients_on_their_way_to_a_region_are_no_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of what the last region of three takes from the first one is there while the second one runs."""
    monkeypatch.setenv("MEMOPT_PLAN", "always")
    torch.manual_seed(0)
    rows, budget = torch.randn(512, 256), 1e-9
    for _ in range(2):
        model = _Skip()
        memopt.optimize(model, budget, precision="fp32", allow={"recompute", "reinplace"}, optimizer="sgd")
        try:
            loss = model(rows)
        except memopt.BudgetError as refused:
            budget = float(round_up(refused.smallest_gb))
    loss.backward()
    entry = session_of(model).share.entry  # type: ignore[union-attr]
    assert not entry.later_bytes


@pytest.mark.plans_always
@pytest.mark.usefixtures("counted")
def test_copies_of_inputs_in_the_first_step_do_not_appear_elsewhere() -> None:
    """As of `model(batch[rows])`, which the region reads in its forward only, and the caller drops."""
    model = nn.Sequential(nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1))
    memopt.optimize(model, 1, precision="fp32", allow={"recompute"}, optimizer=torch.optim.Adam(model.parameters()))
    loss = model(torch.randn(400, 256)[:300].clone()).square().mean()
    entry = session_of(model).share.entry  # type: ignore[union-attr]
    (forward,) = entry.waiting()
    assert sum(one.nbytes for one in forward.copies) > entry.tolerance_bytes
    loss.backward()
    assert entry.seen_until_backward
    assert not entry.later_bytes


@pytest.mark.plans_always
@pytest.mark.parametrize("share", [0.5, 2])
def test_a_backward_bears_as_much_as_its_forward(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other forwards may hold more than the plan has by a part of what it leaves free, as at the forward."""
    model = nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 128))
    memopt.optimize(model, 0.01, precision="fp32", allow={"recompute"}, optimizer="sgd")
    share_of_model = session_of(model).share  # type: ignore[union-attr]
    monkeypatch.setattr(type(share_of_model), "tolerance_bytes", share_of_model.entry.tolerance_bytes)
    outputs = model(torch.randn(256, 128))  # kept: dropped ones leave their room
    loss = outputs.square().mean()
    (waiting,) = share_of_model.entry.waiting()
    assert isinstance(waiting, PendingForward)
    account = waiting.plan.account
    assert account.tolerance
    room = waiting.plan.budget_bytes - waiting.plan.ceiling_bytes
    monkeypatch.setattr(
        type(share_of_model.entry), "plain_held_bytes", room + account.other_forwards + int(share * account.tolerance)
    )
    monkeypatch.setattr(PendingForward, "_see_what_appeared", lambda *_: None)
    if share < 1:
        loss.backward()
    else:
        with pytest.raises(memopt.BudgetError, match="the other forwards"):
            loss.backward()


@pytest.mark.plans_always
@pytest.mark.usefixtures("counted")
def test_room_that_a_plan_has_for_others_is_free_where_they_are_not() -> None:
    """As the steps of another model that were planned for and have not come: a forward may run by such a plan, and its
    backward is not refused for them."""
    model = nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 128))
    memopt.optimize(model, 0.01, precision="fp32", allow={"recompute"}, optimizer="sgd")
    loss = model(torch.randn(256, 128)).square().mean()
    (waiting,) = session_of(model).share.entry.waiting()  # type: ignore[union-attr]
    assert isinstance(waiting, PendingForward)
    plan = waiting.plan
    for_others = plan.budget_bytes
    account = replace(plan.account, elsewhere=plan.account.elsewhere + for_others)
    waiting.plan = replace(plan, account=account, ceiling_bytes=plan.ceiling_bytes + for_others)
    loss.backward()


@pytest.mark.plans_always
@pytest.mark.usefixtures("counted")
def test_a_backward_as_an_earlier_one_is_not_counted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It fits where no more is allocated when it begins; where tensors have appeared, what is there is counted."""
    counts: list[PendingForward] = []
    own = Share.backward_moment

    def counting(self: Share, forward: PendingForward, gradients: Sequence[object]) -> Moment:
        counts.append(forward)
        return own(self, forward, gradients)

    monkeypatch.setattr(Share, "backward_moment", counting)
    model = nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 128))
    memopt.optimize(model, 0.01, precision="fp32", allow={"recompute"}, optimizer="sgd")
    rows = torch.randn(256, 128)

    def counted_in_step(appearing: int = 0) -> bool:
        counts.clear()
        model.zero_grad()
        loss = model(rows).square().mean()
        kept = torch.zeros(appearing)
        loss.backward()
        del kept
        return bool(counts)

    assert counted_in_step()
    for _ in range(3):
        counted_in_step()
    assert not counted_in_step()
    assert counted_in_step(appearing=10**5)
    assert not counted_in_step()
    with pytest.raises(memopt.BudgetError, match="elsewhere"):
        counted_in_step(appearing=3 * 10**6)


@pytest.mark.plans_always
@pytest.mark.usefixtures("counted")
def test_garbage_of_an_earlier_backward_leaves_no_room_for_tensors_in_a_later_one() -> None:
    """The search of the first backward frees it; what is recorded as fitting is what is allocated after that."""
    model = nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 128))
    memopt.optimize(model, 0.01, precision="fp32", allow={"recompute"}, optimizer="sgd")
    rows = torch.randn(256, 128)

    def step(*, garbage: bool) -> None:
        model.zero_grad()
        loss = model(rows).square().mean()
        appeared: list[object] = [torch.zeros(3 * 10**6)]
        if garbage:
            appeared.append(appeared)
            del appeared
        loss.backward()

    gc.collect()
    gc.disable()
    try:
        step(garbage=True)
        with pytest.raises(memopt.BudgetError, match="elsewhere"):
            step(garbage=False)
    finally:
        gc.enable()


@pytest.mark.plans_always
@pytest.mark.usefixtures("counted")
def test_saved_tensors_in_hooks_of_the_caller_do_not_appear_elsewhere() -> None:
    """As within `save_on_cpu`, which on a CPU keeps the tensors themselves: each later step was refused."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)), nn.Linear(64, 1))
    memopt.optimize(model, 1, precision="fp32", allow={"recompute"}, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    with torch.autograd.graph.save_on_cpu():
        loss = model(torch.randn(4096, 64)).square().mean()
    entry = session_of(model).share.entry  # type: ignore[union-attr]
    loss.backward()
    assert entry.seen_until_backward
    assert not entry.later_bytes
