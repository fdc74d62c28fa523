"""The user's own passes, added to the rewriting of a model's graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx

from memopt.capture.operators import DecideJoint, Decision, OperatorGraph, Rewriting
from passes import Pass, Pipeline, passes_for


@dataclass(frozen=True)
class RunPasses:
    """Decides that passes run on the operator graph of every region."""

    passes: tuple[Pass, ...]

    def __call__(self, graph: OperatorGraph) -> Decision:
        return Decision(Pipeline(self.passes))


@dataclass(frozen=True)
class RunJointPasses:
    """Decides that passes run on every joint graph, behind those of another decision."""

    passes: tuple[Pass, ...]
    before: DecideJoint | None = None

    def __call__(self, joint: fx.GraphModule, forward_outputs: int, exact: frozenset[str]) -> Pipeline:
        first = () if self.before is None else (self.before(joint, forward_outputs, exact),)
        return Pipeline((*first, *self.passes))


def with_passes(rewriting: Rewriting, passes: Sequence[Pass]) -> Rewriting:
    """The rewriting with the user's passes behind all others, and their names before those of its levers. Raises
    `TypeError` for an object that is no `Pass`."""
    on_operators, on_joint = passes_for("operators", passes), passes_for("joint", passes)
    if on_operators:
        rewriting = replace(rewriting, deciders=(*rewriting.deciders, RunPasses(on_operators)))
    if on_joint:
        rewriting = replace(rewriting, joint=RunJointPasses(on_joint, rewriting.joint))
    names = dict.fromkeys(user_pass.name for user_pass in passes)
    return replace(rewriting, levers=(*names, *rewriting.levers))
