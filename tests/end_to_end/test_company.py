"""Models that train in company: a teacher, an average of the parameters, a second model. Everything on the device stays
within the budget, with the plain models' bits, or the step is refused."""

from __future__ import annotations

import copy
import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import memopt
from examples.models.families import integers, normals
from tests.elsewhere import counted
from tests.end_to_end.company import (
    ALL,
    EXACT,
    GIB,
    Step,
    assert_same,
    assert_within,
    bytes_of,
    gpt2,
    middle,
    tokens,
    train,
)

__all__ = ["counted"]

pytestmark = pytest.mark.usefixtures("counted")


def divergence(outputs: Any, soft: Tensor) -> Tensor:
    return F.kl_div(outputs.logits.log_softmax(-1), soft, reduction="batchmean")


def distilling(student: Any, teacher: Any) -> Step:
    """Training steps with the teacher's soft labels."""
    optimizer = torch.optim.AdamW(student.parameters())
    ids = tokens(1)

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.no_grad():
            soft = teacher(ids).logits.softmax(-1)
        optimized = type(student._compiled_call_impl).__name__ == "Session"
        loss = memopt.training_loss(student, (ids, soft)) if optimized else divergence(student(ids), soft)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return step


@pytest.mark.slow
def test_teacher_and_student() -> None:
    teacher = gpt2(3, seed=5).eval()
    student = gpt2()
    twin = copy.deepcopy(student)
    plain = train(distilling(twin, teacher), twin)
    del twin
    options: dict[str, Any] = {**EXACT, "loss_fn": divergence}
    plan = memopt.plan(student, 1, (tokens(1), torch.zeros(8, 64, 320)), **options)
    assert plan.account.elsewhere >= bytes_of(teacher)
    assert "elsewhere" in str(plan)
    budget = middle(plan)
    memopt.optimize(student, budget, **options)
    trained = train(distilling(student, teacher), student)
    assert_same(trained, plain)
    assert_within(trained, budget)


def averaging(model: Any, averages: list[AveragedModel] | None = None) -> Step:
    """Training steps on a batch of text that update an average of the parameters, if there is to be one, which is made
    after the first."""
    optimizer = torch.optim.AdamW(model.parameters())
    batch = {"input_ids": tokens(1), "labels": tokens(1)}

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        if averages is None:
            return loss.detach()
        if not averages:
            averages.append(AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)))
        averages[0].update_parameters(model)
        return loss.detach()

    return step


@pytest.mark.slow
@pytest.mark.parametrize("room", [True, False])
def test_an_average_of_the_parameters_appears(room: bool) -> None:
    """The next forward is planned beside it, or refused before it runs."""
    model = gpt2(1)
    plain = train(averaging(twin := copy.deepcopy(model), []), twin)
    del twin
    plan = memopt.plan(model, 1, {"input_ids": tokens(1), "labels": tokens(1)}, **EXACT)
    budget = middle(plan) if room else plan.smallest_gb() + 0.1 * bytes_of(model) / GIB
    memopt.optimize(model, budget, **EXACT)
    averages: list[AveragedModel] = []
    if room:
        trained = train(averaging(model, averages), model)
        assert_same(trained, plain)
        assert_within(trained, budget)
        assert memopt.plan_of(model).account.elsewhere >= bytes_of(averages[0])
        return
    step = averaging(model, averages)
    step()
    with (
        memopt.measure_peak("cpu") as peak,
        pytest.raises(memopt.BudgetError, match=r"elsewhere [0-9.]+ MB") as refused,
    ):
        step()
    assert re.search(r"the largest: float32 \[(96, 384|384, 96)\]", str(refused.value))
    assert peak.bytes <= budget * GIB
    averages.clear()
    step()


