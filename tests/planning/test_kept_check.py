"""A kept plan that was cut off, changed or put under another name is deleted, and the step planned again: its
gradients are those of the plain model, and its peak is within the budget."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from memopt.disk_cache import opened, sealed, warn_not_kept
from memopt.planning.plan_cache import is_sound
from memopt.run.session import session_of
from tests.marks import slow
from tests.planned import ACCOUNT, captured, make_plan, region
from tests.planning.test_plan_cache import batch, gradients, make

pytestmark = pytest.mark.plans_always  # the plain steps would fit

Change = Callable[[dict[str, Any]], object]
OPTIONS: dict[str, Any] = {"precision": "fp32", "allow": {"recompute"}, "elsewhere_gb": 0}
TIGHT, ROOMY = 0.0036, 0.005


def kept_in(folder: Path, budget_gb: float) -> tuple[nn.Module, Path]:
    """A model after its first step, and the file of its plan."""
    before = set(folder.glob("plans/*"))
    model = make()
    memopt.optimize(model, budget_gb, **OPTIONS)
    gradients(model, batch())
    (file,) = set(folder.glob("plans/*")) - before
    return model, file


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A job's model after its first step, its kept plan, the text of that, and the text of one for a larger budget."""
    folder = tmp_path_factory.mktemp("kept")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMOPT_CACHE_DIR", str(folder))
        _, other = kept_in(folder, ROOMY)
        text = other.read_text()
        other.unlink()
        model, file = kept_in(folder, TIGHT)
        yield model, file, file.read_text(), text


@pytest.fixture
def again(job: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], memopt.Plan]:
    """Takes the step of the job by whatever the file of its plan holds."""
    model, file, *_ = job
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(file.parents[1]))
    plain = make()
    expected = gradients(plain, batch())

    def step(text: bytes) -> memopt.Plan:
        file.write_bytes(text)
        session_of(model).forward.recorded.forget()
        model.zero_grad(set_to_none=True)
        found = gradients(model, batch())
        assert all(map(torch.equal, found, expected))
        model.zero_grad(set_to_none=True)
        return memopt.plan_of(model)

    return step


def resealed(text: str, change: Change) -> bytes:
    values = opened(json.loads(text))
    change(values)
    return json.dumps(sealed(values)).encode()


def plan_in(values: dict[str, Any]) -> dict[str, Any]:
    plan: dict[str, Any] = values["value"]["plan"]
    return plan


def evaluations(values: dict[str, Any]) -> list[Any]:
    found: list[Any] = plan_in(values)["regions"][0]["evaluations"]
    return found


def schedule(values: dict[str, Any]) -> list[Any]:
    found: list[Any] = values["value"]["schedule"]["evaluations"]
    return found


def without_recomputation(values: dict[str, Any]) -> None:
    """The schedule that saves everything, in the schedule and in the region alike."""
    for entries in (schedule(values), evaluations(values)):
        entries[:] = list(dict.fromkeys(entries))


FORGED: dict[str, Change] = {
    "node left out": lambda values: evaluations(values).pop(3),
    "unknown node": lambda values: evaluations(values).__setitem__(3, "nothing"),
    "node as a number": lambda values: evaluations(values).__setitem__(3, 7),
    "node twice": lambda values: evaluations(values).insert(5, evaluations(values)[3]),
    "boundary": lambda values: plan_in(values)["regions"][0].update(boundary=2),
    "boundary as a text": lambda values: plan_in(values)["regions"][0].update(boundary="2"),
    "operator left out": lambda values: schedule(values).pop(3),
    "operator beyond the last": lambda values: schedule(values).__setitem__(3, 10**6),
    "negative operator": lambda values: schedule(values).__setitem__(3, -1),
    "no schedule": lambda values: values["value"].update(schedule={"evaluations": []}),
    "offload": lambda values: values["value"]["schedule"]["offloads"].append(
        {"storage": 10**6, "out_after": 0, "freed_before": 1, "fetch_from": 2, "back_before": 3}
    ),
    "negative lever set": lambda values: values["value"].update(lever_set=-1),
    "lever set as a text": lambda values: values["value"].update(lever_set="0"),
    "proposal": lambda values: plan_in(values).update(proposals=["low_bit_optimizer"]),
    "smaller account": lambda values: plan_in(values)["account"].update(parameters=0),
    "smaller peak": lambda values: plan_in(values).update(ceiling_bytes=1),
    "held bytes": lambda values: plan_in(values).update(held_bytes=0),
    "another budget": lambda values: plan_in(values).update(budget_bytes=2**40),
    "over the budget": without_recomputation,
    "another name": lambda values: values.update(name="0" * 64),
}


QUICK = ("node left out", "smaller account", "over the budget", "another name", "empty", "one digit more")
"""Of each thing that is checked one; the others take half a second of planning each."""


