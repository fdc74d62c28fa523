"""fp16 screening: which values are recorded, which operators are kept in fp32, and that nothing else changes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.nn import functional as F

import memopt
from examples.models.families import BY_NAME, FAMILIES, Family, without_dropout
from examples.models.step import Step, train_step
from memopt.capture.operators import OperatorGraph
from memopt.device.devices import hardware
from memopt.errors import GIB
from memopt.levers.precision import DecidePrecision, precision_rewriting
from memopt.rewrite import screen
from memopt.rewrite.dtypes import AssignPrecision
from memopt.rewrite.screen import LARGEST, Range, kept_out, range_of
from memopt.run.session import session_of
from passes import copy_graph_module
from tests.marks import slow
from tests.passes.capture import Sketch, aten

CHECKED = "values on a sample batch were checked against fp16's range: all values are within range"
FP16, FP32 = torch.float16, torch.float32
WIDTH = 32


class FeedForward(nn.Module):
    """T5's: a norm of root mean squares, two layers, what comes in added."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)
        with torch.no_grad():
            self.narrow.weight.mul_(gain)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.scale * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        return x + self.drop(self.narrow(F.relu(self.wide(normed))))


class Net(nn.Module):
    """Two feed-forward layers, with `gains` of their last weights, a counter, and a loss; `breaks` between them."""

    def __init__(self, gains: tuple[float, float] = (1.0, 1.0), *, breaks: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = map(FeedForward, gains)
        self.norm, self.head = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.breaks = breaks
        self.rows: list[int] = []

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        self.calls += 1
        x = self.first(x)
        if self.breaks:
            self.rows.append(len(x))
            torch._dynamo.graph_break()
        return F.cross_entropy(self.head(self.norm(self.second(x))), labels)


@pytest.fixture
def fresh_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take no plan from disk: until the first step it is found by the model's structure, not by its values."""
    monkeypatch.setenv("MEMOPT_CACHE", "0")


def batch(rows: int = 64) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(rows, WIDTH), "labels": torch.randint(8, (rows,))}


def sample_reasons(plan: memopt.Plan) -> list[str]:
    return [line for line in str(plan.diff("precision")).splitlines() if "on the sample batch" in line]


def train(model: nn.Module, given: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(2)
    model.zero_grad()
    loss = model(**given)
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters()]


def finite(loss: Tensor, gradients: list[Tensor]) -> bool:
    return all(bool(torch.isfinite(gradient).all()) for gradient in (loss, *gradients))


def decider_of(model: nn.Module) -> DecidePrecision:
    call = session_of(model)
    assert call is not None
    (decide,) = call.forward.planner.terms.rewriting.deciders
    assert isinstance(decide, DecidePrecision)
    return decide


def without_screening(model: nn.Module) -> nn.Module:
    decide = decider_of(memopt.optimize(model, 1, optimizer=None, precision="fp16"))
    decide.screenings.look = lambda *_, **__: None  # type: ignore[method-assign,union-attr]
    return model


@pytest.mark.parametrize("breaks", [False, slow(True)], ids=["whole", "regions"])
def test_an_overflow_stays_out_and_the_step_is_finite(breaks: bool) -> None:
    gains = (1.0, 1e6)
    bad = without_screening(Net(gains, breaks=breaks))
    assert not finite(*train(bad, batch()))
    assert "were not checked against fp16's range" in " ".join(memopt.plan_of(bad).notes)

    plain, _ = train(Net(gains, breaks=breaks), batch())
    model = memopt.optimize(Net(gains, breaks=breaks), 1, optimizer=None, precision="fp16")
    loss, gradients = train(model, batch())
    plan = memopt.plan_of(model)
    assert finite(loss, gradients)
    assert loss.item() == pytest.approx(plain.item(), rel=0.02)
    reasons = sample_reasons(plan)
    assert reasons
    assert all("second" in reason or "dropout" in reason or "batch_norm" in reason for reason in reasons)
    assert any(
        "narrow" in reason and "fp32: its values reached" in reason and "fp16 ends at 65504" in reason
        for reason in reasons
    )
    assert f"{len(reasons)} ops have values beyond the range of fp16 and stay in fp32" in " ".join(plan.notes)


