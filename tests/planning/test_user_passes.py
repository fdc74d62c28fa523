"""A user's own passes behind memopt's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest
from torch.fx import GraphModule

from memopt.capture.operators import NOTHING
from memopt.planning.terms import _RunJointPasses, _RunPasses, with_passes
from passes import Pass


@dataclass(frozen=True)
class OnOperators(Pass):
    """Changes nothing."""

    def rewrite(self, graph_module: GraphModule) -> GraphModule:
        return graph_module


@dataclass(frozen=True)
class OnJoint(OnOperators):
    """Changes nothing of a joint graph."""

    graph: ClassVar[Literal["operators", "joint"]] = "joint"


def test_each_pass_runs_on_the_graphs_that_it_is_written_for() -> None:
    found = with_passes(NOTHING, (OnOperators(), OnJoint()))
    assert found.deciders == (_RunPasses((OnOperators(),)),)
    assert found.joint == _RunJointPasses((OnJoint(),))


def test_without_passes_nothing_changes() -> None:
    assert with_passes(NOTHING, ()) == NOTHING


def test_what_is_no_pass_is_refused() -> None:
    with pytest.raises(TypeError):
        with_passes(NOTHING, (lambda graph: graph,))  # type: ignore[arg-type]
