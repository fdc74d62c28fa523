"""The stages of a pipeline that one rank holds: what they are given, and what their schedule holds beside their steps.

Microbatches are of one shape, so that all of it is known before the first is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from memopt.compat.exchanges import first_microbatch, microbatches_of, sends_kept, stages_of
from memopt.compat.fakes import FakeTensorMode
from memopt.compat.operators import tree_leaves
from memopt.planning.plan import Plan
from memopt.run.ranks import Ranks

_Kind: TypeAlias = tuple[tuple[int, ...], torch.dtype, bool]
"""The shape and dtype of a tensor, and whether it has a gradient."""


@dataclass(frozen=True)
class StageFacts:
    """What a stage does in a step."""

    number: int
    given: tuple[_Kind, ...]
    """The tensors of a microbatch that it is given."""
    returned: tuple[_Kind, ...]
    """Those that it returns."""
    elsewhere_bytes: int
    """What the schedule holds for the stage beside one microbatch: buffers for activations and gradients that arrive,
    and what was sent."""

    def example(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Tensors like those that it is given."""
        return tuple(
            torch.zeros(shape, dtype=dtype, device=device, requires_grad=has_gradient)
            for shape, dtype, has_gradient in self.given
        )


def facts_of_stages(schedule: Any, ranks: Ranks, args: tuple[Any, ...]) -> dict[int, StageFacts]:
    """The facts of this rank's stages, where the first stage of all is given `args`. All ranks call it together: what
    one stage returns is computed on fakes, and told to the rank of the next.

    Raises on all ranks where it raises on one of them.
    """
    stages = {stage.stage_index: stage for stage in stages_of(schedule)}
    given: tuple[_Kind, ...] = ()
    known: dict[int, tuple[tuple[_Kind, ...], tuple[_Kind, ...]]] = {}
    for number in range(next(iter(stages.values())).num_stages):
        returned: tuple[_Kind, ...] | None = None
        with ranks.together():
            if (stage := stages.get(number)) is not None:
                given = _kinds(first_microbatch(schedule, args)) if number == 0 else given
                returned = _returned(stage.submod, given, stage.device)
                known[number] = given, returned
        given = next(kinds for kinds in ranks.gathered(returned) if kinds is not None)
    return {
        number: StageFacts(number, *known[number], _elsewhere(schedule, stage, *known[number]))
        for number, stage in stages.items()
    }


def _returned(module: nn.Module, given: Sequence[_Kind], device: torch.device) -> tuple[_Kind, ...]:
    """What a stage returns for tensors of these kinds."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
        values = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, _ in given]
        for value, (_, _, has_gradient) in zip(values, given, strict=True):
            value.requires_grad_(has_gradient)
        return _kinds(module(*values))


def _kinds(values: Any) -> tuple[_Kind, ...]:
    """The kinds of the tensors in nested containers. Raises `TypeError` where there is anything else."""
    leaves = tree_leaves(values)
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            raise TypeError(f"a stage of a pipeline is given and returns tensors, not {type(leaf).__name__}")
    return tuple((tuple(leaf.shape), leaf.dtype, leaf.requires_grad) for leaf in leaves)


def _elsewhere(schedule: Any, stage: Any, given: Sequence[_Kind], returned: Sequence[_Kind]) -> int:
    """The bytes that the schedule holds beside the step of one microbatch of a stage."""
    many, sent = microbatches_of(schedule), sends_kept(schedule)
    from_before = 0 if stage.is_first else _bytes(given)
    to_next = 0 if stage.is_last else _bytes(returned)
    arriving = (many - 1) * from_before + many * to_next  # the microbatch's own input is one of its step
    return arriving + sent * (from_before + to_next)


def _bytes(kinds: Sequence[_Kind]) -> int:
    return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype, _ in kinds)


@dataclass(frozen=True)
class Load:
    """What a planned stage holds on the device of its rank."""

    fixed_bytes: int
    """Throughout a step: parameters, gradients, the optimiser's state, and what the schedule holds for it."""
    held_bytes: int
    """For each microbatch whose backward is to come."""
    most_bytes: int
    """The most that one microbatch takes while it runs, beside what is fixed."""

    @staticmethod
    def of(plan: Plan, elsewhere_bytes: int) -> Load:
        """The load of a stage by its plan, which has those bytes elsewhere beside what the schedule holds for it."""
        beside = plan.account.other_forwards + elsewhere_bytes
        fixed = plan.account.resident_bytes - beside
        return Load(fixed, plan.held_bytes, plan.ceiling_bytes - beside - fixed)


@dataclass(frozen=True)
class Together:
    """The stages of one rank, of which one runs at a time while microbatches of all are in flight."""

    moments: tuple[tuple[int, Mapping[int, int]], ...]
    """The stage that runs, and the microbatches in flight of each stage: for all forwards and backwards of a step."""

    def forwards(self, number: int, loads: Mapping[int, Load]) -> int:
        """The most microbatches in flight while a stage runs, those of others as so many like its own."""
        own = max(1, loads[number].held_bytes)
        return max(-(-_held(waiting, loads) // own) for running, waiting in self.moments if running == number)

    def peak_bytes(self, loads: Mapping[int, Load]) -> int:
        """The most bytes that the stages hold together."""
        fixed = sum(load.fixed_bytes for load in loads.values())
        return fixed + max(
            _held(waiting, loads) - loads[running].held_bytes + loads[running].most_bytes
            for running, waiting in self.moments
        )


def _held(waiting: Mapping[int, int], loads: Mapping[int, Load]) -> int:
    return sum(many * loads[number].held_bytes for number, many in waiting.items())
