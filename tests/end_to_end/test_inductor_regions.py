"""A forward that breaks into regions, through inductor: each region is compiled, and what the code holds is counted."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memopt
from memopt.errors import GIB
from tests.elsewhere import counted

__all__ = ["counted"]
pytestmark = pytest.mark.plans_always
WIDTH, ROWS, CLASSES = 96, 512, 16


class Breaking(nn.Module):
    """Residual blocks of a normalisation, a product, an activation and a product, with eager code in the middle."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.first, self.second = _blocks(depth), _blocks(depth)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = between(self.first(x))
        return F.cross_entropy(self.head(self.second(x)), labels)


@torch.compiler.disable
def between(x: Tensor) -> Tensor:
    """Eager code that holds eight times its argument while it runs, and as much as that afterwards."""
    return x + 0.1 * x.detach().repeat(8, 1).view(8, *x.shape).cumsum(0)[-1] * x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + added


def _blocks(depth: int) -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(depth)))


def trained(model: nn.Module, call: nn.Module, rows: tuple[int, ...]) -> tuple[list[float], int]:
    """The losses of steps with batches of so many rows, and the peak of the last step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step, number in enumerate(rows):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(number, WIDTH, generator=generator)
        labels = torch.randint(CLASSES, (number,), generator=generator)
        with memopt.measure_peak("cpu") as peak:
            optimizer.zero_grad()
            loss = call(x, labels)
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    return losses, peak.bytes


@pytest.mark.slow  # compiles a step
@pytest.mark.parametrize("rows", [(ROWS, ROWS, ROWS), (ROWS, ROWS // 2, ROWS)], ids=["one size", "sizes"])
def test_a_forward_that_breaks_is_compiled_in_regions_within_the_budget(rows: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = Breaking()
    plain = copy.deepcopy(model)
    losses, peak = trained(plain, plain, rows)
    peak -= sum(parameter.nbytes for parameter in model.parameters())  # which lie beside
    result = [parameter.tolist() for parameter in plain.parameters()]  # no tensors: they would lie beside the step
    del plain
    gc.collect()
    lasting = 4 * sum(parameter.nbytes for parameter in model.parameters())
    budget = lasting + (peak - lasting) // 2
    optimized = memopt.optimize(model, budget_gb=budget / GIB, backend="inductor", precision="fp32")
    found, planned_peak = trained(model, optimized, rows)
    assert found == pytest.approx(losses, rel=1e-5)
    plan = memopt.plan_of(optimized)
    assert plan.captured is not None
    assert len(plan.captured.regions) == 2
    assert [region.fused for region in plan.captured.regions] == [True] * 2
    assert planned_peak <= budget
    for mine, theirs in zip(model.parameters(), result, strict=True):
        torch.testing.assert_close(mine, torch.tensor(theirs), rtol=1e-3, atol=1e-4)


@pytest.mark.slow  # compiles a step
@pytest.mark.usefixtures("counted")
def test_the_budget_that_a_refusal_names_works() -> None:
    torch.manual_seed(0)
    model = Breaking()
    with pytest.raises(memopt.BudgetError) as refused:
        trained(model, memopt.optimize(model, budget_gb=0.001, backend="inductor", precision="fp32"), (ROWS,))
    named = refused.value.smallest_bytes
    del refused  # its traceback holds the batch
    gc.collect()
    optimized = memopt.optimize(model, budget_gb=named / GIB, backend="inductor", precision="fp32")
    _, peak = trained(model, optimized, (ROWS, ROWS, ROWS))
    assert peak <= named


class Scaled(nn.Module):
    """A residual block that breaks the graph, scaled by a Python float of its own."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(WIDTH, WIDTH), scale

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * between(self.inner(x)).sin()


def scaled() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Scaled(1.5), Scaled(0.5), Scaled(0.25))


@pytest.mark.slow  # compiles a step
def test_floats_that_differ_among_regions_are_compiled_as_inputs() -> None:
    """Torch takes such a float for an input of the region. It asked for another capture when the region was compiled,
    which is not done within Dynamo."""
    model, plain, x = scaled(), scaled(), torch.randn(64, WIDTH)
    memopt.optimize(model, 1.0, example_inputs=(x,), backend="inductor", precision="fp32")
    for scale in (1.5, 0.7):
        for one in (model, plain):
            one[0].scale = scale  # type: ignore[index,union-attr]
            one(x).square().mean().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    captured = memopt.plan_of(model).captured
    assert captured is not None
    assert all(region.fused for region in captured.regions)


class Gated(nn.Module):
    """Two products, of which the loss reaches the first only."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            gate = self.gate(x).sigmoid()
        return (self.inner(x) * gate).square().mean()


@pytest.mark.slow  # compiles a step
def test_hooks_of_parameters_that_get_no_gradient_are_not_called() -> None:
    model, x = Gated(), torch.randn(64, WIDTH)
    called: list[Tensor] = []
    model.gate.weight.register_hook(called.append)
    memopt.optimize(model, 1.0, example_inputs=(x,), backend="inductor", precision="fp32")
    model(x).backward()
    assert not called
    assert model.inner.weight.grad is not None
