from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import memopt
from memopt.planning.options import BACKENDS, Effort, check_effort, check_options, check_points
from memopt.solver import RematProblem, Schedule
from passes import EliminateDeadCode, MergeCasts


def test_efforts() -> None:
    assert check_effort() == Effort("default", 60.0)
    assert check_effort("fast") == Effort("fast")
    assert check_effort("best") == Effort("best", 60.0)
    assert check_effort("best", 5) == Effort("best", 5.0)
    assert check_effort("best", 0.5).limit_seconds == 0.5


@pytest.mark.parametrize(
    ("effort", "limit_seconds", "kind", "words"),
    [
        ("slow", None, ValueError, "effort must be one of 'fast', 'default', 'best', not 'slow'"),
        (None, None, ValueError, "effort must be one of .* not None"),
        ("default", 5, ValueError, "limit_seconds is for effort='best', not 'default'"),
        ("fast", 5, ValueError, "limit_seconds is for effort='best', not 'fast'"),
        ("best", 0, ValueError, "limit_seconds must be a positive, finite number of seconds, not 0"),
        ("best", -1.5, ValueError, "not -1.5"),
        ("best", float("nan"), ValueError, "not nan"),
        ("best", float("inf"), ValueError, "not inf"),
        ("best", "60", TypeError, "limit_seconds must be a number of seconds, such as 60, not '60'"),
        ("best", True, TypeError, "not True"),
    ],
)
def test_no_efforts(effort: Any, limit_seconds: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        check_effort(effort, limit_seconds)


def test_plans_are_made_with_the_effort_asked_for() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).train()
    batch = torch.zeros(2, 4), torch.zeros(2, 4)
    assert memopt.plan(model, 1, batch, loss_fn=mse_loss, effort="fast", precision="fp32").effort == Effort("fast")
    memopt.optimize(model, 1, example_inputs=batch, loss_fn=mse_loss, effort="best", limit_seconds=2, precision="fp32")
    assert memopt.plan_of(model).effort == Effort("best", 2.0)
    for wrong in ({"effort": "slow"}, {"limit_seconds": 1}):
        with pytest.raises(ValueError, match=r"effort"):
            memopt.optimize(model, 1, **wrong)
        with pytest.raises(ValueError, match=r"effort"):
            memopt.plan(model, 1, batch, **wrong)


def test_points() -> None:
    assert check_points(2) == 2
    for wrong, kind in ((1, ValueError), (-3, ValueError), (40.0, TypeError), (True, TypeError), ("40", TypeError)):
        with pytest.raises(kind, match=f"points must be .* not {wrong!r}"):
            check_points(wrong)  # type: ignore[arg-type]


@dataclass(frozen=True)
class SaveAll:
    """A solver that saves everything."""

    name: str = "save all"

    def candidates(self, problem: RematProblem, budget_bytes: int) -> list[Schedule]:
        return [Schedule.save_all(problem)]


def test_passes_and_solvers_become_tuples() -> None:
    options = check_options(1, passes=[EliminateDeadCode(), MergeCasts()], solvers=[SaveAll("mine")])
    assert options.passes == (EliminateDeadCode(), MergeCasts())
    assert options.solvers == (SaveAll("mine"),)
    assert check_options(1).passes == check_options(1).solvers == ()
    assert hash(options.passes) == hash((EliminateDeadCode(), MergeCasts()))


@dataclass(frozen=True)
class Opaque(SaveAll):
    """A solver with an option that has no text of its own."""

    option: object = field(default_factory=object)


class Nameless:
    """A solver without a name."""

    def candidates(self, problem: RematProblem, budget_bytes: int) -> list[Schedule]:
        return []


@pytest.mark.parametrize(
    ("wrong", "kind", "words"),
    [
        ({"passes": EliminateDeadCode()}, TypeError, r"passes must be a list of .* not EliminateDeadCode\(\)"),
        ({"passes": "dead"}, TypeError, "passes must be a list of .* not 'dead'"),
        ({"passes": [MergeCasts(), EliminateDeadCode]}, TypeError, r"passes\[1\] .*; give EliminateDeadCode\(\)"),
        ({"passes": [lambda graph: graph]}, TypeError, r"passes\[0\] must be a passes\.Pass, a frozen dataclass, not"),
        ({"solvers": SaveAll()}, TypeError, r"solvers must be a list of solvers, such as \[MySolver\(\)\], not"),
        ({"solvers": [SaveAll]}, TypeError, r"solvers\[0\] must have a method candidates\(problem, budget_bytes\)"),
        ({"solvers": [object()]}, TypeError, r"solvers\[0\] must have a method candidates"),
        (
            {"solvers": [SaveAll(), Nameless()]},
            TypeError,
            r"solvers\[1\] must have a name, a string that",
        ),
        ({"solvers": [Opaque()]}, ValueError, r"solvers\[0\] must have a repr that shows its options"),
        ({"backend": "triton"}, ValueError, "backend must be one of 'auto', 'aten', 'inductor', not 'triton'"),
        ({"outputs": "none"}, ValueError, "outputs must be one of 'loss', 'all', 'loss_only', not 'none'"),
        ({"loss_fn": 3}, TypeError, r"loss_fn must be a function of \(output, target\) or of \(model, batch\), not 3"),
        ({"allow": {"fp4"}}, ValueError, "allow names an unknown lever 'fp4'"),
        ({"calibrate": True, "device": "h100"}, ValueError, "give one of device and calibrate"),
    ],
)
def test_wrong_options(wrong: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        check_options(1, **wrong)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_the_backend_is_that_of_the_device_that_is_planned_for(device_type: str) -> None:
    def chosen(**options: Any) -> str:
        return check_options(1.0, **options).backend_on(device_type)

    assert chosen() == {"cpu": "aten", "cuda": "inductor"}[device_type]
    assert chosen(device="rtx-4090") == "inductor"
    assert chosen(device="cpu") == "aten"
    for backend in BACKENDS[1:]:
        assert chosen(backend=backend) == chosen(backend=backend, device="t4") == backend


def test_a_plan_for_a_card_that_is_not_here_is_for_its_backend_and_says_what_is_not_known() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).train()
    batch = torch.zeros(2, 4), torch.zeros(2, 4)
    options: dict[str, Any] = {"loss_fn": nn.functional.mse_loss, "allow": {"recompute"}}

    def says(**more: Any) -> bool:
        notes = memopt.plan(model, 1, batch, **options, **more).notes
        return any("planned for inductor on a machine without a h100" in text for text in notes)

    assert says(device="h100") is not torch.cuda.is_available()
    assert not says()
    assert not says(device="h100", backend="aten")


def test_parameters_on_the_host_through_inductor_are_said_not_to_be() -> None:
    allow = {"recompute", "offload_parameters"}
    (said,) = check_options(1.0, allow=allow, backend="inductor").notes("cpu")
    assert said.startswith("'offload_parameters' was not used")
    assert check_options(1.0, allow=allow, backend="aten").notes("cpu") == ()
    assert check_options(1.0, allow=allow).backend_on("cuda") == "aten"
    assert check_options(1.0, allow={"recompute"}, backend="inductor").notes("cpu") == ()
