"""Which frozen parameters lie on the host: how many choices are searched for a plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from memopt.compat.host import HOST
from memopt.device import Hardware
from memopt.device.cpu import CPU
from memopt.planning import terms as model_terms
from memopt.planning.derived import with_kept_outputs
from memopt.planning.options import check_options
from memopt.planning.planner import Request
from memopt.planning.stages import Priced, StepOfPlan
from memopt.planning.terms import ModelTerms
from passes.ops.offload_ops import lend
from tests.end_to_end.hosted import EXPERTS, frozen_bytes, linked, options
from tests.linked import linked_cpu
from tests.planned import ACCOUNT, captured

__all__ = ["linked"]


@pytest.mark.slow
def test_the_smallest_budget_of_a_choice_that_is_not_taken_is_not_looked_for(
    linked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes as long as a plan, and a refusal names only that of the largest choice."""
    budget_gb = EXPERTS.between(0.1)
    refused: list[Any] = []
    refusal = Request.refusal
    monkeypatch.setattr(Request, "refusal", lambda self, joined: refused.append(joined) or refusal(self, joined))
    plan = memopt.plan(EXPERTS.make(), budget_gb, EXPERTS.batch(), **options())
    assert plan.hosted_bytes > 0
    hosting = [joined for joined in refused if joined.problem.home_bytes > 0]
    assert len(hosting) <= 1, "choices that one operator, or the optimiser's step, is too large for"


def test_what_later_steps_need_has_parameters_on_the_host(linked: None) -> None:
    """A refusal names it, where a caller still holds the outputs of the step before."""
    plan = EXPERTS.roomy()
    assert plan.hosted_bytes == 0
    assert with_kept_outputs(Priced(plan.priced, plan.account)) < frozen_bytes(EXPERTS.make())


def test_what_is_hopeless_does_not_depend_on_the_allocator() -> None:
    """An account may have the overhead of another budget's plan: this budget's is not known yet."""
    joined, budget_bytes = captured().problem, 2**17
    assert Request(ACCOUNT, 2**12).is_hopeless(joined)
    assert not Request(ACCOUNT, budget_bytes).is_hopeless(joined)
    assert not Request(replace(ACCOUNT, fragmentation=budget_bytes), budget_bytes).is_hopeless(joined)


@pytest.mark.slow
def test_what_is_said_of_other_ways_has_the_parameters_on_the_device(
    linked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recipes are written by hand, and the step under all levers is priced before parameters go to the host."""
    plan = memopt.plan(EXPERTS.make(), EXPERTS.between(0.1), EXPERTS.batch(), **options())
    assert plan.hosted_bytes > 0
    assert isinstance(plan.source, StepOfPlan)
    whole = plan.at(1)
    assert whole.hosted_bytes == 0
    assert plan.recipes() == whole.recipes()
    seen: list[Any] = []
    monkeypatch.setattr("memopt.planning.stages.on_cards", lambda steps, larger: seen.extend(steps.items()) or ())
    tightest = Priced(whole.source.priced, whole.account)  # type: ignore[union-attr]
    replace(plan, source=replace(plan.source, tightest=lambda batches: tightest)).cards()
    (hosting, _), (step, _) = seen
    assert (hosting, step) == (plan.priced, whole.priced)
    assert len({account.parameters + step.problem.problem.home_bytes for step, account in seen}) == 1


@pytest.mark.parametrize(("most", "free"), [(1 << 40, 1000), (1000, 1 << 40)])
def test_memory_that_parameters_have_on_the_host_is_room_for_them(
    most: int, free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def linked_with_room(device: torch.device) -> Hardware:
        return replace(linked_cpu(device), host_bytes=most)

    monkeypatch.setattr(model_terms, "hardware_of", linked_with_room)
    monkeypatch.setattr(type(CPU), "free_bytes", lambda self, device: free)
    values = lend(torch.ones(25_000), HOST)
    room = ModelTerms(nn.Linear(2, 2), check_options(1.0)).card.link.host_bytes
    assert room is not None
    assert values.nbytes < room