def test_planned_ahead_and_again_it_is_the_same() -> None:
    model = Net((1e6, 1.0))
    ahead = memopt.plan(model, 1, batch(), optimizer=None, precision="fp16")
    memopt.optimize(model, 1, example_inputs=batch(), optimizer=None, precision="fp16")
    assert sample_reasons(memopt.plan_of(model)) == sample_reasons(ahead) != []
    train(model, batch())
    assert sample_reasons(memopt.plan_of(model)) == sample_reasons(ahead)
    small = {name: item * 0 for name, item in batch().items()}  # a batch without overflow, with gradients held
    model(**small).backward()
    assert sample_reasons(memopt.plan_of(model)) == sample_reasons(ahead)


@pytest.mark.slow
def test_a_model_without_overflow_is_planned_as_before() -> None:
    model = Net()
    with_values = memopt.plan(model, 1, batch(), optimizer=None, precision="fp16")
    meta = {name: item.to("meta") for name, item in batch().items()}
    without = memopt.plan(model, 1, meta, optimizer=None, precision="fp16")
    assert str(with_values.diff("precision")) == str(without.diff("precision"))
    assert with_values.predicted_peak_bytes == without.predicted_peak_bytes
    assert CHECKED in with_values.notes
    assert any("not checked against fp16's range, since the plan was made" in note for note in without.notes)
    assert not any("checked against" in note for note in memopt.plan(model, 1, batch(), precision="bf16").notes)


@pytest.mark.parametrize("breaks", [False, slow(True)], ids=["whole", "regions"])
def test_no_trace_of_the_sample_run_is_left(breaks: bool) -> None:
    model, given = Net(breaks=breaks), batch()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    attributes, random = dict(vars(model)), torch.get_rng_state()
    memopt.plan(model, 1, given, optimizer=None, precision="fp16")
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(given[name], value) for name, value in batch().items())
    assert vars(model) == attributes
    assert model.rows == []
    assert all(parameter.grad is None for parameter in model.parameters())


class WritesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.mul_(2)).square().mean()


def test_an_input_that_the_model_writes_to_is_as_before() -> None:
    x = torch.ones(4, WIDTH)
    memopt.plan(WritesItsInput(), 1, (x,), optimizer=None, precision="fp16")
    assert bool((x == 1).all())


@pytest.mark.slow
def test_the_sample_run_keeps_to_the_budget() -> None:
    given = batch(4096)
    model = Net((1.0, 1e6))
    plan = memopt.plan(model, 1, given, optimizer=None, precision="fp16")
    budget_gb = plan.predicted_peak_gb * 1.1
    with memopt.measure_peak("cpu") as peak:
        memopt.optimize(model, budget_gb, optimizer=None, precision="fp16")
        loss, gradients = train(model, given)
    assert finite(loss, gradients)
    assert (
        peak.allocated_bytes + sum(tensor.nbytes for tensor in (*model.parameters(), *given.values()))
        <= budget_gb * GIB
    )


def test_without_room_for_it_nothing_is_run() -> None:
    rewriting = precision_rewriting("fp16", hardware("cpu"))
    (decide,) = rewriting.deciders
    assert isinstance(decide, DecidePrecision)
    assert decide.screenings is not None
    given = ((), batch(4096))
    with memopt.measure_peak("cpu") as peak:
        decide.screenings.look(Net(), given, None, [rewriting], room_bytes=2**19, differentiate_all=False)
    assert peak.allocated_bytes < 2**20
    graph = OperatorGraph(attention(Sketch(), 1.0), frozenset())
    _, note = decide.screenings.decide(graph, lambda _: AssignPrecision(FP16)(graph.module))
    assert re.search(r"were not checked .*in fp32 would hold \S+ MB where the budget leaves 512 kB; they may", note)


