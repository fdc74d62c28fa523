"""Offloaded activations: the plain model's bits, and smaller peaks than recomputation alone reaches."""

from __future__ import annotations

import gc
import mmap
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from examples.models.families import BY_NAME, Family, causal_batch
from examples.models.step import restored_buffers, train_step
from memopt.emit import emit
from memopt.errors import GIB
from memopt.levers import DEFAULT_LEVERS
from memopt.planning.schedule_parts import RegionSchedule
from passes import ApplySchedule
from passes.ops.offload_ops import host_memory
from tests.end_to_end import odd_models
from tests.end_to_end.odd_models import Layered
from tests.end_to_end.pieces import assert_same, check, loss, run, step
from tests.end_to_end.steps import assert_equal
from tests.end_to_end.test_situations import GPT2
from tests.end_to_end.usual import batch, make
from tests.linked import ALLOW, linked
from tests.marks import slow
from tests.planned import make_plan

pytestmark = pytest.mark.plans_always  # the plain steps would fit

__all__ = ["linked"]

FP32: dict[str, Any] = {"optimizer": None, "precision": "fp32"}
BOTH: dict[str, Any] = {**FP32, "allow": ALLOW}


def smallest(model: nn.Module, inputs: Any, allow: set[str]) -> memopt.Plan:
    roomy = memopt.plan(model, 1000, inputs, **FP32, allow=allow)
    return roomy.at(roomy.smallest_gb())


def recomputing(plan: memopt.Plan) -> memopt.Plan:
    """Return the plan of the same captured step with the smallest peak that recomputation alone reaches."""
    assert plan.captured is not None
    alone = make_plan(plan.priced.priced_for(link=None), plan.account, 2**40)
    return alone.at(alone.smallest_gb())


def offloads(plan: memopt.Plan) -> int:
    return sum(len(region.offloads) for region in plan.regions)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [Family("small", GPT2, causal_batch), *(BY_NAME[name] for name in ("gpt2-sdpa", "vit", "resnet"))],
    ids=str,
)
def test_less_than_recomputation_alone_reaches(family: Family, linked: None) -> None:
    model, inputs = family.make(), family.batch("usual")
    with restored_buffers(model):
        plain = train_step(model, inputs)
    roomy = memopt.plan(model, 1000, inputs, **BOTH)
    recomputed, budget_gb = recomputing(roomy), 1.02 * roomy.smallest_gb()
    assert budget_gb < recomputed.predicted_peak_gb
    memopt.optimize(model, budget_gb, **BOTH, effort="fast")
    offloaded = train_step(model, inputs)
    made = memopt.plan_of(model)
    assert_equal(offloaded, plain)
    assert offloaded.peak_bytes <= made.predicted_peak_bytes <= 1.02 * offloaded.peak_bytes
    assert made.predicted_peak_bytes <= budget_gb * GIB
    assert made.levers == ("offload_activations",)
    assert made.added_time < recomputed.added_time
    host = host_memory("cpu")
    assert made.host_bytes <= host.most_leased_bytes <= made.host_bytes / 0.8 + offloads(made) * mmap.PAGESIZE
    assert host.leased_bytes == 0


