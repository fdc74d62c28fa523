"""What the caller's own code takes between a forward and its backward is in the budget: by a guess in the first step,
and as it was seen from the second one on, also where no meter runs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize, smooth_l1_loss

import memopt
from memopt.compat.autograd import backward_starts, graph_until
from memopt.errors import GIB, round_up
from memopt.meter import PeakMeter
from memopt.run.ledger import Ledger
from memopt.run.session import session_of
from memopt.run.until_backward import held_bytes
from tests.elsewhere import counted
from tests.marks import slow
from tests.run.pieces import torchs_own_backward

__all__ = ["counted"]

pytestmark = pytest.mark.usefixtures("counted")
ROWS = 1024
Loss = Callable[[torch.Tensor], torch.Tensor]


def model(returned: int) -> nn.Module:
    torch.manual_seed(0)
    layers = [one for _ in range(6) for one in (nn.Linear(128, 128), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(128, returned)).train()


def classes(logits: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits, torch.arange(len(logits)) % logits.shape[1])


def pairs(embedded: torch.Tensor) -> torch.Tensor:
    """A contrastive loss over all pairs, as in SimCLR."""
    unit = normalize(embedded)
    return cross_entropy(unit @ unit.T / 0.1, torch.arange(len(unit)).roll(1))


def several(logits: torch.Tensor) -> torch.Tensor:
    """Several losses by eager code, with an intermediate of its own."""
    targets = logits.detach().softmax(1)
    return classes(logits) + smooth_l1_loss(logits.softmax(1), targets.roll(1, 0)) + logits.exp().mean()


def three(logits: torch.Tensor) -> torch.Tensor:
    """Cross entropy, and a Dice loss of probabilities with targets in one-hot form, as segmentation has them."""
    target = nn.functional.one_hot(torch.arange(len(logits)) % logits.shape[1], logits.shape[1]).float()
    probabilities = logits.softmax(1)
    return classes(logits) - (probabilities * target).sum() / (probabilities + target).sum()


def steps(
    trained: nn.Module, loss_of: Loss, count: int = 4, *, freed_at_the_end: bool = False
) -> tuple[list[torch.Tensor], list[int]]:
    """The losses and the peaks of steps, in which the gradients of the step before are freed after the forward, or
    those of a step at its end."""
    optimizer = torch.optim.SGD(trained.parameters(), 1e-3)
    losses, peaks = [], []
    for number in range(count):
        torch.manual_seed(number)
        batch = torch.randn(ROWS, 128)
        with memopt.measure_peak() as peak:
            loss = loss_of(trained(batch))
            if not freed_at_the_end:
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if freed_at_the_end:
                optimizer.zero_grad()
        losses.append(loss.detach().clone())
        peaks.append(peak.bytes)
    return losses, peaks


@pytest.mark.slow
@pytest.mark.parametrize(("loss_of", "returned"), [*map(slow, (classes, pairs, several), (500, 64, 500)), (three, 500)])
def test_a_loss_outside_of_the_model_is_in_the_budget(
    loss_of: Loss, returned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, plain = steps(model(returned), loss_of)
    monkeypatch.setattr(PeakMeter, "running", lambda: None)  # as where another meter runs
    trained = model(returned)
    lasting = 2 * sum(parameter.nbytes for parameter in trained.parameters())
    budget = lasting + int((max(plain) - lasting) * 0.8)
    memopt.optimize(trained, budget / GIB, precision="fp32", allow={"recompute", "reinplace"}, optimizer="sgd")
    found, peaks = steps(trained, loss_of)
    known = peaks[1:] if loss_of is pairs else peaks  # pairs are no multiple of the outputs
    assert max(known) <= budget, [peak / budget for peak in peaks]
    assert all(map(torch.equal, found, expected))


@pytest.mark.slow
@pytest.mark.parametrize(("loss_of", "returned"), [slow(classes, 1000), (pairs, 64), slow(several, 500)])
def test_a_loss_that_a_meter_read_is_in_the_budget(loss_of: Loss, returned: int) -> None:
    expected, plain = steps(model(returned), loss_of, freed_at_the_end=True)
    trained = model(returned)
    lasting = 2 * sum(parameter.nbytes for parameter in trained.parameters())
    budget = lasting + int((max(plain) - lasting) * 0.8)
    memopt.optimize(trained, budget / GIB, precision="fp32", allow={"recompute", "reinplace"}, optimizer="sgd")
    found, peaks = steps(trained, loss_of, freed_at_the_end=True)
    assert max(peaks[1:]) <= budget, [peak / budget for peak in peaks]
    assert all(map(torch.equal, found, expected))


def named(refused: nn.Module, options: dict[str, Any]) -> float:
    """The budget that the refusal of a first call names."""
    try:
        memopt.optimize(refused, 0.001, **options)(torch.randn(ROWS, 128))
    except memopt.BudgetError as refusal:
        memopt.remove(refused)
        return float(round_up(refusal.smallest_gb))
    raise AssertionError("a step fits 1 MB")


@pytest.mark.slow
@pytest.mark.parametrize(("loss_of", "returned"), [(classes, 200), (three, 200)])
def test_the_budget_that_a_refusal_names_works(loss_of: Loss, returned: int) -> None:
    options = {"precision": "fp32", "allow": {"recompute", "reinplace"}, "optimizer": "sgd"}
    expected, plain = steps(model(returned), loss_of)
    budget = named(model(returned), options)
    trained = model(returned)
    assert budget * GIB < max(plain)
    memopt.optimize(trained, budget, **options)
    found, peaks = steps(trained, loss_of)
    assert max(peaks) <= budget * GIB
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("loss_of", [classes, several, three])
def test_what_a_loss_holds_is_seen_in_its_graph(loss_of: Loss) -> None:
    features = torch.randn(ROWS, 32, requires_grad=True)
    outputs = features * 2
    roots = [loss_of(outputs)]
    nodes, ends = graph_until(roots, lambda node: node is outputs.grad_fn)
    assert ends == [outputs.grad_fn]
    with memopt.measure_peak() as peak:
        again = loss_of(outputs)
        torch.autograd.grad(again, outputs)
    _, *estimates = held_bytes(roots, nodes, outputs.device, [outputs.untyped_storage().data_ptr()])
    assert peak.allocated_bytes <= 1.05 * max(estimates) <= 1.5 * peak.allocated_bytes


def test_torchs_own_function_is_back_once_the_backward_was_seen() -> None:
    own = torchs_own_backward()
    trained = memopt.optimize(model(64), 10)
    loss = classes(trained(torch.randn(ROWS, 128)))
    loss.backward()
    assert torch.autograd._engine_run_backward is torch.autograd.graph._engine_run_backward is own
    session = session_of(trained)
    assert session is not None
    assert (session.share.entry.callers_code.meanwhile or 0) >= 2 * ROWS * 64 * 4
    backward_starts(print)
    backward_starts(None)
    assert torch.autograd._engine_run_backward is own


@pytest.mark.slow
def test_what_appears_in_the_first_step_may_take_the_place_of_the_optimizers_state() -> None:
    """Tensors of the caller's code, kept until the backward, as a teacher's answers."""

    def train(budget_gb: float = 0) -> tuple[list[torch.Tensor], list[int]]:
        torch.manual_seed(0)
        trained = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 8))
        optimizer = torch.optim.Adam(trained.parameters())
        if budget_gb:
            memopt.optimize(trained, budget_gb, precision="fp32", allow={"recompute", "reinplace"}, optimizer=optimizer)
        losses, peaks = [], []
        for number in range(3):
            torch.manual_seed(number)
            batch = torch.randn(2048, 64)
            with memopt.measure_peak() as peak:
                made = trained(batch)
                answers = torch.randn(1 << 18)
                loss = made.square().mean() + answers.mean()
                loss.backward()
                del answers
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach().clone())
            peaks.append(peak.bytes)
        return losses, peaks

    expected, plain = train()
    budget_gb = 0.8 * max(plain) / GIB
    found, peaks = train(budget_gb)
    assert max(peaks) <= budget_gb * GIB, [peak / budget_gb / GIB for peak in peaks]
    assert all(map(torch.equal, found, expected))


@pytest.mark.slow
@pytest.mark.plans_always
@pytest.mark.parametrize("stays", [True, False])
def test_what_appears_and_stays_is_counted_once(stays: bool) -> None:
    """A caller's variable that is set between a forward and its backward, and replaced in the next step."""
    trained = memopt.optimize(model(16), 0.1, precision="fp32", allow={"recompute"}, optimizer="sgd")
    session, held = session_of(trained), None
    assert session is not None
    share, later = session.share, []
    for _ in range(3):
        batch = torch.randn(ROWS, 128)
        moment = share.moment(((batch,), {}), share.situation(session.forward.planner.optimizer_choice))
        later.append(share.entry.to_appear(share.ledger.now(replace(moment, closely=True)).other))
        made = trained(batch)
        held = torch.randn(1 << 18)
        (made.square().mean() + held.mean()).backward()
        held = held if stays else None
    assert held is None or stays
    assert later[0] == 0
    assert all(nbytes < 1 << 17 if stays else nbytes >= 1 << 20 for nbytes in later[1:]), later