@pytest.mark.slow
def test_a_plan_without_values_and_the_step_after_it(fresh_plans: None) -> None:
    meta = {name: item.to("meta") for name, item in batch().items()}
    model = memopt.optimize(Net(), 1, example_inputs=meta, optimizer=None, precision="fp16")
    assert any("made without running the model on real values" in note for note in memopt.plan_of(model).notes)
    train(model, batch())
    notes = memopt.plan_of(model).notes
    assert CHECKED in notes
    assert not any("without running the model on real values" in note for note in notes)


def test_a_region_that_is_rewritten_otherwise_is_screened_in_part(fresh_plans: None) -> None:
    model = memopt.optimize(Net((1.0, 1e6)), 1, example_inputs=batch(), optimizer=None, precision="fp16")
    module = copy_graph_module(memopt.plan_of(model).graphs["operators"][0])
    (head,) = (node for node in module.graph.nodes if "head_weight" in map(str, node.args))
    with module.graph.inserting_before(head):
        added = module.graph.call_function(aten.relu.default, (head.args[0],))
    added.meta["val"] = head.args[0].meta["val"]
    head.update_arg(0, added)
    decision = decider_of(model)(OperatorGraph(module, frozenset()))
    assert any("were checked against fp16's range: in part" in note for note in decision.notes)
    assert decision.reasons["linear_3"].startswith("fp32: its values reached")


@pytest.mark.slow
def test_t5_whose_feed_forward_overflows() -> None:
    family = BY_NAME["t5"]
    model, given = without_dropout(family.make()), family.batch("usual")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("wo.weight"):
                parameter.mul_(3e4)
    plain = train_step(model, given)
    assert not finite(*seen(train_step(without_screening(model), given)))
    memopt.remove(model)
    plan = memopt.plan(model, 1, given, optimizer=None, precision="fp16")
    budget_gb = 1.1 * plan.smallest_gb()
    memopt.optimize(model, budget_gb, optimizer=None, precision="fp16")
    step = train_step(model, given)
    assert finite(*seen(step))
    assert step.peak_bytes <= budget_gb * GIB
    assert torch.isclose(step.loss.float(), plain.loss, rtol=0.02)
    assert sample_reasons(memopt.plan_of(model)) == sample_reasons(plan)
    assert all("wo_weight" in reason or "dropout" in reason for reason in sample_reasons(plan))


def seen(step: Step) -> tuple[Tensor, list[Tensor]]:
    return step.loss, list(step.gradients.values())


@pytest.mark.slow
@pytest.mark.parametrize("family", [item for item in FAMILIES if item.name != "moe"], ids=str)
def test_families_do_not_overflow_as_they_are(family: Family) -> None:
    plan = memopt.plan(family.make(), 1000, family.batch("usual"), optimizer=None, precision="fp16")
    assert CHECKED in plan.notes


def test_rules_with_fp16_are_screened_too() -> None:
    rules = {"default": "fp32", "linear": "fp16"}
    plan = memopt.plan(Net((1e6, 1.0)), 1, batch(), optimizer=None, precision=rules)
    assert any("linear" in reason and "reached" in reason for reason in sample_reasons(plan))


