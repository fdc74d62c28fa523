from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import FrozenInstanceError, asdict, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memopt
from memopt.errors import GIB, BudgetError
from memopt.planning.frontier import FORMAT, Frontier
from memopt.planning.options import Effort
from tests.planning.curves import made_up, roomy, solved


def loaded(curve: Frontier, folder: Path) -> Frontier:
    curve.save(folder / "frontier.json")
    return Frontier.load(folder / "frontier.json")


@pytest.mark.parametrize("make", [made_up, solved, lambda: replace(made_up(), effort=Effort("best", 5.0))])
def test_saved_and_loaded_curves_are_equal(make: Callable[[], Frontier], tmp_path: Path) -> None:
    again = loaded(make(), tmp_path)
    assert again == make()
    assert hash(again) == hash(make())
    assert str(again) == str(make())
    assert repr(again) == repr(make())


def test_the_file_is_readable_json(tmp_path: Path) -> None:
    loaded(made_up(), tmp_path)
    values = json.loads((tmp_path / "frontier.json").read_text())
    assert (values["format"], values["model"], values["plain_gb"]) == (FORMAT, "Llama[tiny]", 4.0)
    assert values["points"][1] == asdict(made_up().points[1])
    assert values["recipes"][1] == {"name": "per block", "peak_gb": 2.6, "added_time": 0.3}
    assert "source" not in values


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace(f'"format": {FORMAT}', f'"format": {FORMAT + 1}'),
        lambda text: text.replace('"plain_gb"', '"plain_mb"'),
        lambda text: text.replace('"evaluations"', '"times"'),
    ],
)
def test_other_files_are_refused(tmp_path: Path, edit: Callable[[str], str]) -> None:
    path = tmp_path / "frontier.json"
    made_up().save(path)
    path.write_text(edit(path.read_text()))
    with pytest.raises(ValueError, match=rf"frontier\.json is not a memopt frontier of format {FORMAT}; make it again"):
        Frontier.load(path)


def test_at() -> None:
    curve = made_up()
    assert replace(curve, points=(*curve.points, replace(curve.points[3], budget_gb=5.0))).at(9) == curve.points[3]
    for budget, served in ((2.0, 0), (2.24, 0), (2.25, 1), (2.9, 1), (3.0, 2), (4.0, 3), (80, 3)):
        assert curve.at(budget) == curve.points[served]
    with pytest.raises(BudgetError, match="the smallest that works is 2 GB, dominated by parameters 1 GB") as refusal:
        curve.at(1.99)
    assert refusal.value.smallest_gb == 2.0
    for wrong in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="positive"):
            curve.at(wrong)
    with pytest.raises(TypeError, match="a number of gigabytes"):
        curve.at("12")  # type: ignore[arg-type]


def test_the_refusal_names_a_budget_that_works() -> None:
    curve = solved()
    with pytest.raises(BudgetError) as refusal:
        curve.at(curve.smallest_gb - 1 / GIB)
    assert curve.at(refusal.value.smallest_gb) == curve.points[0]
    with pytest.raises(BudgetError) as of_the_plan:
        roomy().at(curve.smallest_gb - 1 / GIB)
    assert str(of_the_plan.value) == str(refusal.value)


def test_a_loaded_curve_has_no_plans(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"loaded from a file and has no graphs; make a plan with memopt\.plan"):
        loaded(solved(), tmp_path).plan(1)


def test_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        solved().points = ()  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        solved().points[0].budget_gb = 0.0  # type: ignore[misc]


class Wide(nn.Module):
    """A stack of layers whose activations outweigh their parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(6)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.slow
def test_a_model_on_meta() -> None:
    with torch.device("meta"):
        model = Wide().train()
        batch = torch.empty(512, 16), torch.empty(512, 16)
    state = {name: dict(vars(module)) for name, module in model.named_modules()}
    curve = memopt.frontier(
        model, batch, loss_fn=functional.mse_loss, optimizer="sgd", device="rtx-4090", points=5, precision="fp32"
    )
    assert (curve.model, curve.hardware) == ("Wide", "rtx-4090")
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == state
    assert len(curve.points) >= 5
    middle = curve.points[len(curve.points) // 2]
    plan = memopt.plan(
        model,
        middle.budget_gb,
        batch,
        loss_fn=functional.mse_loss,
        optimizer="sgd",
        device="rtx-4090",
        precision="fp32",
    )
    assert plan.plain_peak_gb == pytest.approx(curve.plain_gb, rel=1e-3), "but for holes between blocks"
    assert plan.smallest_gb() == curve.smallest_gb
    assert plan.bound <= middle.added_time


@pytest.mark.parametrize(
    ("wrong", "kind", "words"),
    [
        ({"points": 1}, ValueError, "points must be at least 2"),
        ({"points": 4.5}, TypeError, "points must be a number of budgets, such as 40, not 4.5"),
        ({"effort": "most"}, ValueError, "effort must be one of 'fast', 'default', 'best', not 'most'"),
        ({"limit_seconds": 5}, ValueError, "limit_seconds is for effort='best', not 'default'"),
        ({"device": "abacus"}, ValueError, "abacus"),
    ],
)
def test_what_is_refused(wrong: dict[str, object], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        memopt.frontier(Wide(), (torch.zeros(2, 16),), **wrong)  # type: ignore[arg-type]
