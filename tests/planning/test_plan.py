from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, is_dataclass, replace
from pathlib import Path

import pytest
from expecttest import assert_expected_inline

from memopt.errors import GIB, BudgetError, Way
from memopt.levers.all import RECOMPUTE_LEFT_OUT
from memopt.planning.frontier import FORMAT
from memopt.planning.options import Effort
from memopt.planning.plan import Plan
from memopt.planning.priced_step import PricedStep, TracedStep
from memopt.planning.stages import Priced, StepOfPlan
from passes import format_graph
from tests.planned import ACCOUNT, captured, make_plan, region, two_regions


@pytest.fixture(scope="module")
def roomy() -> Plan:
    return make_plan(captured(region(4)), ACCOUNT, 10**6)


@pytest.fixture(scope="module")
def tight(roomy: Plan) -> Plan:
    return roomy.at(roomy.smallest_gb())


def loaded(plan: Plan, folder: Path) -> Plan:
    plan.save(folder / "plan.json")
    return Plan.load(folder / "plan.json")


def test_saved_and_loaded_plans_are_equal(tight: Plan, tmp_path: Path) -> None:
    for plan in (tight, replace(tight, notes=("captured in 2 regions, since …",))):
        again = loaded(plan, tmp_path)
        assert again == plan
        assert hash(again) == hash(plan)
        assert str(again) == str(plan)
        assert repr(again) == repr(plan)


def test_the_file_is_readable_json(tight: Plan, tmp_path: Path) -> None:
    tight.save(tmp_path / "plan.json")
    values = json.loads((tmp_path / "plan.json").read_text())
    assert (values["format"], values["model"], values["budget_bytes"]) == (FORMAT, "Layers", tight.budget_bytes)
    assert values["regions"][0]["evaluations"][:3] == ["mm", "gelu", "mm_1"]
    assert not {"captured", "joined", "schedule"} & values.keys()


def changed(change: Callable[[dict], object]) -> Callable[[str], str]:
    def edit(text: str) -> str:
        values = json.loads(text)
        change(values)
        return json.dumps(values)

    return edit


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: "no plan",
        changed(lambda values: values.update(format=FORMAT + 1)),
        changed(lambda values: values.pop("format")),
        changed(lambda values: values.pop("account")),
        changed(lambda values: values.update(unknown=3)),
        changed(lambda values: values["modules"][0].update(unknown=3)),
        changed(lambda values: values.update(regions=3)),
    ],
)
def test_other_files_are_refused(tight: Plan, tmp_path: Path, edit: Callable[[str], str]) -> None:
    path = tmp_path / "plan.json"
    tight.save(path)
    path.write_text(edit(path.read_text()))
    with pytest.raises(ValueError, match=rf"plan\.json is not a memopt plan of format {FORMAT}; plan again with this"):
        Plan.load(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Plan.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(lambda plan: plan.graphs, id="graphs"),
        pytest.param(lambda plan: plan.at(1.0), id="at"),
        *(getattr(Plan, name) for name in ("diff", "recipes", "smallest_gb", "frontier", "networkx")),
    ],
)
def test_a_loaded_plan_has_no_graphs(tight: Plan, tmp_path: Path, use: Callable[[Plan], object]) -> None:
    with pytest.raises(ValueError, match=r"loaded from a file and has no graphs; make it with memopt\.plan"):
        use(loaded(tight, tmp_path))


def test_frozen(tight: Plan) -> None:
    for name in ("budget_bytes", "regions", "schedule"):
        with pytest.raises(FrozenInstanceError):
            setattr(tight, name, 0)


def mutable_in(value: object) -> list[object]:
    """The dicts, lists and sets that a value holds, however deep."""
    if isinstance(value, (dict, list, set)):
        return [value]
    if isinstance(value, (tuple, frozenset)):
        return [found for item in value for found in mutable_in(item)]
    if is_dataclass(value):
        names = {field.name for field in fields(value)} | set(getattr(value, "__dict__", {}))
        return [found for name in names - {"source"} for found in mutable_in(getattr(value, name))]
    assert isinstance(value, (str, int, float, type(None))), f"a plan holds {value!r}"
    return []


def test_nothing_in_a_plan_can_be_changed(roomy: Plan, tight: Plan, tmp_path: Path) -> None:
    for plan in (roomy, tight, loaded(tight, tmp_path)):
        plan.table(), plan.added_time, plan.joined
        assert not mutable_in(plan)


def test_graphs_are_given_back_to_a_loaded_plan(tight: Plan, tmp_path: Path) -> None:
    asked = []

    def capture() -> PricedStep:
        asked.append(1)
        assert tight.priced is not None
        return tight.priced

    again = replace(loaded(tight, tmp_path), source=StepOfPlan(capture))
    assert again == tight
    assert not asked
    assert again.diff() == tight.diff()
    assert again.at(1) == tight.at(1)
    assert asked


def test_figures(roomy: Plan, tight: Plan) -> None:
    assert tight.predicted_peak_bytes == tight.planned.peak_bytes == tight.budget_bytes
    assert tight.predicted_peak_gb * GIB == tight.predicted_peak_bytes
    assert tight.plain_peak_gb * GIB == roomy.predicted_peak_bytes == tight.plain.peak_bytes
    assert tight.added_time == tight.added_seconds / tight.step_seconds > 0
    assert 0 < tight.bound <= tight.added_time
    assert roomy.added_time == roomy.bound == 0
    assert replace(tight, step_seconds=0.0).added_time == replace(tight, step_seconds=0.0).bound == 0


