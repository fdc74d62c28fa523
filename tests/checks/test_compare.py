"""`memopt.compare`: what it finds, and that it leaves no trace."""

from __future__ import annotations

import contextlib
import copy
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.checks.comparison import Comparison, Difference, StepRun
from memopt.checks.reference import Accuracies, Accuracy, GradientError

WIDTH = 64
Batch = tuple[Tensor, Tensor]


class Net(nn.Module):
    """Has all that a step touches: dropout, a counted buffer, running statistics, a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(3)
        )
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.mse_loss(self.norm(x), y)


class Body(nn.Sequential):
    """The same without its loss."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


@pytest.fixture
def batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(256, WIDTH, generator=generator), torch.randn(256, WIDTH, generator=generator)


def tight(model: nn.Module, batch: Any, **options: Any) -> nn.Module:
    """The model, optimised for a budget just above the smallest."""
    plan = memopt.plan(model, 1, batch, precision="fp32", allow={"recompute"}, **options)
    return memopt.optimize(model, plan.smallest_gb() * 1.02, precision="fp32", allow={"recompute"}, **options)


def test_the_optimised_step_is_the_plain_one(batch: Batch) -> None:
    model = tight(Net(), batch)
    found = memopt.compare(model, batch)
    assert found.bitwise
    assert found.loss_error == 0
    assert memopt.plan_of(model).added_seconds > 0
    assert [difference.name for difference in found.gradients] == [name for name, _ in model.named_parameters()]
    assert [difference.name for difference in found.buffers] == [name for name, _ in model.named_buffers()]
    assert found.optimized.peak_bytes < found.plain.peak_bytes
    assert found.plain.seconds > 0


def test_a_batch_by_keywords_and_one_with_a_loss_function(batch: Batch) -> None:
    x, y = batch
    assert memopt.compare(tight(Net(), {"x": x, "y": y}), {"x": x, "y": y}).bitwise
    with_loss = tight(Body(), batch, loss_fn=nn.functional.mse_loss)
    found = memopt.compare(with_loss, batch)
    assert found.bitwise
    assert len(found.gradients) == 4


def fingerprint(model: nn.Module) -> list[bytes]:
    state = [value.numpy().tobytes() for value in model.state_dict().values()]
    return [
        *state,
        torch.get_rng_state().numpy().tobytes(),
        repr(np.random.get_state()).encode(),
        repr(random.getstate()).encode(),
    ]


