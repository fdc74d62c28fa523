"""The backend inductor: peaks as predicted and within the budget, gradients of torch.compile, the same refusals."""

from __future__ import annotations

import copy
import gc
import itertools
import random
import warnings
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memopt
from examples.models.families import BY_NAME, integers, normals
from examples.models.random_trials import random_schedules
from examples.models.step import Step, own_bytes, restored_buffers, train_step
from memopt.compat import inductor
from memopt.errors import GIB
from memopt.planning.options import check_options
from tests.end_to_end.steps import assert_equal

ROUNDING = 1e-5
MODE = {"optimizer": None, "precision": "fp32", "allow": {"recompute"}}
WIDTH, ROWS, CLASSES = 96, 768, 16


class Dropping(nn.Module):
    """Residual blocks with layer norm, GELU and dropout: operators that fuse, and random numbers to be repeated."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(depth)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + F.dropout(block(x), 0.2, self.training)
        return F.cross_entropy(self.head(x), labels)


def make() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Dropping().train()


def batch() -> dict[str, Tensor]:
    return {"x": normals(ROWS, WIDTH), "labels": integers(CLASSES, ROWS)}


@cache
def compiled() -> Step:
    """Return a step of plain torch.compile."""
    model = make()
    model.compile()
    train_step(model, batch())
    return train_step(model, batch())


@cache
def ahead() -> memopt.Plan:
    """Return the plan of a step with nothing recomputed, made on fake tensors."""
    model = memopt.optimize(make(), 1000, example_inputs=batch(), backend="inductor", **MODE)
    return memopt.plan_of(model)


def budget(share: float) -> float:
    """Return a budget in GB, between the smallest that works (0) and the peak with nothing recomputed (1)."""
    smallest = ahead().smallest_gb()
    return smallest + share * (ahead().plain_peak_gb - smallest)


def check(step: Step, plain: Step, plan: memopt.Plan, budget_gb: float) -> None:
    assert_equal(step, plain, ROUNDING)
    assert step.peak_bytes <= budget_gb * GIB
    assert step.peak_bytes <= plan.predicted_peak_bytes <= 1.02 * step.peak_bytes


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    gc.collect()


@pytest.mark.slow  # a minute of compiling each
@pytest.mark.parametrize("share", [1.0, 0.5, 0.15])
def test_budgets_are_kept_and_gradients_are_those_of_torch_compile(share: float) -> None:
    model = memopt.optimize(make(), budget(share), backend="inductor", **MODE)
    step = train_step(model, batch())
    plan = memopt.plan_of(model)
    check(step, compiled(), plan, budget(share))
    assert plan.regions[0].fingerprint == ahead().regions[0].fingerprint, "fakes capture another graph"
    assert (plan.added_time > 0) == (share < 1)
    assert step.peak_bytes < compiled().peak_bytes


@pytest.mark.slow
def test_gradients_are_added_within_the_compiled_backward() -> None:
    model = memopt.optimize(make(), budget(0.6) + ahead().account.gradients / GIB, backend="inductor", **MODE)
    train_step(model, batch())
    once = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    inputs = batch()
    torch.manual_seed(0)
    gc.collect()
    with memopt.measure_peak("cpu") as peak:
        model(**inputs).backward()
    plan = memopt.plan_of(model)
    held = sum(gradient.numel() * 4 for gradient in once.values())
    assert plan.account.gradients_held
    assert peak.allocated_bytes + own_bytes(model, inputs) + held <= plan.predicted_peak_bytes <= plan.budget_bytes
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, 2 * once[name], rtol=1e-5, atol=1e-7)


class AgainstZeros(nn.Module):
    """A loss whose subtraction of zeros inductor removes from the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).sigmoid()
        return F.mse_loss(y, torch.zeros_like(y))


def test_an_operator_that_inductor_replaces_remains_in_the_forward() -> None:
    model, inputs = AgainstZeros().train(), {"x": normals(16, 32)}
    plain = train_step(model, inputs)
    memopt.optimize(model, 1, backend="inductor", **MODE)
    assert_equal(train_step(model, inputs), plain, ROUNDING)


@pytest.mark.slow
def test_refusals_leave_the_model_plain() -> None:
    model = make()
    with pytest.raises(memopt.BudgetError, match="smallest that works"):
        memopt.optimize(model, 0.9 * ahead().smallest_gb(), example_inputs=batch(), backend="inductor", **MODE)
    assert model._compiled_call_impl is None
    with pytest.raises(ValueError, match="backend must be one of 'auto', 'aten', 'inductor', not 'triton'"):
        check_options(1, backend="triton")