def test_at_another_budget(roomy: Plan, tight: Plan) -> None:
    middle = roomy.at((roomy.predicted_peak_gb + tight.predicted_peak_gb) / 2)
    assert 0 < middle.added_time < tight.added_time
    assert middle.predicted_peak_gb < roomy.predicted_peak_gb
    assert tight.at(1) == replace(roomy, budget_bytes=GIB)
    with pytest.raises(BudgetError):
        roomy.at(0.99 * tight.predicted_peak_gb)
    with pytest.raises(ValueError, match="positive"):
        roomy.at(0)
    with pytest.raises(TypeError, match="a number of gigabytes"):
        roomy.at("12")  # type: ignore[arg-type]


def test_the_effort_is_that_of_the_plan_unless_another_is_named(roomy: Plan, tmp_path: Path) -> None:
    assert roomy.effort == Effort("default")
    smallest = roomy.smallest_gb()
    fast = roomy.at(smallest, effort="fast")
    assert fast.effort == fast.at(1).effort == Effort("fast")
    best = fast.at(smallest, effort="best", limit_seconds=0.2)
    assert best.effort == loaded(best, tmp_path).effort == Effort("best", 0.2)
    assert best.at(1, limit_seconds=3).effort == Effort("best", 3.0)
    assert best.at(1).effort == best.effort
    assert best.at(1, effort="fast").effort == Effort("fast")
    with pytest.raises(ValueError, match="limit_seconds is for effort='best', not 'fast'"):
        fast.at(1, limit_seconds=3)


def test_files_from_before_there_were_efforts(roomy: Plan, tmp_path: Path) -> None:
    roomy.save(tmp_path / "plan.json")
    values = json.loads((tmp_path / "plan.json").read_text())
    assert values.pop("effort") == {"name": "default", "limit_seconds": 60.0}
    del values["digest"]  # of a later version, too
    (tmp_path / "plan.json").write_text(json.dumps(values))
    assert Plan.load(tmp_path / "plan.json") == roomy


def test_graphs(tight: Plan) -> None:
    graphs = tight.graphs
    assert list(graphs) == ["captured", "scheduled"]
    (before,), (after,) = graphs["captured"], graphs["scheduled"]
    again = [node.name for node in after.graph.nodes if "again" in node.name]
    assert {name.split("_again")[0] for name in again} <= {node.name for node in before.graph.nodes}
    assert "torch.ops.aten.gelu.default" in after.code
    assert len(format_graph(after).splitlines()) == len(format_graph(before).splitlines()) + len(again)


def test_diff(roomy: Plan, tight: Plan) -> None:
    diff = tight.diff("scheduled")
    assert (diff.recomputed, diff.offloaded) == (tight.diff().recomputed, tight.diff().offloaded)
    assert diff.summary() == tight.diff().summary()
    assert all("_again" in name for name in diff.regions[0].added)
    assert not diff.regions[0].removed
    assert diff.summary() == f"{diff.recomputed} recomputed"
    assert roomy.diff().summary() == "no change"
    assert not roomy.diff()
    with pytest.raises(ValueError, match="no stage 'captured' to show; give one of 'scheduled', 'forward'"):
        tight.diff("captured")


def test_diff_golden() -> None:
    plan = make_plan(captured(region(2)), ACCOUNT, 10**6)
    assert_expected_inline(
        str(plan.at(plan.smallest_gb()).diff("scheduled")),
        """\
# 1 added, 1 changed
@@ -14,5 +14,6 @@
  t_1: f32[16, 16] = aten.t(primals_2)
  mm_3: f32[64, 16] = aten.mm(gelu_backward, t_1)
+ mm_again: f32[64, 16] = aten.mm(primals_3, primals_1)
- gelu_backward_1: f32[64, 16] = aten.gelu_backward(mm_3, mm)
+ gelu_backward_1: f32[64, 16] = aten.gelu_backward(mm_3, mm_again)
  t_2: f32[16, 64] = aten.t(primals_3)
  mm_4: f32[16, 16] = aten.mm(t_2, gelu_backward_1)""",
    )


def test_several_regions(tmp_path: Path) -> None:
    roomy = make_plan(two_regions(), ACCOUNT, 10**6)
    plan = roomy.at(roomy.smallest_gb())
    diffs = plan.diff("scheduled").regions
    assert len(diffs) == len(plan.regions) == len(plan.graphs["scheduled"]) == 2
    assert any(diffs)
    assert {change.region for change in plan.diff().changes} == {number for number, diff in enumerate(diffs) if diff}
    assert loaded(plan, tmp_path) == plan


def test_a_refusal_at_another_budget_keeps_what_it_says(tight: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = BudgetError(2, 3, "gaps", least=False, further=["a note"], ways=[Way("x", 1, "y")])

    def refuse(*_: object) -> Plan:
        raise refusal

    monkeypatch.setattr(Priced, "solve", refuse)
    monkeypatch.setattr(TracedStep, "all_notes", (RECOMPUTE_LEFT_OUT, "another"))
    with pytest.raises(BudgetError) as error:
        tight.at(1)
    assert (error.value.least, error.value.ways) == (False, refusal.ways)
    assert error.value.notes == ("a note", RECOMPUTE_LEFT_OUT)
