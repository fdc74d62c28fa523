"""Regions behind graph breaks whose sizes or whose number change from call to call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import memopt
from memopt.capture.captured_call import CapturedCall, EagerCodeBytes, Passed, known_places, together
from memopt.planning.derived import METHOD
from memopt.run.control_paths import ControlPaths
from memopt.run.training import TrainingCalls
from tests.marks import slow
from tests.run.pieces import calls_of, latest
from tests.run.routed import Routed

pytestmark = pytest.mark.plans_always  # the plain steps would fit

X = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))


def routed(rows: Sequence[int], budget_gb: float = 1.0) -> tuple[Routed, TrainingCalls]:
    torch.manual_seed(0)
    model = Routed(len(rows)).train()
    model.rows = rows
    return model, calls_of(model, budget_gb, elsewhere_gb=0)


def capture(model: Routed, calls: TrainingCalls, rows: Sequence[int]) -> CapturedCall:
    model.rows = rows
    return calls.recorded.broken.capture(((X,), {}), "a break")


def check(model: Routed, calls: TrainingCalls, rows: Sequence[int]) -> None:
    """Compare the gradients of a call with those of the plain model."""
    model.rows = rows
    compare(model, calls, X)


def compare(model: Routed, calls: TrainingCalls, x: torch.Tensor) -> None:
    parameters = list(model.parameters())
    planned = torch.autograd.grad(calls(x), parameters, allow_unused=True)
    for found, expected in zip(planned, torch.autograd.grad(model(x), parameters, allow_unused=True), strict=True):
        assert (found is None) == (expected is None)
        assert found is None or torch.equal(found, expected)


def test_sizes_that_differ_between_runs_are_symbols_of_one_region() -> None:
    model, calls = routed((20, 30, 14))
    call = capture(model, calls, (20, 30, 14))
    experts = [run for run in call.runs if len(run.parameter_ids) == 4]
    counted = [[size for size, counts in zip(run.sizes, run.region.counted, strict=True) if counts] for run in experts]
    assert counted == [[], [30], [14]]
    assert experts[1].region is experts[2].region
    again = capture(model, calls, (10, 42, 12))
    third = capture(model, calls, (12, 36, 16))
    assert {run.region for run in third.runs} <= {run.region for run in (*call.runs, *again.runs)}


def test_larger_sizes_are_planned_with_a_margin_and_smaller_ones_run_by_the_same_plan() -> None:
    model, calls = routed((20, 30, 14))
    check(model, calls, (20, 30, 14))
    check(model, calls, (16, 40, 8))
    plans = calls.road.plans
    assert latest(calls).method == METHOD
    for rows in ((20, 36, 8), (18, 41, 5), (20, 44, 0)):
        check(model, calls, rows)
    assert calls.road.plans == plans
    check(model, calls, (2, 60, 2))
    assert calls.road.plans == plans + 1


def test_an_expert_that_was_not_hit_before_joins_the_plan_of_the_others() -> None:
    model, calls = routed((32, 32, 0))
    check(model, calls, (32, 32, 0))
    check(model, calls, (32, 0, 32))
    plans = calls.road.plans
    assert latest(calls).method == METHOD
    for rows in ((32, 32, 0), (32, 0, 32), (32, 32, 0)):
        check(model, calls, rows)
    assert calls.road.plans == plans


@pytest.mark.slow
def test_where_margins_do_not_fit_sizes_are_planned_as_they_were_seen() -> None:
    model, calls = routed((20, 30, 14))
    check(model, calls, (20, 30, 14))
    tight, planned = routed((20, 30, 14), latest(calls).smallest_gb() * 1.15)
    for rows in ((20, 30, 14), (14, 20, 30), (30, 14, 20), (2, 60, 2)):
        check(tight, planned, rows)
        assert latest(planned).ceiling_bytes <= latest(planned).budget_bytes
    (ways,) = (ways for _, ways in planned.recorded.broken.paths.paths.items())
    assert ways._margin == 1.0


def test_two_captures_together() -> None:
    model, calls = routed((20, 30, 14))
    call = capture(model, calls, (20, 30, 14))
    both = together(call, capture(model, calls, (20, 40, 4)))
    assert known_places(call.runs, both.runs) == tuple(range(len(call.runs)))
    experts = [run for run in both.runs if run.region.changing]
    at = experts[-1].region.counted.index(True)
    assert [run.most[at] for run in experts[-2:]] == [50, 18]  # a quarter above the larger one
    assert [run.sizes[at] for run in experts[-2:]] == [40, 4]


def test_two_captures_of_one_call_are_planned_for_the_more_that_is_held() -> None:
    """A model may keep a value of its first call: it then holds more in the second, and an output for longer."""
    model, calls = routed((20, 30, 14))
    call = capture(model, calls, (20, 30, 14))
    more = EagerCodeBytes(before=1 << 30, during_backward=1 << 20)
    held = replace(call.runs[0], eager=more, passed=Passed())
    ending = replace(call.ending, during=call.ending.during + 8)
    both = together(call, replace(call, runs=(held, *call.runs[1:]), ending=ending), margin=1.0)
    assert both.runs[0].eager == call.runs[0].eager | more
    assert [run.eager for run in both.runs[1:]] == [run.eager for run in call.runs[1:]]
    assert both.ending.during == call.ending.during + 8
    assert both.ending.before == call.ending.before
    assert [(run.most, run.sizes) for run in both.runs] == [(run.most, run.sizes) for run in call.runs]
    assert not any(run.passed.forward_only for run in both.runs)


def test_captures_whose_runs_have_other_numbers_say_nothing_that_depends_on_these() -> None:
    model, calls = routed((20, 30, 14))
    call = capture(model, calls, (20, 30, 14))
    assert any(run.passed.given for run in call.runs)
    assert any(run.passed.forward_only for run in call.runs)
    assert [run.passed for run in together(call, call).runs] == [run.passed for run in call.runs]
    both = together(call, replace(call, runs=(*call.runs[:1], *call.runs[2:])))
    assert not any(run.passed.given or run.passed.forward_only for run in both.runs)
    assert [run.passed.outputs for run in both.runs] == [run.passed.outputs for run in call.runs]


def test_a_forward_takes_one_of_two_ways_over_the_same_parameters() -> None:
    model, calls = routed((20, 30, 14))
    call = capture(model, calls, (20, 30, 14))
    other, region = list(call.runs), call.runs[0].region
    other[1] = replace(other[1], region=region)  # other operators on the parameters of the first expert
    ways = ControlPaths.of(call, ((X,), {}))
    ways.add(replace(call, runs=tuple(other)), ((X,), {}))
    assert [len(way.runs) for way in ways.calls] == [len(call.runs), len(call.runs)]
    assert ways.calls[0].runs[1].region is region
    assert ways.calls[1] is call


@pytest.mark.parametrize("samples", [48, slow(80)])
def test_calls_of_other_sizes_are_of_the_same_kind(samples: int) -> None:
    model, calls = routed((20, 30, 14))
    check(model, calls, (20, 30, 14))
    x = torch.randn(samples, 32, generator=torch.Generator().manual_seed(2))
    model.rows = (20, 20, samples - 40)
    for _ in range(2):
        compare(model, calls, x)
    assert len(calls.recorded.broken.paths.paths) == 1


class Packed(nn.Module):
    """A recurrent layer over packed sequences: Dynamo breaks the graph, and the region after the break has the longest
    sequence as a number where it is as long as the first batch's, and as a symbol elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.rnn, self.tags = nn.Embedding(50, 24), nn.GRU(24, 24, batch_first=True), nn.Linear(24, 50)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(self.words(ids), lengths, batch_first=True, enforce_sorted=False)
        hidden, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return cross_entropy(self.tags(hidden).flatten(0, 1), ids[:, : hidden.shape[1]].flatten())