@given(st.integers(0, 2**32), st.sampled_from([(), (1,), (7,), (3, 5), (0, 4), (40, 3, 70), (1, 1, 300), (260, 1)]))
@settings(max_examples=40, deadline=None)
def test_a_range_is_that_of_all_elements(seed: int, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    scale = torch.tensor([1e-9, 1e-8, 0.0, 1.0, 1e5])
    x = x * scale[torch.randint(5, (*shape[:-1], 1) if shape else (), generator=generator)]
    blocks, screen._BLOCK_ON_HOST = screen._BLOCK_ON_HOST, 64
    try:
        found = range_of(x)
    finally:
        screen._BLOCK_ON_HOST = blocks
    size = x.abs()
    rows = size.amax(-1, keepdim=True) if shape and x.numel() else size
    lost = (size > 0) & (size <= 2**-25) & (size > rows * 2**-11)
    assert found.high == max(0.0, float(x.max()) if x.numel() else 0.0)
    assert found.low == min(0.0, float(x.min()) if x.numel() else 0.0)
    assert found.lost == pytest.approx(int(lost.sum()) / max(1, int((size > 0).sum())))


def test_what_is_no_number_in_fp32_either_is_no_overflow() -> None:
    x = torch.tensor([[1.0, torch.inf], [-torch.inf, torch.nan], [-3.0, 2.0]])
    assert range_of(x) == Range(low=-3.0, high=2.0)


def screened(module: fx.GraphModule, *inputs: Any) -> dict[str, str]:
    _, ranges = screen.screened(module, inputs)
    decider = AssignPrecision(FP16)
    return dict(kept_out(module, ranges, lambda kept: AssignPrecision(FP16, decider.rules, kept_out=kept)(module)))


def attention(sketch: Sketch, fill: float) -> fx.GraphModule:
    query, key, value = (sketch.input(name, 2, 8, 4) for name in ("query", "key", "value"))
    scores = sketch.call(aten.matmul.default, query, sketch.call(aten.transpose.int, key, -1, -2))
    mask = sketch.input("mask", 8, 8)
    masked = sketch.call(aten.add.Tensor, scores, sketch.call(aten.mul.Tensor, mask, fill))
    return sketch.returns(sketch.call(aten.matmul.default, sketch.call(aten.softmax.int, masked, -1), value))


def test_masks_are_no_overflow_but_scores_are() -> None:
    inputs = [torch.ones(2, 8, 4) for _ in range(3)]
    mask = torch.ones(8, 8).triu(1)
    assert screened(attention(Sketch(), -3e38), *inputs, mask) == {}
    found = screened(attention(Sketch(), -3e38), inputs[0] * 1e3, inputs[1] * 1e3, inputs[2], mask)
    assert found["matmul"].startswith("its values reached 4e+06 on the sample batch")


def test_scores_inside_of_a_kernel() -> None:
    sketch = Sketch()
    given = [sketch.input(name, 2, 8, 4) for name in ("query", "key", "value")]
    module = sketch.returns(sketch.call(aten.scaled_dot_product_attention.default, *given))
    inputs = [torch.ones(2, 8, 4) for _ in range(3)]
    assert screened(module, *inputs) == {}
    (reason,) = screened(module, inputs[0] * 400, inputs[1] * 400, inputs[2]).values()
    assert reason == "its attention scores may reach 3.2e+05 on the sample batch, and fp16 ends at 65504"


def test_an_operand_that_overflows_and_one_that_underflows() -> None:
    sketch = Sketch()
    x, weight = sketch.input("x", 4, 8), sketch.input("weight", 8, 8)
    module = sketch.returns(sketch.call(aten.linear.default, x, weight))
    assert screened(module, torch.ones(4, 8), torch.full((8, 8), 0.01)) == {}
    large = screened(module, torch.full((4, 8), 1e5), torch.full((8, 8), 1e-3))
    assert large == {"linear": "reads x, which reached 1e+05 on the sample batch, and fp16 ends at 65504"}
    small = screened(module, torch.ones(4, 8), torch.full((8, 8), 1e-9))
    assert small == {"linear": "100% of its nonzero values on the sample batch are too small for fp16"}


def test_what_is_written_in_place_is_mended_where_it_is_made() -> None:
    sketch = Sketch()
    x, weight = sketch.input("x", 4, 8), sketch.input("weight", 8, 8)
    made = sketch.call(aten.linear.default, x, weight)
    module = sketch.returns(sketch.call(aten.mul_.Tensor, made, 1e5))
    found = screened(module, torch.ones(4, 8), torch.ones(8, 8))
    assert found == {"linear": f"its values reached 8e+05 on the sample batch, and fp16 ends at {LARGEST:.0f}"}
