"""Budgets that refusals name in the middle of a training: they serve all that came before, too."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from memopt.errors import GIB
from tests.elsewhere import counted

__all__ = ["counted"]
EXACT: dict[str, Any] = {
    "precision": "fp32", "allow": {"recompute", "reinplace"}, "optimizer": torch.optim.SGD, "elsewhere_gb": 0.0
}  # fmt: skip


class Tasks(nn.Module):
    """A backbone with two heads; each call has labels for some of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [(nn.Linear(64, 1024), nn.Tanh(), nn.Linear(1024, 64)) for _ in range(3)]
        self.backbone = nn.Sequential(*(layer for some in layers for layer in some))
        self.small, self.large = nn.Linear(64, 4), nn.Linear(64, 512)

    def forward(self, x: torch.Tensor, labels: dict[str, torch.Tensor]) -> torch.Tensor:
        h = self.backbone(x)
        losses = [(getattr(self, name)(h) - label).square().mean() for name, label in labels.items()]
        return torch.stack(losses).sum()


def train(budget_gb: float) -> int:
    """Train with the backbone frozen at first, for several kinds of labels; returns the steps that were done."""
    model = Tasks().train()
    memopt.optimize(model, budget_gb, **EXACT)
    few, many = {"small": torch.rand(512, 4)}, {"small": torch.rand(512, 4), "large": torch.rand(512, 512)}
    model.backbone.requires_grad_(False)
    done = 0
    try:
        for labels in (few, many, few, many):
            model.backbone.requires_grad_(done > 1)
            model(torch.rand(512, 64), labels).backward()
            model.zero_grad()
            done += 1
    except memopt.BudgetError as refused:
        refused.done = done  # type: ignore[attr-defined]
        raise
    return done


@pytest.mark.slow
def test_a_budget_named_in_mid_run_serves_calls_with_other_arguments_that_came_before() -> None:
    model, few = Tasks().train(), {"small": torch.rand(512, 4)}
    with pytest.raises(memopt.BudgetError) as for_few:
        memopt.optimize(model, 1e-4, **EXACT)(torch.rand(512, 64), few)
    with pytest.raises(memopt.BudgetError, match="calls with other arguments") as refused:
        train(0.97 * for_few.value.smallest_gb)
    assert refused.value.done == 2  # type: ignore[attr-defined]
    assert train(refused.value.smallest_gb) == 4


def named(train: Callable[[float], int], budget_gb: float) -> float:
    """The budget that the refusal of a training names. Its frames, which hold the model, are gone."""
    try:
        train(budget_gb)
    except memopt.BudgetError as refused:
        return refused.smallest_gb
    raise AssertionError("it fits")


class CenterLoss(nn.Module):
    """A loss with weights of its own: a centre for each class."""

    def __init__(self) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.randn(2000, 64))

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (features - self.centers[labels]).square().mean()


def train_with_centers(budget_gb: float | None) -> int:
    """Train a model and a loss with weights by one optimiser; returns the peak in bytes."""
    gc.collect()
    torch.manual_seed(0)
    model, loss_of = Tasks().backbone.train(), CenterLoss()
    optimizer = torch.optim.SGD([*model.parameters(), *loss_of.parameters()], 0.1, momentum=0.9)
    if budget_gb is not None:
        memopt.optimize(model, budget_gb, precision="fp32", allow={"recompute"}, optimizer=optimizer)
    with memopt.measure_peak() as peak:
        for _ in range(3):
            loss = loss_of(model(torch.rand(256, 64)), torch.randint(0, 2000, (256,)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            del loss
    return peak.bytes


@pytest.mark.slow
@pytest.mark.usefixtures("counted")
def test_a_named_budget_has_room_for_the_gradients_of_parameters_that_the_optimizer_steps_beside_the_model() -> None:
    plain = train_with_centers(None)
    budget = named(train_with_centers, 0.5 * plain / GIB)
    assert train_with_centers(budget) <= budget * GIB


def train_on_two_losses(budget_gb: float | None) -> int:
    """Two losses with a backward each, the first of which keeps the graph; returns the peak in bytes."""
    gc.collect()
    torch.manual_seed(0)
    hidden = [layer for _ in range(3) for layer in (nn.Linear(128, 128), nn.ReLU())]
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), *hidden, nn.Linear(128, 11)).train()
    optimizer = torch.optim.Adam(model.parameters())
    if budget_gb is not None:
        memopt.optimize(model, budget_gb, precision="fp32", allow={"recompute"}, optimizer=optimizer)
    with memopt.measure_peak() as peak:
        for _ in range(3):
            output = model(torch.rand(1024, 64))
            first = nn.functional.cross_entropy(output[:, :10], torch.randint(0, 10, (1024,)))
            second = output[:, 10].square().mean()
            first.backward(retain_graph=True)
            second.backward()
            optimizer.step()
            optimizer.zero_grad()
            del output, first, second
    return peak.bytes