def test_cuda_graphs_are_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever turns them on for all of inductor is told that training calls have none, and inductor makes none."""
    import torch._inductor.config as inductor_config

    asked = []
    add_fallbacks = inductor.make_fallbacks_known

    def make_fallbacks_known(half: torch.fx.GraphModule, **options: bool) -> None:
        asked.append(inductor_config.triton.cudagraphs)
        add_fallbacks(half, **options)

    monkeypatch.setattr(inductor, "make_fallbacks_known", make_fallbacks_known)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
    memopt.optimize(model, 1000, backend="inductor", **MODE)
    with inductor_config.patch({"triton.cudagraphs": True}), pytest.warns(UserWarning, match="without CUDA graphs"):
        model(normals(ROWS, WIDTH))
    assert inductor.NO_CUDA_GRAPHS in memopt.plan_of(model).notes
    assert asked == [False, False]


def test_other_calls_run_the_plain_model() -> None:
    model = memopt.optimize(make(), 1, backend="inductor", **MODE)
    plain = make().eval()
    with torch.no_grad():
        assert torch.equal(model.eval()(**batch()), plain(**batch()))
    assert copy.deepcopy(model)._compiled_call_impl is None
    assert memopt.remove(model)._compiled_call_impl is None


class Breaking(nn.Module):
    """A model of blocks with a graph break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        torch._dynamo.graph_break()
        return self.second(x).square().mean()


def test_the_regions_of_a_broken_forward_are_compiled() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Breaking().train()
    inputs = {"x": normals(ROWS, WIDTH)}
    plain = train_step(model, inputs)
    memopt.optimize(model, 1, backend="inductor", **MODE)
    step = train_step(model, inputs)
    for name, gradient in plain.gradients.items():
        torch.testing.assert_close(step.gradients[name], gradient, rtol=ROUNDING, atol=ROUNDING)
    captured = memopt.plan_of(model).captured
    assert captured is not None
    assert [region.fused for region in captured.regions] == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "share"), itertools.product(["gpt2-sdpa", "llama", "bert", "vit", "resnet"], [1.0, 0.5, 0.15])
)
def test_families(name: str, share: float) -> None:
    family = BY_NAME[name]
    model, inputs = family.make(), {key: torch.cat([value] * 4) for key, value in family.batch("usual").items()}
    with restored_buffers(model):
        model.compile()
        train_step(model, inputs)
    with restored_buffers(model):
        plain = train_step(model, inputs)
    model._compiled_call_impl = None
    memopt.optimize(model, 1000, example_inputs=inputs, backend="inductor", **MODE)
    roomy = memopt.plan_of(model)
    budget_gb = roomy.smallest_gb() + share * (roomy.plain_peak_gb - roomy.smallest_gb())
    memopt.optimize(model, budget_gb, backend="inductor", **MODE)
    with restored_buffers(model):
        step = train_step(model, inputs)
    scale = max(float(gradient.abs().max()) for gradient in plain.gradients.values())
    for key, gradient in step.gradients.items():
        torch.testing.assert_close(gradient, plain.gradients[key], rtol=1e-3, atol=1e-5 * scale)
    assert step.peak_bytes <= min(budget_gb * GIB, memopt.plan_of(model).predicted_peak_bytes)


class Attending(nn.Module):
    """Residual blocks of causal attention without dropout."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(depth))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for block in self.blocks:
            q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in block(x).sin().chunk(3, dim=-1))
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.slow
def test_attention_without_dropout_is_recomputed() -> None:
    """It draws no random numbers, though torch marks its operator as random; inductor fails on a saved generator."""
    torch.manual_seed(0)
    plain = Attending().train()
    given = {"x": normals(4, 64, WIDTH), "labels": integers(CLASSES, 4, 64)}
    model = copy.deepcopy(plain)
    with random_schedules(random.Random(0)):
        memopt.optimize(model, 1, example_inputs=given, backend="inductor", **MODE)
        ours = train_step(model, given)
    (region,) = memopt.plan_of(model).regions
    evaluated = [name for name in region.evaluations if "scaled_dot_product" in name and "backward" not in name]
    assert len(evaluated) > len(set(evaluated)) == 4
    assert_equal(ours, train_step(plain, given), ROUNDING)


@pytest.mark.slow
@pytest.mark.plans_always
def test_what_compiled_code_of_changing_sizes_holds_is_predicted() -> None:
    """The dry run of the code takes the largest sizes that its plan has room for."""
    gc.collect()
    gc.freeze()  # what tests before this one keep would count as resident
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with warnings.catch_warnings(record=True) as said:
        memopt.optimize(model, 0.004, optimizer=optimizer, backend="inductor", precision="fp32")
        for rows in (384, 256, 320, 384):
            batch = torch.randn(rows, 64)
            with memopt.measure_peak("cpu") as peak:
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
    assert not [warning for warning in said if "inductor's code" in str(warning.message)]
    plan = memopt.plan_of(model)
    assert any("≤ 384" in note for note in plan.notes), "one plan for all sizes"
    assert 0 <= plan.ceiling_bytes - peak.bytes <= 2**17