class Halved(nn.Module):
    """A region after a graph break has other operators for even and odd sizes, which depend on values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.hidden, self.tags = nn.Embedding(50, 24), nn.Linear(24, 24), nn.Linear(24, 50)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        most = int(lengths.numpy().max())
        h = self.hidden(self.words(ids[:, :most])).tanh()
        h = h.unflatten(1, (2, -1)).sum(1) if h.shape[1] % 2 == 0 else h.cumsum(1)
        return self.tags(h).logsumexp(-1).mean()


@pytest.mark.parametrize("kind", [Packed, slow(Halved)])
@pytest.mark.parametrize("longest", [(12, 11, 10, 12, 9, 12), slow((11, 12, 11, 7, 8, 12, 11))])
def test_a_size_of_an_earlier_batch_comes_back(kind: type[nn.Module], longest: Sequence[int]) -> None:
    plain, planned = kind().train(), kind().train()
    exact = {"precision": "fp32", "allow": {"recompute", "reinplace"}}
    batches = [(torch.randint(0, 50, (4, 12)), torch.tensor([most, 5, 3, 7])) for most in longest]
    memopt.optimize(planned, 4, example_inputs=batches[0], **exact)
    for batch in batches:
        for model in (plain, planned):
            model.zero_grad()
            model(*batch).backward()
        assert torch.equal(plain(*batch), planned(*batch))
        for mine, theirs in zip(planned.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]


@torch.compiler.disable
def of_some_rows(h: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Code between regions that holds as many rows as its values choose."""
    numbers = chosen.nonzero()[:, 0]
    return h.index_add(0, numbers, h.index_select(0, numbers).sin().cos().sin())


class SomeRows(nn.Module):
    """The bytes between its regions depend on values, and no size in them does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(32, 256), nn.Linear(256, 256)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        h = of_some_rows(self.first(x).tanh(), chosen)
        return self.last(h).tanh().square().mean()


@pytest.mark.parametrize("spare_bytes", [0, 8 * 2**20])
def test_code_between_regions_that_holds_more_than_when_it_was_planned(spare_bytes: int) -> None:
    """A step that would exceed the budget is planned once more, and refused before its backward if nothing fits."""
    exact = {"precision": "fp32", "allow": {"recompute", "reinplace"}, "elsewhere_gb": 0.0}
    with memopt.measure_peak("cpu") as others:  # tensors of other tests
        pass
    x, few, all_rows = torch.randn(2048, 32), torch.arange(2048) < 64, torch.arange(2048) >= 0
    model, plain = SomeRows().train(), SomeRows().train()
    with pytest.raises(memopt.BudgetError) as refused:
        memopt.optimize(model, 1e-4, **exact)(x, few)
    budget_gb = refused.value.smallest_gb + spare_bytes / 2**30
    memopt.optimize(model, budget_gb, **exact)
    for chosen in (few, all_rows, few, all_rows):
        model.zero_grad()
        plain.zero_grad()
        plain(x, chosen).backward()
        with memopt.measure_peak("cpu") as peak:
            try:
                model(x, chosen).backward()
            except memopt.BudgetError as larger:
                assert not spare_bytes
                budget_gb = larger.smallest_gb
                break
            for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]
        assert peak.bytes - others.bytes <= budget_gb * 2**30
    assert spare_bytes or chosen is all_rows