def fails_in_plain_step(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ArithmeticError("in the middle")

    call: Any = model._compiled_call_impl
    monkeypatch.setattr(call.forward, "plain", fail)


@pytest.mark.parametrize("spoil", [None, fails_in_plain_step])
def test_nothing_is_left_behind(
    batch: Batch, spoil: Callable[..., None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tight(Net(), batch)
    gradients = {name: torch.ones_like(parameter) for name, parameter in model.named_parameters()}
    gradients.pop("norm.bias")
    for name, gradient in gradients.items():
        model.get_parameter(name).grad = gradient
    buffers = dict(model.named_buffers())
    before = fingerprint(model)
    if spoil is not None:
        spoil(model, monkeypatch)
        with pytest.raises(ArithmeticError, match="in the middle"):
            memopt.compare(model, batch)
    else:
        assert memopt.compare(model, batch).bitwise
    assert fingerprint(model) == before
    assert dict(model.named_buffers()).keys() == buffers.keys()
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
    assert all(parameter.grad is gradients.get(name) for name, parameter in model.named_parameters())
    assert all(bool((gradient == 1).all()) for gradient in gradients.values())


def test_what_is_kept_aside_does_not_count(batch: Batch) -> None:
    model = tight(Net(), batch)
    alone = memopt.compare(model, batch)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    beside = memopt.compare(model, batch)
    assert beside.plain.peak_bytes == pytest.approx(alone.plain.peak_bytes, abs=4096)
    assert beside.optimized.peak_bytes == pytest.approx(alone.optimized.peak_bytes, abs=4096)


def test_what_cannot_be_compared(batch: Batch) -> None:
    with pytest.raises(ValueError, match=r"this Net is not optimised; call memopt\.optimize first"):
        memopt.compare(Net(), batch)
    model = memopt.optimize(Net(), 1, precision="fp32", allow={"recompute"})
    with pytest.raises(ValueError, match=r"in eval mode.*call model.train\(\) first"):
        memopt.compare(model.eval(), batch)
    handle = model.train().get_parameter("norm.bias").register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(ValueError, match=r"post-accumulate-grad hook of norm\.bias may change the model"):
        memopt.compare(model, batch)
    handle.remove()
    with pytest.raises(TypeError, match="must be a tuple"):
        memopt.compare(model, 3)
    with pytest.raises(ValueError, match="the loss must be a scalar, but its shape is"):
        memopt.compare(memopt.optimize(Body(), 1, outputs="all", precision="fp32", allow={"recompute"}), batch[:1])


def test_a_budget_too_small_passes_through(batch: Batch) -> None:
    model = memopt.optimize(Net(), 1e-4, precision="fp32", allow={"recompute"})
    before = fingerprint(model)
    with pytest.raises(memopt.BudgetError, match="too small"):
        memopt.compare(model, batch)
    assert fingerprint(model) == before


@pytest.mark.parametrize(
    ("optimized", "plain", "absolute", "relative", "bitwise"),
    [
        (torch.ones(2), torch.ones(2), 0, 0, True),
        (torch.tensor([math.nan]), torch.tensor([math.nan]), 0, 0, True),
        (torch.tensor(0.0), torch.tensor(-0.0), 0, 0, False),
        (torch.tensor([1.0, 4.5]), torch.tensor([1.0, 4.0]), 0.5, 0.125, False),
        (torch.tensor([1, 2]), torch.tensor([1, 4]), 2, 0.5, False),
        (torch.tensor([1j]), torch.tensor([2j]), 1, 0.5, False),
        (torch.tensor([math.nan]), torch.ones(1), math.inf, math.inf, False),
        (torch.ones(1), torch.zeros(1), 1, math.inf, False),
        (None, torch.ones(1), math.inf, math.inf, False),
    ],
)
def test_a_difference(
    optimized: Tensor | None, plain: Tensor | None, absolute: float, relative: float, bitwise: bool
) -> None:
    assert Difference.of("w", optimized, plain) == Difference("w", absolute, relative, bitwise)


def test_the_table_names_the_worst() -> None:
    run = StepRun(loss=2.5, peak_bytes=3 * 1024**2, seconds=0.25)
    off = Difference("layers.3.weight", 1e-6, 2e-5, False)
    errors = Accuracies("fp32", 2.5, None, None, Accuracy(0.1, 0.0, ()))
    differences = (Difference("w", 0, 0, True), off)
    found = Comparison(run, StepRun(2.75, 2 * 1024**2, 0.3), differences, (), 2 * 1024**2, errors)
    assert not found.bitwise
    assert found.loss_error == 0.25
    assert found.worst == off
    assert "of 2 gradients and 0 buffers 1 differ, the losses by 0.25" in str(found)
    assert "layers.3.weight" in found.table()
    assert "150.0%" in found.table()
    assert "bitwise equal: the loss, 0 gradients and 0 buffers" in str(
        Comparison(run, run, (), (), 2 * 1024**2, errors)
    )


class Odd(nn.Module):
    """Draws in several ways, and computes in fp32 whatever it is given; no norm, so that masks count in full."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        noise = torch.randn_like(x) + torch.rand(x.shape, dtype=x.dtype)
        x = nn.functional.dropout(self.layer(x + noise).float(), 0.3).to(x.dtype)
        keep = torch.bernoulli(torch.full((len(x), 1), 0.8, dtype=x.dtype))
        return nn.functional.mse_loss(self.head((x * keep).float().softmax(-1, dtype=torch.float32)), y)


@pytest.mark.parametrize("make", [Net, Odd])
def test_the_reference_is_the_same_step_in_float64(make: type[nn.Module], batch: Batch) -> None:
    model = memopt.optimize(make(), 1, optimizer=None, precision="fp32", allow={"recompute"})
    before = fingerprint(model)
    found = memopt.compare(model, batch)
    assert fingerprint(model) == before
    assert found.notes == ()
    known = found.accuracies
    assert known is not None
    assert known.reference == "float64"
    assert known.plain is not None
    assert known.plain == known.optimized
    assert 0 < known.plain.gradient < 1e-5
    assert known.plain.loss < 1e-6
    assert known.autocast is None
    assert found.autocast is None


def test_the_reference_by_hand() -> None:
    torch.manual_seed(0)
    model, inputs = Body(), (torch.randn(32, WIDTH), torch.randn(32, WIDTH))
    twin = copy.deepcopy(model).double()
    nn.functional.mse_loss(twin(inputs[0].double()), inputs[1].double()).backward()
    exact = {name: each.grad for name, each in twin.named_parameters()}
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.mse_loss(model(inputs[0]), inputs[1])
    loss.backward()
    expected = {name: float((each.grad - exact[name]).norm() / exact[name].norm()) for name, each in named(model)}
    memopt.optimize(model, 1, loss_fn=nn.functional.mse_loss, optimizer=None, precision="bf16")
    found = memopt.compare(model, inputs)
    assert found.accuracies is not None
    assert found.accuracies.autocast is not None
    assert {error.name: error.relative for error in found.accuracies.autocast.gradients} == pytest.approx(expected)
    worst = found.accuracies.autocast.worst
    assert worst is not None
    assert worst.relative == max(error.relative for error in found.accuracies.autocast.gradients)
    assert found.accuracies.optimized.gradient < 1.15 * found.accuracies.autocast.gradient
    assert "torch.autocast bf16" in found.table()
    assert "Gradients against float64" in found.table()


def named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters())


def test_fp16_is_compared_with_its_loss_scaled(batch: Batch) -> None:
    x, y = batch
    model = memopt.optimize(Body(), 1, loss_fn=tiny_loss, optimizer=None, precision="fp16")
    found = memopt.compare(model, (x, y))
    assert found.optimized.loss_scale == 65536
    assert found.accuracies is not None
    assert found.accuracies.autocast is not None
    assert found.accuracies.optimized.gradient < 1e-2, "unscaled, its gradients would be zeros"
    model = memopt.optimize(Body(), 1, loss_fn=huge_loss, optimizer=None, precision="fp16")
    found = memopt.compare(model, (x, y))
    assert found.optimized.loss_scale < 65536
    assert found.plain.loss_scale == 1
    assert found.accuracies is not None
    assert found.accuracies.optimized.gradient < 1e-2
    assert "loss scale" in found.table()


def tiny_loss(output: Tensor, target: Tensor) -> Tensor:
    return 1e-5 * nn.functional.mse_loss(output, target)


def huge_loss(output: Tensor, target: Tensor) -> Tensor:
    return 1e5 * nn.functional.mse_loss(output, target)


class RefusesFloat64(Body):
    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            raise TypeError("no kernel for doubles")
        return super().forward(x)


def test_where_float64_does_not_do(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    model = memopt.optimize(RefusesFloat64(), 1, loss_fn=nn.functional.mse_loss, optimizer=None, precision="bf16")
    found = memopt.compare(model, batch)
    assert found.accuracies is not None
    assert found.accuracies.reference == "fp32"
    assert found.accuracies.plain is None
    assert found.accuracies.optimized.gradient > 0
    why = "since it does not run in float64: no kernel for doubles"
    assert found.notes == (f"errors are against the plain run in fp32, {why}",)
    assert why in found.table()
    with pytest.raises(ValueError, match=r"no float64 reference, .* no kernel for doubles; compare with reference='fp"):
        memopt.compare(model, batch, reference="float64")
    with pytest.raises(ValueError, match="reference must be one of 'auto', 'float64', 'fp32', not 'fp64'"):
        memopt.compare(model, batch, reference="fp64")
    monkeypatch.setattr("memopt.device.cpu._available", lambda: 1000)
    found = memopt.compare(model, batch)
    assert "a run in float64 would hold" in found.notes[0]
    assert "1000 B are free" in found.notes[0]
    assert memopt.compare(model, batch, reference="fp32").notes == ()


def test_an_accuracy() -> None:
    exact = {"w": torch.tensor([3.0, 4.0]), "gone": torch.zeros(1)}
    found = Accuracy.of(2.5, {"w": torch.tensor([3.0, 4.5]), "new": torch.zeros(0)}, 2.0, exact)
    assert found.loss == 0.25
    assert found.gradient == math.inf
    missing = [GradientError(name, math.inf, math.inf) for name in ("gone", "new")]
    assert found.gradients == (GradientError("w", 0.1, 0.125, 1.0), *missing)
    assert found.worst == missing[0]
    assert Accuracy.of(math.nan, {"w": torch.tensor([math.nan])}, 1.0, {"w": torch.ones(1)}).gradient == math.inf


def test_a_zero_with_rounding_is_not_the_worst() -> None:
    exact = {"zero": torch.full((1,), 1e-17), "w": torch.tensor([3.0, 4.0])}
    found = Accuracy.of(2.0, {"zero": torch.full((1,), 1e-9), "w": torch.tensor([3.0, 4.5])}, 2.0, exact)
    assert [error.name for error in found.worst_first] == ["w", "zero"]
    assert found.gradient == pytest.approx(0.1)


class Inverted(nn.Module):
    """The pseudo-inverse of complex numbers, whose kernel computes other values under a dispatch mode."""

    def __init__(self) -> None:
        super().__init__()
        self.mixing = nn.Parameter(torch.randn(8, 5, dtype=torch.complex64))

    def forward(self, signal: Tensor) -> Tensor:
        return torch.view_as_real(signal @ torch.linalg.pinv(self.mixing).mT).tanh().sum(-1).square().mean()


def test_the_first_run_of_a_graph_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    signal = torch.randn(64, 8, dtype=torch.complex64)
    for mended in (True, False):
        if not mended:
            monkeypatch.setattr("memopt.emit.emit.first_runs_as_later_ones", contextlib.nullcontext)
        model = memopt.optimize(Inverted(), 1, precision="fp32", allow={"recompute"})
        found = memopt.compare(model, signal)
        assert found.bitwise == mended
        assert (found.loss_error == 0) == mended
        assert any("first run" in note for note in found.notes) != mended
        assert found.accuracies is not None
        assert (found.accuracies.optimized.gradient < 1e-4) == mended
