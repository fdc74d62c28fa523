"""What the plan of a call depends on, apart from the call itself: the terms of its model, and its situation."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import fx, nn

from memopt.account.sharded import Sharding
from memopt.capture.operators import DecideJoint, Decision, OperatorGraph, Rewriting
from memopt.compat.host import HOST
from memopt.compat.operators import without_autocast
from memopt.device import Hardware, calibrated_hardware, hardware, hardware_of
from memopt.device.devices import device_here, device_of
from memopt.errors import GIB
from memopt.levers import lever_sets, precision_rewriting
from memopt.levers.all import REINPLACE
from memopt.planning.options import Options
from memopt.progress import stage
from passes import Pass, Pipeline, passes_for
from passes.ops.fp8_formats import histories_of
from passes.ops.offload_ops import host_memory

_HOST_MARGIN = 0.1
"""The share of the host's free memory that a plan leaves free where the user gives no `host_gb`."""


@dataclass(frozen=True)
class Buckets:
    """The buckets from which `DistributedDataParallel` exchanges gradients, and how it uses them."""

    nbytes: int
    views: bool = False
    """Gradients are views of the buckets once they are exchanged."""
    hold_gradients: bool = False
    """Each gradient becomes such a view as soon as it is computed, or is one already."""
    clone_outputs: bool = False
    """The wrapper returns clones of the model's outputs."""


@dataclass(frozen=True)
class Situation:
    """The circumstances of a training call when its forward begins, by which its plan is chosen."""

    gradients_held: bool = False
    """Gradients are there before the step: gradient accumulation."""
    other_forwards: int = 0
    """Bytes that forwards hold whose backward is still to come."""
    to_come: int = 0
    """The number of further forwards of this model before its first backward, each of which may hold as much as this
    one; their gradients are among `other_forwards`."""
    meanwhile: int | None = 0
    """Bytes that the caller's own code takes, and frees, between the forward and its backward, in addition to the
    gradients of the outputs; None: those that were seen, or as many as are guessed for a loss outside of the model."""
    for_other_models: int | None = 0
    """Bytes that steps of other models take between the forward and its backward, which are left free as far as the
    budget allows; None: they are not known yet, and the forward holds as little as it can."""
    elsewhere: int | None = None
    """The bytes of other things on the device that the plan must leave room for; None: those that are found there."""
    hooked: frozenset[int] = frozenset()
    """The `id`s of parameters whose gradients hooks wait for: those are not added in place."""
    buckets: Buckets | None = None
    """The buckets of the `DistributedDataParallel` around the model; None without one."""

    @property
    def alone(self) -> Situation:
        """A copy without what lies in memory beside the step: other forwards, what the caller's code takes, and what
        else is on the device. Situations that differ in these alone have equal copies."""
        return replace(self, other_forwards=0, to_come=0, meanwhile=None, elsewhere=None)