@pytest.mark.slow
def test_without_its_effect_the_step_does_not_fit(linked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    x, labels = batch()
    model, inputs = make(), {"x": x, "labels": labels}
    budget_gb = smallest(make(), inputs, ALLOW).smallest_gb()

    def without_offloads(joint: Any, schedule: RegionSchedule) -> Any:
        return ApplySchedule(schedule.evaluations, schedule.boundary, joint.forward_outputs)(joint.module)

    monkeypatch.setattr(emit, "scheduled_graph", without_offloads)
    memopt.optimize(model, budget_gb, **BOTH)
    assert train_step(model, inputs).peak_bytes > 1.2 * budget_gb * GIB
    assert offloads(memopt.plan_of(model)) > 0


@pytest.mark.slow
def test_beside_the_other_levers(linked: None) -> None:
    """Offloads combine with levers that rewrite the graph, with recomputation and instead of it."""
    inputs, plain = causal_batch("usual"), train_step(GPT2(), causal_batch("usual"))
    options: dict[str, Any] = {**FP32}
    budget_gb = 0.3 * memopt.plan(GPT2(), 1000, inputs, **options).plain_peak_gb
    for allow in (DEFAULT_LEVERS, DEFAULT_LEVERS - {"recompute"}):
        model = memopt.optimize(GPT2(), budget_gb, **options, allow=allow)
        offloaded = train_step(model, inputs)
        made = memopt.plan_of(model)
        assert {"chunked_loss", "offload_activations"} <= {*made.levers}
        assert offloaded.peak_bytes <= made.predicted_peak_bytes <= budget_gb * GIB
        assert_equal(offloaded, plain, 1e-5)


def test_instead_of_recomputation(linked: None) -> None:
    """Where recomputation is not allowed nothing is recomputed, and values are offloaded instead."""
    x, labels = batch()
    budget_gb = 1.05 * smallest(make(), {"x": x, "labels": labels}, {"offload_activations"}).smallest_gb()
    model = make()
    check(model, lambda model: step(model, (x, labels)), budget_gb, (x, labels), allow={"offload_activations"})
    made = memopt.plan_of(model)
    assert made.diff().recomputed == 0
    assert made.moved_bytes > 0
    assert budget_gb * GIB < 0.8 * made.plain.peak_bytes


def test_not_where_recomputation_is_all_that_is_allowed(linked: None) -> None:
    x, labels = batch()
    made = smallest(make(), {"x": x, "labels": labels}, {"recompute"})
    assert made.added_time > 0.01
    assert (offloads(made), made.host_bytes, made.levers) == (0, 0, ())


def test_on_a_cpu_there_is_nowhere_to_go() -> None:
    x, labels = batch()
    made = memopt.plan(make(), 1000, (x, labels), **FP32)
    tight = made.at(made.smallest_gb())
    assert tight.added_time > 0.01
    assert (offloads(tight), tight.moved_bytes) == (0, 0)


@pytest.fixture
def optimised(linked: None) -> tuple[nn.Module, Any]:
    """Return a model optimised for two thirds of the plain step's peak, and its batch."""
    made = memopt.plan(make(), 1000, batch(), **BOTH)
    model = memopt.optimize(make(), 0.65 * made.plain_peak_gb, example_inputs=batch(), **BOTH)
    assert offloads(memopt.plan_of(model)) > 0
    return model, batch()


def test_two_forwards_before_a_backward(linked: None) -> None:
    """The second forward is planned beside what the first one holds, and so it offloads."""
    inputs, other = batch(), batch(seed=7)
    made = memopt.plan(make(), 1000, inputs, **BOTH)
    budget_bytes = made.plain.peak_bytes + made.account.gradients + made.held_bytes // 2

    def piece(model: nn.Module) -> list[Tensor]:
        first, second = loss(model, inputs), loss(model, other)
        second.backward()
        first.backward()
        return [first.detach(), second.detach()]

    model = make()
    check(model, piece, budget_bytes / GIB, inputs, allow=ALLOW)
    assert offloads(memopt.plan_of(model)) > 0
    assert host_memory("cpu").leased_bytes == 0


def test_a_forward_without_a_backward_leaves_nothing(optimised: tuple[nn.Module, Any]) -> None:
    model, inputs = optimised
    value = loss(model, inputs)
    assert host_memory("cpu").leased_bytes > 0
    del value
    gc.collect()
    assert host_memory("cpu").leased_bytes == 0
    mapped = host_memory("cpu").mapped_bytes
    for _ in range(3):
        loss(model, inputs)
        gc.collect()
    assert host_memory("cpu").mapped_bytes == mapped, "blocks are used again"


def test_an_exception_leaves_nothing(optimised: tuple[nn.Module, Any]) -> None:
    model, inputs = optimised

    def fails(model: nn.Module) -> None:
        value = loss(model, inputs)
        assert host_memory("cpu").leased_bytes > 0
        handle = value.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            value.backward()
        handle.remove()

    fails(model)
    gc.collect()
    assert host_memory("cpu").leased_bytes == 0
    model.zero_grad()
    plain, after = (run(trained, lambda trained: step(trained, inputs), inputs) for trained in (make(), model))
    assert_same(after, plain)


def test_a_retained_graph_fetches_again(linked: None) -> None:
    inputs = batch()

    def piece(model: nn.Module) -> Tensor:
        value = loss(model, inputs)
        value.backward(retain_graph=True)
        value.backward()
        return value.detach()

    made = memopt.plan(make(), 1000, inputs, **BOTH)
    check(make(), piece, 0.9 * made.plain_peak_gb + 2 * made.account.gradients / GIB, inputs, allow=ALLOW)
    assert host_memory("cpu").leased_bytes == 0


def test_gradients_accumulate(linked: None) -> None:
    first, second = batch(), batch(seed=3)
    made = memopt.plan(make(), 1000, first, **BOTH)
    budget_gb = made.smallest_gb() + 1.1 * made.account.gradients / GIB
    model = make()
    check(model, lambda model: [step(model, inputs) for inputs in (first, second)], budget_gb, first, allow=ALLOW)
    assert memopt.plan_of(model).account.gradients_held
    assert offloads(memopt.plan_of(model)) > 0


def test_a_whole_step(linked: None) -> None:
    """A TrainStep with microbatches, clipping and an optimiser leads to the same weights."""

    def trained(model: nn.Module) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        train = memopt.TrainStep(model, optimizer, max_grad_norm=1.0, microbatches=2)
        torch.manual_seed(3)
        for seed in range(2):
            train(batch(seed=seed))
        return [parameter.detach() for parameter in model.parameters()]

    half = tuple(value[: value.shape[0] // 2] for value in batch())
    made = memopt.plan(make(), 1000, half, precision="fp32", optimizer=torch.optim.SGD, allow=ALLOW)
    budget_gb = made.smallest_gb() + 1.05 * made.account.gradients / GIB
    model = memopt.optimize(make(), budget_gb, precision="fp32", optimizer=torch.optim.SGD, allow=ALLOW)
    ours, plain = trained(model), trained(make())
    assert offloads(memopt.plan_of(model)) > 0
    assert all(map(torch.equal, ours, plain))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [slow(odd_models.GraphBreak), odd_models.BreakInLoop])
def test_a_forward_that_breaks(kind: type[Layered], linked: None) -> None:
    inputs = batch()
    made = smallest(make(kind), inputs, ALLOW)
    model = make(kind)
    check(model, lambda model: step(model, inputs), 1.02 * made.smallest_gb(), inputs, allow=ALLOW)
    assert len(memopt.plan_of(model).regions) > 1
    assert offloads(memopt.plan_of(model)) > 0


@pytest.mark.slow
def test_the_account_holds(linked: None) -> None:
    """Offloaded values are in no row of the device's account, which is checked by a measured step."""
    inputs = batch()
    made = memopt.plan(make(), 1000, inputs, precision="fp32", optimizer=torch.optim.SGD, allow=ALLOW)
    model = memopt.optimize(
        make(), made.smallest_gb(), precision="fp32", optimizer=torch.optim.SGD, allow=ALLOW, example_inputs=inputs
    )
    assert offloads(memopt.plan_of(model)) > 0
    checked = memopt.check(model, torch.optim.SGD(model.parameters(), lr=0.1), inputs)
    assert checked.total.measured_bytes <= checked.total.predicted_bytes <= 1.03 * checked.total.measured_bytes


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu() -> None:
    """At the smallest budget that works repeated steps give the same gradients and stay within the budget."""
    model = make(Layered).cuda()
    inputs = tuple(value.cuda() for value in batch(2**14))
    roomy = memopt.plan(model, 1000, inputs, **BOTH)
    loss(model, inputs).backward()
    expected = [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]
    memopt.optimize(model, roomy.smallest_gb(), **BOTH)
    for _ in range(5):
        model.zero_grad()
        gc.collect()
        with memopt.measure_peak() as peak:
            loss(model, inputs).backward()
        made = memopt.plan_of(model)
        assert offloads(made) > 0
        assert peak.bytes <= made.predicted_peak_bytes <= roomy.smallest_bytes()
        gradients = [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]
        assert all(map(torch.equal, gradients, expected))
    assert host_memory("cuda").leased_bytes == 0