@pytest.mark.slow
def test_the_first_step_leaves_room_for_a_teacher() -> None:
    """The code before the first backward is unknown, except that another model may run."""

    def train(budget: float = 0) -> tuple[list[torch.Tensor], list[int]]:
        student = model(16)
        teacher = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 16)).requires_grad_(False)
        if budget:
            memopt.optimize(student, budget, precision="fp32", allow={"recompute", "reinplace"}, optimizer="sgd")

        def distilled(made: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                taught = teacher(torch.randn(ROWS, 128))
            return smooth_l1_loss(made, taught)

        return steps(student, distilled, 3, freed_at_the_end=True)

    expected, plain = train()
    budget = 0.7 * max(plain) / GIB
    found, peaks = train(budget)
    assert max(peaks) <= budget * GIB, [peak / budget / GIB for peak in peaks]
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("stay", [True, False])
def test_whether_gradients_stay_until_the_next_forward_is_seen(stay: bool) -> None:
    trained = memopt.optimize(model(16), 1)
    share = session_of(trained).share  # type: ignore[union-attr]
    for number in range(3):
        assert share.gradients_may_stay is (stay or number < 2)
        if not stay:
            trained.zero_grad()
        trained(torch.randn(ROWS, 128)).square().mean().backward()


@pytest.mark.slow
def test_a_refusal_names_room_for_the_largest_batch_that_was_seen() -> None:
    """The first step has no optimiser's state yet and fits; the second one does not, though its batch is smaller."""

    def train(budget: float) -> list[int]:
        trained = model(16)
        optimizer = torch.optim.Adam(trained.parameters())
        memopt.optimize(trained, budget, precision="fp32", allow={"recompute", "reinplace"}, optimizer=optimizer)
        for rows in (1024, 768, 1024, 512, 1024):
            batch, answers = torch.randn(rows, 128), torch.randn(rows, 512)
            made = trained(batch)
            loss = (made @ torch.ones(16, 512) - answers).exp().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done.append(rows)
        return done

    def refused_at(budget: float) -> float:
        with pytest.raises(memopt.BudgetError, match="for the largest batches seen") as refusal:
            train(budget)
        return float(round_up(refusal.value.smallest_gb))  # the error itself holds the model

    done: list[int] = []
    works = refused_at(0.0085)
    assert done == [1024]
    done.clear()
    gc.collect()  # the first model is no part of the second one's steps
    assert len(train(works)) == 5


@pytest.mark.slow
def test_a_large_value_that_a_hook_keeps_is_no_growth_of_a_small_output() -> None:
    """The plan's backward begins with gradients of both, the loop is given the small one alone."""
    net, kept = model(4), list[torch.Tensor]()
    net[5].register_forward_hook(lambda module, given, output: kept.append(output))
    batch = torch.randn(ROWS, 128)

    def step() -> None:
        kept.clear()
        loss = classes(net(batch)) + 0.1 * kept[0].square().mean()
        loss.backward()
        net.zero_grad()

    with memopt.measure_peak() as plain:
        step()
    kept.clear()
    memopt.optimize(net, 0.9 * plain.bytes / GIB, precision="fp32", allow={"recompute", "reinplace"})
    for _ in range(3):
        with memopt.measure_peak() as peak:
            step()
        assert peak.bytes <= 0.9 * plain.bytes
    kept.clear()


def test_each_forward_within_a_meter_is_read_between_its_own_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller second batch was read in place of the first one."""
    monkeypatch.setattr(Ledger, "may_look", lambda _: True)
    seen = []
    for batches in ([ROWS], [ROWS, ROWS // 32]):
        planned = memopt.optimize(model(256), 1, precision="fp32", optimizer=None)
        with memopt.measure_peak():
            for rows in batches:
                classes(planned(torch.randn(rows, 128))).backward()
        seen.append(session_of(planned).share.entry.callers_code.meanwhile)
    assert seen[0] == seen[1]


def test_the_marks_among_a_meters_events_are_no_bytes_of_the_callers_code() -> None:
    planned = memopt.optimize(model(256), 1, precision="fp32", optimizer=None)
    with memopt.measure_peak():
        planned(torch.randn(ROWS, 128))[:1, :1].sum().backward()
    assert session_of(planned).share.entry.callers_code.meanwhile < 4096


class Loss32(nn.Module):
    """Layers that return their loss, or their output."""

    def __init__(self, loss_inside: bool) -> None:
        super().__init__()
        self.layers, self.loss_inside = model(32), loss_inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return classes(self.layers(x)) if self.loss_inside else self.layers(x)


@pytest.mark.slow
@pytest.mark.parametrize("loss_inside", [False, True])
def test_gradients_of_penalties_on_weights_are_in_the_budget(loss_inside: bool) -> None:
    """They wait in autograd's buffers until the model's backward has computed the others."""
    trained, x = Loss32(loss_inside), torch.randn(ROWS // 2, 128)

    def step_bytes() -> int:
        trained.zero_grad()
        with memopt.measure_peak("cpu") as peak:
            found = trained(x)
            loss = found if loss_inside else classes(found)
            del found
            (loss + 1e-3 * sum(parameter.abs().sum() for parameter in trained.parameters())).backward()
        return peak.bytes

    budget = int(0.7 * max(step_bytes(), step_bytes()))
    memopt.optimize(trained, budget / GIB, optimizer=None, precision="fp32", allow={"recompute", "reinplace"})
    step_bytes()
    assert max(step_bytes(), step_bytes()) <= budget
    session = session_of(trained)
    assert session is not None
    assert session.share.entry.given_bytes == sum(parameter.nbytes for parameter in trained.parameters())


class LossAndLogits(Loss32):
    """Layers that return the loss with the logits that it was computed from, as models of transformers do."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        logits = self.layers(x)
        return classes(logits), logits


def test_a_loss_of_the_model_is_none_of_the_callers_code() -> None:
    trained = memopt.optimize(LossAndLogits(loss_inside=True), 1, optimizer=None, precision="fp32")
    trained(torch.randn(ROWS, 128))[0].backward()
    session = session_of(trained)
    assert session is not None
    assert session.share.entry.callers_code.meanwhile == 0


class Twofold(nn.Module):
    """Layers whose loop calls them in another method as well, as the imagination of a world model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = model(128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def imagine(self, x: torch.Tensor, steps: int) -> torch.Tensor:
        for _ in range(steps):
            x = self.layers(x)
        return x


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 6])
def test_what_other_methods_of_the_model_save_is_named_before_the_first_step(steps: int) -> None:
    """The first step exceeded its budget, and no word was said. More than the budget is refused, less is a warning."""

    def train(budget_gb: float = 0) -> list[int]:
        torch.manual_seed(0)
        trained = Twofold()
        optimizer = torch.optim.SGD(trained.parameters(), 1e-3)
        if budget_gb:
            memopt.optimize(trained, budget_gb, precision="fp32", allow={"recompute"}, optimizer=optimizer)
        peaks = []
        for _ in range(3):
            batch = torch.randn(ROWS, 128)
            with memopt.measure_peak() as peak:
                made = trained(batch)
                loss = made.square().mean() + trained.imagine(made.detach(), steps).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            peaks.append(peak.bytes)
        return peaks

    def refused_at(budget_gb: float) -> float:
        with pytest.raises(memopt.BudgetError, match="methods of the model") as refused:
            train(budget_gb)
        return float(round_up(refused.value.smallest_gb))  # the error itself holds the model

    plain = max(train())
    if steps == 1:
        with pytest.warns(UserWarning, match="that the caller's code saved"):
            peaks = train(budget_gb := 0.75 * plain / GIB)
        assert max(peaks[1:]) <= budget_gb * GIB
        return
    named_gb = refused_at(0.5 * plain / GIB)
    gc.collect()
    assert named_gb * GIB <= 1.05 * plain
    assert max(train(named_gb)) <= named_gb * GIB