@pytest.mark.slow
@pytest.mark.usefixtures("counted")
def test_a_budget_named_for_a_graph_that_is_kept_works_and_is_about_what_the_plain_step_takes() -> None:
    plain = train_on_two_losses(None)
    budget = named(train_on_two_losses, 0.9 * plain / GIB)  # a step that keeps no graph has room in it
    assert budget * GIB <= 1.04 * plain
    assert train_on_two_losses(budget) <= budget * GIB


def train_against_perturbations(budget_gb: float | None) -> int:
    """Adversarial training as by PGD: the inputs have gradients, which stay; returns the peak in bytes."""
    gc.collect()
    torch.manual_seed(0)
    hidden = [layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh())]
    model = nn.Sequential(nn.Linear(256, 64), nn.Tanh(), *hidden, nn.Linear(64, 2)).train()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if budget_gb is not None:
        memopt.optimize(model, budget_gb, precision="fp32", allow={"recompute"}, optimizer=optimizer)
    x, y = torch.rand(1024, 256), torch.randint(0, 2, (1024,))
    with memopt.measure_peak() as peak:
        for _ in range(3):
            delta = torch.zeros_like(x).uniform_(-0.1, 0.1).requires_grad_()
            for _ in range(2):
                nn.functional.cross_entropy(model(x + delta), y).backward()
                delta.data = (delta + 0.01 * delta.grad.sign()).clamp(-0.1, 0.1)
                delta.grad.zero_()
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x + delta.detach()), y).backward()
            optimizer.step()
    return peak.bytes


@pytest.mark.slow
@pytest.mark.usefixtures("counted")
def test_a_named_budget_has_room_for_the_gradients_of_inputs() -> None:
    plain = train_against_perturbations(None)
    budget = named(train_against_perturbations, 0.5 * plain / GIB)
    assert train_against_perturbations(budget) <= budget * GIB <= 1.02 * plain


class Convolutions(nn.Module):
    """A graph network by a sparse matrix, an input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(torch.sparse.mm(adjacency, layer(x)))
        return x


def train_on_graphs(budget_gb: float | None) -> int:
    """Train on sparse matrices; returns the peak in bytes."""
    gc.collect()
    model = Convolutions().train()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if budget_gb is not None:
        memopt.optimize(model, budget_gb, precision="fp32", allow={"recompute"}, optimizer=optimizer)
    with memopt.measure_peak() as peak:
        for _ in range(3):
            adjacency = torch.sparse_coo_tensor(torch.randint(0, 2048, (2, 8192)), torch.rand(8192), (2048, 2048))
            loss = model(torch.rand(2048, 64), adjacency.coalesce()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return peak.bytes


@pytest.mark.slow
@pytest.mark.usefixtures("counted")
def test_a_step_on_sparse_tensors_that_cannot_be_captured_is_named_about_what_the_plain_step_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MEMOPT_PLAN", raising=False)
    plain = train_on_graphs(None)
    budget = named(train_on_graphs, 0.7 * plain / GIB)
    assert train_on_graphs(budget) <= budget * GIB <= 1.4 * plain


class Bags(nn.Module):
    """Layers on the mean of embeddings."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(500, 64, sparse=sparse)
        self.head = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 64))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(words).mean(1))


@pytest.mark.usefixtures("counted")
def test_a_named_budget_has_room_for_the_state_of_optimizers_that_were_not_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MEMOPT_PLAN", raising=False)

    def named_bytes(*, further: bool) -> int:
        model = Bags().train()
        given = torch.optim.Adam(model.words.parameters())
        others = [torch.optim.Adam(model.head.parameters())] if further else []
        memopt.optimize(model, 0.002, precision="fp32", allow={"recompute"}, optimizer=given)
        with pytest.raises(memopt.BudgetError) as refused:
            model(torch.randint(500, (256, 16)))
        assert len(others) == further
        return refused.value.smallest_bytes

    state = 2 * sum(one.nbytes for one in Bags().head.parameters())
    assert named_bytes(further=True) - named_bytes(further=False) >= 0.9 * state