@pytest.mark.slow
def test_room_that_becomes_free_is_used() -> None:
    """A checkpoint that is held while the plan is made leaves its room to the steps after it is freed."""
    model = gpt2()
    batch = {"input_ids": tokens(1), "labels": tokens(1)}
    budget = middle(memopt.plan(model, 1, batch, **EXACT))
    checkpoint = [torch.zeros(int(0.3 * budget * GIB) // 4)]
    memopt.optimize(model, budget, **EXACT)
    step = averaging(model)
    step()
    tight = memopt.plan_of(model)
    checkpoint.clear()
    step()
    assert memopt.plan_of(model).added_time < tight.added_time


def generator() -> nn.Module:
    torch.manual_seed(0)
    widths = (16, 96, 64, 32, 3)
    layers: list[nn.Module] = []
    for taken, given in pairwise(widths):
        layers += [nn.ConvTranspose2d(taken, given, 4, 2, 1), nn.Tanh() if given == 3 else nn.ReLU()]
    return nn.Sequential(*layers).train()


def discriminator() -> nn.Module:
    torch.manual_seed(1)
    widths = (3, 32, 64, 96)
    layers: list[nn.Module] = []
    for taken, given in pairwise(widths):
        layers += [nn.Conv2d(taken, given, 4, 2, 1), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(96 * 16, 1)).train()


class Pair(nn.Module):
    """The two halves of a GAN, which train in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.makes, self.judges = generator(), discriminator()


def competing(pair: Pair) -> Step:
    """Training steps of both halves."""
    makes = torch.optim.AdamW(pair.makes.parameters())
    judges = torch.optim.AdamW(pair.judges.parameters())
    noise, real = normals(8, 16, 2, 2, seed=1), normals(8, 3, 32, 32, seed=2)
    yes, no = torch.ones(8, 1), torch.zeros(8, 1)

    def step() -> Tensor:
        judges.zero_grad()
        made = pair.makes(noise)
        judged = F.binary_cross_entropy_with_logits(pair.judges(real), yes)
        judged = judged + F.binary_cross_entropy_with_logits(pair.judges(made.detach()), no)
        judged.backward()  # type: ignore[no-untyped-call]
        judges.step()
        makes.zero_grad()
        fooled = F.binary_cross_entropy_with_logits(pair.judges(made), yes)
        fooled.backward()  # type: ignore[no-untyped-call]
        makes.step()
        return (judged + fooled).detach()

    return step


@pytest.mark.slow
@pytest.mark.plans_always
def test_two_halves_of_a_gan() -> None:
    pair = Pair()
    twin = copy.deepcopy(pair)
    plain = train(competing(twin), twin)
    budget = 1.6 * max(plain.peaks) / GIB
    del twin
    for half in (pair.makes, pair.judges):
        memopt.optimize(half, budget, **ALL)
    trained = train(competing(pair), pair)
    assert_same(trained, plain)
    assert_within(trained, budget)
    plans = [memopt.plan_of(half) for half in (pair.makes, pair.judges)]
    assert plans[0].account.elsewhere >= bytes_of(pair.judges)
    assert plans[1].account.elsewhere >= bytes_of(pair.makes)


@pytest.mark.slow
def test_cached_tensors_that_grow_are_refused_before_the_step() -> None:
    """With default options."""
    model = gpt2()
    batch = {"input_ids": tokens(1), "labels": tokens(1)}
    budget = middle(memopt.plan(model, 1, batch))
    memopt.optimize(model, budget, example_inputs=batch)
    step, cached, peaks = averaging(model), list[Tensor](), list[int]()

    def run() -> None:
        for _ in range(12):
            with memopt.measure_peak("cpu") as peak:
                step()
            peaks.append(peak.bytes)
            cached.append(torch.zeros(int(0.15 * budget * GIB) // 4))

    with pytest.raises(memopt.BudgetError, match="elsewhere"):
        run()
    assert max(peaks) <= budget * GIB
    assert len(peaks) >= 3, "no plan with less room was made"
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.slow
def test_plans_for_other_devices_count_nothing_elsewhere_unless_told() -> None:
    model = gpt2()
    cached = torch.zeros(1_000_000)
    batch = {"input_ids": tokens(1), "labels": tokens(1)}
    account = memopt.plan(model, 1, batch, **EXACT).account
    assert account.elsewhere >= cached.nbytes - account.tolerance // 2  # in steps of which bytes elsewhere are counted
    assert memopt.plan(model, 1, batch, device="h100", **EXACT).account.elsewhere == 0
    assert memopt.plan(model, 1, batch, elsewhere_gb=0, **EXACT).account.elsewhere == 0
    told = memopt.plan(copy.deepcopy(model).to("meta"), 2, batch, device="h100", elsewhere_gb=0.25, **EXACT)
    assert told.account.elsewhere == GIB // 4


@pytest.mark.slow
def test_a_comparison_counts_its_own_copies_nowhere() -> None:
    model = gpt2()
    batch = {"input_ids": integers(320, 8, 64), "labels": integers(320, 8, 64)}
    memopt.optimize(model, middle(memopt.plan(model, 1, batch, **EXACT)), **EXACT)
    assert memopt.compare(model, batch, reference="fp32").bitwise


class Broken(nn.Module):
    """Wide layers before a graph break, a narrow one after it."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Sequential(
            *(nn.Sequential(nn.Linear(32, 512), nn.GELU(), nn.Linear(512, 32)) for _ in range(4))
        )
        self.after = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.before(x)
        torch._dynamo.graph_break()
        loss: Tensor = self.after(hidden).square().mean()
        return loss


@pytest.mark.slow
def test_what_a_region_saved_is_not_elsewhere_once_a_later_region_has_run_its_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("memopt.run.ledger._SHARE_OF_TIME", 1)
    model, x = Broken(), normals(512, 32)
    budget_gb = memopt.plan(model, 1, (x,), optimizer=None, **EXACT).predicted_peak_gb
    memopt.optimize(model, 1.1 * budget_gb, example_inputs=(x,), optimizer=None, **EXACT)
    model(x).backward()
    assert len(memopt.plan_of(model).regions) == 2