@dataclass(frozen=True, eq=False)
class ModelTerms:
    """Facts behind all plans of a model, derived from the user's options."""

    model: nn.Module
    options: Options

    @cached_property
    def histories(self) -> str:
        """The prefix by which the scale histories of the model's 8-bit layers are named."""
        return histories_of(self.model).prefix

    def device(self) -> torch.device:
        """The device of the model; for a model on "meta" the one that would run it here, since tracing on "meta" picks
        other attention kernels and lacks some gradients."""
        home = next(self.model.parameters()).device
        if home.type != "meta":
            return home
        return device_here()

    @cached_property
    def backend(self) -> str:
        """The backend that runs planned graphs: "aten" or "inductor"."""
        return self.options.backend_on(self.device().type)

    def call_backend(self, *, whole: bool) -> str:
        """The backend of a call; `whole` says that the call is one region. For a call of several regions in a process
        group it is "aten": ranks tell each other what compiled code holds only for calls of one region."""
        return self.backend if whole or not has_ranks() else "aten"

    @property
    def fuses(self) -> bool:
        """Whether the backend fuses elementwise operators into their readers, so that their results take no memory."""
        return self.backend == "inductor"

    @cached_property
    def card(self) -> Hardware:
        """The hardware that the step is planned for, with the bytes that offloads may take on the host."""
        card, room = self._card, self.options.host_bytes
        if room is None and self.options.hardware is None and card.link.bytes_per_second > 0:
            free, held = device_of(HOST).free_bytes(HOST), host_memory(card.device_type).mapped_bytes
            left = 0 if free is None else int(free * (1 - _HOST_MARGIN))
            left = held + (left - left % GIB if left >= GIB else left)  # so that the next run finds its plan
            most = card.link.host_bytes or 0
            if free is not None and most > left:
                room = left
            elif most < held:
                room = held
        return card if room is None else replace(card, host_bytes=room)

    @property
    def _card(self) -> Hardware:
        if self.options.calibrate:
            with stage("timing the device"):
                return calibrated_hardware(self.device())
        return hardware(self.options.hardware) if self.options.hardware else hardware_of(self.device())

    @cached_property
    def rewriting(self) -> Rewriting:
        """The rewriting that every lever set starts from: the precision, and whether results are written in place."""
        by_types = precision_rewriting(self.options.precision, self.card)
        return replace(by_types, reinplace=REINPLACE.name in self.options.allow, card=self.absent_card)

    @property
    def absent_card(self) -> str:
        """The name of the card that is planned for, if steps are traced on a device of another kind; else ""."""
        return "" if self.card.device_type == self.device().type else self.card.name

    @cached_property
    def lever_sets(self) -> tuple[Rewriting, ...]:
        """The sets of levers to try, as rewritings, each with one more, the cheapest first; all with user passes."""
        levers = [lever for lever in self.options.levers if lever.name not in self.idle_levers]
        found = lever_sets(self.rewriting, levers, self.card, histories=self.histories)
        passes = self.options.passes
        return tuple(with_passes(rewriting, passes) if passes else rewriting for rewriting in found)

    @cached_property
    def idle_levers(self) -> frozenset[str]:
        """The names of allowed levers that are not tried, as they need 16 bits and precision "auto" gives fp32 here."""
        if self.options.precision != "auto" or self.rewriting.autocast is not None:
            return frozenset()
        return frozenset(lever.name for lever in self.options.levers if lever.graph and lever.graph.needs_low)

    def types(self) -> AbstractContextManager[None]:
        """Context in which the caller's autocast is off, if the plan decides dtypes itself; else a null context."""
        return without_autocast() if self.rewriting.replaces_autocast else nullcontext()

    @cached_property
    def sharding(self) -> Sharding | None:
        """How the parameters are spread over the cluster that is planned for; None for one card."""
        terms = self.options.cluster
        return None if terms is None else Sharding.of(self.model, terms.cluster, terms.dtype)


@dataclass(frozen=True)
class _RunPasses:
    """Decides that passes run on the operator graph of every region."""

    passes: tuple[Pass, ...]

    def __call__(self, graph: OperatorGraph) -> Decision:
        return Decision(Pipeline(self.passes))


@dataclass(frozen=True)
class _RunJointPasses:
    """Decides that passes run on every joint graph, after those of another decision."""

    passes: tuple[Pass, ...]
    before: DecideJoint | None = None

    def __call__(self, joint: fx.GraphModule, forward_outputs: int, exact: frozenset[str]) -> Pipeline:
        first = () if self.before is None else (self.before(joint, forward_outputs, exact),)
        return Pipeline((*first, *self.passes))


def with_passes(rewriting: Rewriting, passes: Sequence[Pass]) -> Rewriting:
    """The rewriting that also runs the user's passes, after all others. Raises `TypeError` for what is no `Pass`."""
    on_operators, on_joint = passes_for("operators", passes), passes_for("joint", passes)
    if on_operators:
        rewriting = replace(rewriting, deciders=(*rewriting.deciders, _RunPasses(on_operators)))
    if on_joint:
        rewriting = replace(rewriting, joint=_RunJointPasses(on_joint, rewriting.joint))
    names = dict.fromkeys(user_pass.name for user_pass in passes)
    return replace(rewriting, levers=(*names, *rewriting.levers))


def has_ranks() -> bool:
    """Whether several processes train the model together: a process group of more than one rank."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