@pytest.mark.parametrize("what", [what if what in QUICK else slow(what) for what in FORGED])
def test_a_forged_plan_is_planned_again(job: Any, again: Callable[[bytes], memopt.Plan], what: str) -> None:
    _, file, whole, _ = job
    plan = again(resealed(whole, FORGED[what]))
    assert plan.predicted_peak_bytes <= plan.budget_bytes == int(TIGHT * 1024**3)
    assert json.loads(file.read_text()) == json.loads(whole), "and its file replaced"


DAMAGED: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut off": lambda data: data[: len(data) // 2],
    "one digit more": lambda data: data.replace(b'"boundary": ', b'"boundary": 1', 1),
    "no digest": lambda data: json.dumps(opened(json.loads(data))).encode(),
    "no text": lambda data: b"\xff\xfe\x00" + data,
    "nested": lambda data: b"[" * 100_000,
    "a large number": lambda data: b"1" * 5000,
}


@pytest.mark.parametrize("what", [what if what in QUICK else slow(what) for what in DAMAGED])
def test_a_damaged_plan_is_planned_again(job: Any, again: Callable[[bytes], memopt.Plan], what: str) -> None:
    _, file, whole, _ = job
    again(DAMAGED[what](whole.encode()))
    assert json.loads(file.read_text()) == json.loads(whole)


def test_a_plan_of_a_larger_budget_under_this_key_is_planned_again(
    job: Any, again: Callable[[bytes], memopt.Plan]
) -> None:
    _, file, whole, larger = job
    own = opened(json.loads(whole))

    def under_this_key(values: dict[str, Any]) -> None:
        values["name"] = own["name"]

    def with_this_budget(values: dict[str, Any]) -> None:
        under_this_key(values)
        plan_in(values).update(budget_bytes=plan_in(own)["budget_bytes"])

    for text in (larger.encode(), resealed(larger, under_this_key), resealed(larger, with_this_budget)):
        plan = again(text)
        assert plan.predicted_peak_bytes <= plan.budget_bytes == int(TIGHT * 1024**3)
        assert json.loads(file.read_text()) == json.loads(whole)


def test_a_whole_plan_is_taken(job: Any, again: Callable[[bytes], memopt.Plan]) -> None:
    _, file, whole, _ = job
    data = json.dumps(json.loads(whole)).encode()  # without the indentation of the file that is written instead
    again(data)
    assert file.read_bytes() == data


@pytest.mark.parametrize("key", ["../../../etc/passwd", 3, None, "0" * 63])
def test_a_sketch_that_leads_elsewhere_is_planned_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: Any
) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))

    def ahead() -> memopt.Plan:
        model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
        return memopt.plan_of(memopt.optimize(model, 1, example_inputs=(torch.ones(2, 8),), **OPTIONS))

    plan = ahead()
    sketches = [file for file in tmp_path.glob("plans/*") if "schedule" not in file.read_text()]
    for file in sketches:
        file.write_bytes(resealed(file.read_text(), lambda values: values.update(value=key)))
    assert ahead() == plan
    shutil.rmtree(tmp_path)


def test_a_full_disk_is_warned_of_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))
    warn_not_kept.cache_clear()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)

    def train_two() -> None:
        for width in (4, 8):
            model = nn.Sequential(nn.Linear(width, 8), nn.GELU(), nn.Linear(8, 1))
            memopt.optimize(model, 1, example_inputs=(torch.ones(2, width),), **OPTIONS)
            model(torch.ones(2, width)).sum().backward()

    with pytest.warns(UserWarning, match=r"plans are not stored on disk \(\[Errno 28\] No space") as said:
        train_two()
    assert len([warning for warning in said if "stored on disk" in str(warning.message)]) == 1
    assert not list(tmp_path.glob("plans/*"))


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
def test_plans_for_a_card_are_sound_with_their_own_account_only(share: float, expandable: bool) -> None:
    """On a card the allocator's overhead counts, which depends on the budget that a plan was made for."""
    step = captured(region(6, width=512, batch=4096))
    own = replace(ACCOUNT, parameters=6 * 2**20, optimizer_state=12 * 2**20, reserve=2**29, context=2**28)
    own = replace(own, expandable=expandable)
    roomy = make_plan(step, own, 2**40)
    least = roomy.smallest_bytes()
    budget = least + int(share * (roomy.ceiling_bytes - least))
    plan = make_plan(step, own, budget)
    assert is_sound(plan, None, own, 0)
    assert not is_sound(plan, None, replace(own, elsewhere=budget), 0), "beside more than is left"
    assert not is_sound(plan, None, replace(own, inputs=own.inputs + 1), 0), "of another account"
    assert not is_sound(replace(plan, account=replace(plan.account, rounding=0, fragmentation=0)), None, own, 0) or (
        plan.account.rounding == plan.account.fragmentation == 0
    )
    if share < 1:
        assert not is_sound(plan, None, own, 1), "beside another forward that holds as much"
        assert not is_sound(replace(roomy, budget_bytes=budget), None, own, 0), "over this budget"
