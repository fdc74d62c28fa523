"""Language models with a large vocabulary: default options, real loops, outputs computed on demand."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from examples.models import language_models
from examples.models.language_models import SMALL_CONFIGS, Batch, dropping, holding, peak_bytes
from memopt.errors import GIB
from tests.elsewhere import counted  # noqa: F401
from tests.marks import slow
from tests.smallest import smallest_gb

pytestmark = pytest.mark.plans_always  # the plain steps would fit

SLOW = pytest.mark.slow
EACH = ["gpt2", *(pytest.param(name, marks=SLOW) for name in ("opt", "qwen3", "gemma2"))]
EXACT: dict[str, Any] = {"precision": "fp32", "allow": {"recompute", "reinplace"}}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "an output of the model was read")
        yield


def make(name: str) -> tuple[nn.Module, Batch]:
    return language_models.make(SMALL_CONFIGS[name](), samples=4, length=96)


def train_step(model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer) -> None:
    memopt.TrainStep(model, optimizer, max_grad_norm=None)(batch)


@pytest.mark.parametrize("name", EACH)
@pytest.mark.slow
def test_the_peak_is_predicted_in_every_loop(name: str) -> None:
    """Nothing is counted that nobody holds, and what is held is counted."""
    model, batch = make(name)
    memopt.optimize(model, 1.01 * smallest_gb(model, batch))
    for loop in (train_step, dropping, holding):
        optimizer = torch.optim.AdamW(model.parameters())
        measured = peak_bytes(model, batch, [partial(loop, model, batch, optimizer)] * 2)
        plan = memopt.plan_of(model)
        assert "chunked_loss" in plan.levers
        assert measured <= plan.predicted_peak_bytes <= 1.01 * measured


@pytest.mark.usefixtures("counted")
@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
def test_the_peak_is_predicted_for_the_optimiser_that_is_there(fused: bool) -> None:
    """As the Trainer of transformers makes it: matrices alone are decayed, so that the head is stepped after another
    matrix, whose temporaries are still there, and by default fused."""
    model, batch = make("qwen3")
    memopt.optimize(model, 1.01 * smallest_gb(model, batch))
    groups = [[p for p in model.parameters() if (p.dim() > 1) is matrix] for matrix in (True, False)]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], fused=fused)
    measured = peak_bytes(model, batch, [partial(dropping, model, batch, optimizer)] * 2)
    assert measured <= memopt.plan_of(model).predicted_peak_bytes <= 1.01 * measured


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("late", [slow(False), True])
def test_a_loop_that_reads_logits_is_bitwise_the_plain_one(name: str, late: bool) -> None:
    """Dropout included; `late`: logits are read after the backward."""

    def train(model: nn.Module, batch: Batch) -> list[Tensor]:
        torch.manual_seed(1)
        optimizer = torch.optim.AdamW(model.parameters())
        found = []
        for _ in range(2):
            outputs = model(**batch)
            accuracy = None if late else (outputs.logits.argmax(-1) == batch["labels"]).float().mean()
            outputs.loss.backward()
            if late:
                accuracy = (outputs.logits.argmax(-1) == batch["labels"]).float().mean()
            found += [
                outputs.loss.detach(),
                accuracy,
                outputs.logits.detach(),
                outputs.past_key_values.layers[-1].keys.clone(),
            ]
            optimizer.step()
            optimizer.zero_grad()
        return [*found, *model.parameters()]

    model, batch = make(name)
    plain = copy.deepcopy(model)
    memopt.optimize(model, 1.0, **EXACT)
    for ours, theirs in zip(train(model, batch), train(plain, batch), strict=True):
        assert torch.equal(ours, theirs)


def test_a_loss_outside_of_the_model_gets_real_logits() -> None:
    model, batch = make("gpt2")
    memopt.optimize(model, 1.0, **EXACT)
    logits = model(batch["input_ids"]).logits
    assert type(logits) is Tensor
    nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_tuples() -> None:
    model, batch = make("gpt2")
    plain = copy.deepcopy(model)
    memopt.optimize(model, 1.0, **EXACT)
    found = []
    for one in (model, plain):
        torch.manual_seed(1)
        loss, logits, *_ = one(**batch, return_dict=False)
        found.append((loss, logits.log_softmax(-1)))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


@pytest.mark.slow
def test_under_autocast_the_value_is_that_of_the_forward() -> None:
    model, batch = make("gpt2")
    model.config.resid_pdrop = 0.0
    plain = copy.deepcopy(model)
    memopt.optimize(model, 1.0, **EXACT)
    found = []
    for one in (model, plain):
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = one(**batch)
        found.append(outputs.logits)
    assert found[0].dtype == torch.bfloat16
    assert torch.equal(*found) or (found[0] - found[1]).abs().max() < 0.05


@pytest.mark.slow
def test_in_bf16_it_has_the_plain_dtype() -> None:
    model, batch = make("gpt2")
    plain = copy.deepcopy(model)
    memopt.optimize(model, 1.0, precision="bf16")
    torch.manual_seed(1)
    expected = plain(**batch).logits
    torch.manual_seed(1)
    logits = model(**batch).logits
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, rtol=0.1, atol=0.05)


class Parts(nn.Module):
    """Returns a matrix as a tuple of its rows or columns, which are views of it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4))
        self.dim = dim

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        for layer in self.layers:
            x = x + layer(x)
        return x.split(1, self.dim)


@pytest.mark.parametrize("dim", [0, 1])
def test_the_gradients_of_outputs_that_are_views_are_as_large_as_these(dim: int) -> None:
    """Not as large as the matrix, each."""
    plain, x = Parts(dim), torch.randn(256, 32)
    model = copy.deepcopy(plain)

    def step_bytes(of: nn.Module) -> int:
        of.zero_grad()
        with memopt.measure_peak("cpu") as peak:
            torch.stack([part.square().mean() for part in of(x)]).sum().backward()
        return peak.allocated_bytes

    budget = 0.7 * max(step_bytes(plain), step_bytes(plain))
    held = sum(tensor.nbytes for tensor in (*model.parameters(), x))
    memopt.optimize(model, (held + budget) / GIB, optimizer=None, elsewhere_gb=0, **EXACT)
    assert max(step_bytes(model), step_bytes(model)) <= budget
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]