def train_sparsely(budget_gb: float | None) -> int:
    """Train with sparse gradients, which are eight times the embeddings that they are of and stay until the next
    forward has run; returns the peak in bytes."""
    gc.collect()
    model = Bags(sparse=True).train()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if budget_gb is not None:
        memopt.optimize(model, budget_gb, precision="fp32", allow={"recompute"}, optimizer=optimizer)
    with memopt.measure_peak() as peak:
        for _ in range(3):
            loss = model(torch.randint(500, (256, 16))).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return peak.bytes


@pytest.mark.usefixtures("counted")
def test_a_named_budget_has_room_for_sparse_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEMOPT_PLAN", raising=False)
    plain = train_sparsely(None)
    budget = named(train_sparsely, 0.5 * plain / GIB)
    assert train_sparsely(budget) <= budget * GIB <= 1.6 * plain  # gradients may stay


class Supervised(nn.Module):
    """Convolutions with a head behind each, whose losses are taken one by one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Conv2d(3 if n == 0 else 24, 24, 3, padding=1) for n in range(4))
        self.heads = nn.ModuleList(nn.Linear(24, 10) for _ in range(4))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for layer, head in zip(self.layers, self.heads, strict=True):
            x = layer(x).relu()
            found.append(head(x.mean((2, 3))))
        return found


def test_a_budget_that_a_retained_graph_names_works_without_a_plan() -> None:
    """With that budget the step runs plain, and its count, with margins of its own, was larger."""

    def step(budget_gb: float) -> None:
        model = Supervised()
        memopt.optimize(model, budget_gb, **EXACT)
        outputs = model(torch.rand(16, 3, 24, 24))
        for number, output in enumerate(outputs):
            output.square().mean().backward(retain_graph=number < 3)

    smallest = memopt.plan(Supervised(), 1, (torch.rand(16, 3, 24, 24),), **EXACT).smallest_gb()
    with pytest.raises(memopt.BudgetError, match="retain_graph") as refused:
        step(1.02 * smallest)
    step(refused.value.smallest_gb)


class Pooled(nn.Module):
    """Layers on rows, pooled to a few numbers for each batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)[:, :2].mean(0, keepdim=True)


@pytest.mark.slow
@pytest.mark.usefixtures("counted")
def test_a_loss_on_a_few_numbers_does_not_raise_the_budget_that_is_named_for_a_larger_batch() -> None:
    """It holds many times the bytes of these numbers, which are few nevertheless."""

    def step(model: nn.Module, rows: int) -> None:
        with memopt.measure_peak("cpu"):
            made = model(torch.rand(rows, 64))
            torch.stack([(made - target).square().mean() for target in range(16)]).sum().backward()
        model.zero_grad()

    terms: dict[str, Any] = {"precision": "fp32", "allow": {"recompute"}, "optimizer": torch.optim.SGD}
    afresh = named(lambda budget: step(memopt.optimize(Pooled().train(), budget, **terms), 4096), 1e-4)
    model = memopt.optimize(Pooled().train(), 0.9 * afresh, **terms)
    step(model, 2048)
    with pytest.raises(memopt.BudgetError) as refused:
        step(model, 4096)
    assert refused.value.smallest_gb <= 1.26 * afresh  # it serves batches that are a quarter larger


@pytest.mark.usefixtures("counted")
def test_a_budget_named_for_the_plain_step_has_room_for_a_few_bytes_more_of_the_callers() -> None:
    """Such as the numbers that a loop collects: without room for these, the same run is refused again by bytes."""
    held: list[torch.Tensor] = []

    def train(budget_gb: float, further: int) -> int:
        held.clear()
        gc.collect()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(400, 256), nn.Tanh(), nn.Linear(256, 400))
        optimizer = torch.optim.Adam(model.parameters())
        memopt.optimize(model, budget_gb, optimizer=optimizer, precision="fp32", allow={"recompute"})
        for number in range(3):
            held[:] = [torch.zeros(50_000)] if number == 2 else []
            held.extend(torch.zeros(16) for _ in range(further))
            model(torch.rand(64, 400)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return 3

    first = named(lambda budget: train(budget, 0), 1e-4)
    second = named(lambda budget: train(budget, 0), first)
    assert second > first
    train(second, 4)
