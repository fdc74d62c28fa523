"""The account of a training step: the bytes of each row that no schedule changes; and the bytes alive at a schedule's
peak, each counted in one row of a table."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from memopt.account.card_state import CardState
from memopt.account.optimizer_account import OptimizerAccount, optimizer_account
from memopt.account.optimizer_trial import LiveOptimizer
from memopt.compat.tensors import bytes_of_storages, is_replicated, shard_of
from memopt.device.devices import device_of
from memopt.device.hardware import Hardware
from memopt.solver import Link, RematProblem, Schedule, simulate
from memopt.solver.simulator import lifetimes
from memopt.training_state import undo_bytes

OUTPUTS, GRADIENTS = "outputs", "gradients"
"""The rows of what the forward returns, and of the parameters' gradients."""
# Bytes for scalars and small constants that torch holds beside the graph's tensors.
BOOKKEEPING_BYTES = 16 * 1024
_COPIES = 2
"""The copies of small buffers on a GPU that undo a failed step: one made by each call, one by `TrainStep`."""


@dataclass(frozen=True)
class Account:
    """The bytes that every schedule of a step holds, row by row, and those that the optimizer adds afterwards."""

    parameters: int
    buffers: int
    """On a GPU including copies of the small ones, from which they are restored if an allocation fails in a call."""
    inputs: int
    optimizer_state: int
    optimizer_temporaries: int
    gradients: int
    """The gradients of the parameters that get any: made by the backward, or held from its start (`gradients_held`)."""
    reserve: int
    """Scalars; on a GPU also the workspaces of libraries, and the context."""
    gradients_held: bool = False
    expandable: bool = False
    """Whether torch's allocator for CUDA has expandable segments in the step."""
    may_expand: bool = False
    """Whether a plan may turn expandable segments on."""
    other_forwards: int = 0
    """Bytes held by other forwards whose backward is still to come."""
    elsewhere: int = 0
    """Bytes on the device that are no part of the step: other models, copies, caches (`memopt.account.elsewhere`)."""
    meanwhile: int = 0
    """Bytes left for what is allocated and freed between the forward and the backward: by the caller's own code, such
    as a loss outside of the model, and by the steps of other models."""
    buckets: int = 0
    """The buckets of `DistributedDataParallel`; gradients that are views of them are not among `gradients`."""
    into_buckets: int = 0
    """Bytes of `gradients` that lie in the buckets once they are exchanged, which is before the optimizer steps."""
    output_clones: int = 0
    """Clones of the model's outputs that `DistributedDataParallel` returns."""
    lowering: int = 0
    """Bytes that compiling the graphs adds to the schedule's peak; negative where it saves some."""
    context: int = 0
    """The part of `reserve` that torch's allocator does not count, on a GPU; 0 on the CPU."""
    rounding: int = 0
    """Bytes by which the allocator rounds up requests; its own count includes them."""
    fragmentation: int = 0
    """Bytes that the allocator needs beyond those it hands out, for the gaps between blocks."""
    gathered: int = 0
    """Under FSDP2 on a cluster, whole parameters: of the root, of one block, and of the next one."""
    kept: int = 0
    """Under FSDP2 on a cluster, the bytes beyond `gathered` of blocks that stay gathered until their backward."""
    exchange: int = 0
    """Under FSDP2 on a cluster, the buffer from which a block's gradients are reduced."""
    unforeseen: int = 0
    """Bytes left free because an allocation failed in an earlier step, which needed more than its plan said."""
    tolerance: int = 0
    """Bytes left free for tensors outside of the step that appear unnoticed, since they are too small for a new search
    of the device; 0 where the device is not searched."""
    trained: tuple[int, ...] = field(default=(), repr=False)
    """The bytes of each parameter that gets a gradient, in the order in which the optimizer steps them."""
    optimizer_guess: str = field(default="", repr=False)
    """Why the optimizer's rows are a high estimate; empty where they are counted."""
    state_blocks: tuple[int, ...] = field(default=(), repr=False)
    """The bytes of each tensor of `optimizer_state` on a GPU, in the order in which the optimizer makes them."""
    card_state: CardState | None = field(default=None, repr=False)
    """The blocks that torch's allocator held when the step was planned, if it was planned for the card that this
    process uses: many of the bytes above lie in them already. None otherwise."""

    @property
    def _fixed_rows(self) -> dict[str, int]:
        return {
            "parameters": self.parameters,
            "buffers": self.buffers,
            "inputs": self.inputs,
            "optimizer state": self.optimizer_state,
            "buckets": self.buckets,
            "clones of outputs": self.output_clones,
            "forwards in waiting": self.other_forwards,
            "elsewhere": self.elsewhere,
            "reserve": self.reserve,
            "rounding of blocks": self.rounding,
            "fragmentation": self.fragmentation,
            "unforeseen": self.unforeseen,
            "tolerance": self.tolerance,
        }

    @property
    def resident_rows(self) -> dict[str, int]:
        """The bytes, by row, that are held from the first op of the forward to the last of the backward."""
        lowering = "added by lowering" if self.lowering > 0 else "less by lowering"
        held = self.gradients if self.gradients_held else 0
        whole = {"gathered parameters": self.gathered + self.kept, "gradients being reduced": self.exchange}
        return {**self._fixed_rows, **whole, lowering: self.lowering, GRADIENTS: held}

    def optimizer_rows(self, outputs: int) -> dict[str, int]:
        """The bytes, by row, while the optimizer steps and the caller still holds outputs of `outputs` bytes."""
        return {
            **self._fixed_rows,
            GRADIENTS: self.gradients - self.into_buckets,
            OUTPUTS: outputs,
            "optimizer temporaries": self.optimizer_temporaries,
        }

    @property
    def resident_bytes(self) -> int:
        """Bytes held from the first op of the forward to the last of the backward."""
        return sum(self.resident_rows.values())

    @property
    def caching(self) -> bool:
        """Whether torch's caching allocator manages the step's memory (`Device.caching`): only then `context` is above
        0. What the step needs beyond the bytes requested is then found by a replay of its allocations and frees."""
        return self.context > 0

    @property
    def expands(self) -> bool:
        """Whether the plan turns expandable segments on."""
        return self.expandable and self.may_expand

    @property
    def by_segments(self) -> tuple[Account, ...]:
        """The accounts to plan with: by ordinary and by expandable segments where a plan may choose, else this one."""
        if not (self.caching and self.may_expand):
            return (self,)
        return tuple(replace(self, expandable=expandable, may_expand=False) for expandable in (False, True))

    @property
    def uncounted_bytes(self) -> int:
        """The bytes of the account that `torch.cuda.max_memory_allocated` does not include."""
        return self.context + self.fragmentation

    def optimizer_step_bytes(self, outputs: int) -> int:
        """The peak in bytes of `optimizer.step()` while the caller holds the inputs, and outputs of `outputs` bytes."""
        return sum(self.optimizer_rows(outputs).values())


Count = Callable[[Any, Iterable[torch.Tensor], str, Collection[torch.Tensor]], OptimizerAccount]
"""Counts what an optimizer of these parameters holds on a type of device, as `optimizer_account`."""
Trains = Callable[[torch.Tensor], bool]
"""Whether a trainable parameter gets a gradient."""


def account_of(
    model: nn.Module,
    inputs: Iterable[torch.Tensor],
    optimizer: Any,
    card: Hardware,
    trains: Trains = lambda parameter: True,
    steps: Trains | None = None,
    live: LiveOptimizer | None = None,
    count: Count = optimizer_account,
) -> Account:
    """The account of training `model` on `inputs` with `optimizer` (class, instance, name or None) on a device.

    `trains` says which trainable parameters get a gradient in this step. `steps`, by default the same, says which may
    have one when the optimizer steps, from this call or another; for all others, the optimizer's rows have only state
    that an instance already holds. `live` describes the optimizer of this class that will step the parameters, if it
    exists already. `count` returns the bytes that an optimizer holds.

    Sizes are rounded up to the device's blocks, on CUDA of 512 bytes. The allocator's further rounding and
    fragmentation are 0 here; they follow from a schedule (`memopt.planning.joined.on_card`)."""
    device = device_of(card)
    block = device.block_bytes
    parameters = list(model.parameters())
    steps = steps or trains
    trainable: list[torch.Tensor] = [parameter for parameter in parameters if parameter.requires_grad]
    trained, stepped = ([parameter for parameter in trainable if gets(parameter)] for gets in (trains, steps))
    idle = [parameter for parameter in trainable if not steps(parameter)]
    if live is not None:
        optimizer, trained, stepped = live.like(optimizer), live.in_order(trained), live.in_order(stepped)
    optimizer_bytes = count(optimizer, stepped, device.type, idle)
    # Sequence parallelism leaves on each rank a part of the gradient of a parameter that every rank has whole: the
    # optimizer sums these over ranks, at most three at once.
    summed = max((shard_of(one).nbytes for one in trained if is_replicated(one)), default=0)
    home, (reserve, context) = parameters[0].device, _reserve(card)
    own = distinct_bytes([*parameters, *model.buffers()], block)
    return Account(
        parameters=distinct_bytes(parameters, block),
        buffers=own - distinct_bytes(parameters, block) + (0 if device.is_host else _COPIES * undo_bytes(model, block)),
        inputs=distinct_bytes((given for given in inputs if given.device.type in (home.type, "meta")), block),
        optimizer_state=optimizer_bytes.state_bytes,
        optimizer_temporaries=optimizer_bytes.step_temporary_bytes + 3 * summed,
        gradients=distinct_bytes(trained, block),
        reserve=reserve,
        context=context,
        trained=tuple(parameter.nbytes for parameter in trained),
        state_blocks=optimizer_bytes.state_blocks,
        optimizer_guess=optimizer_bytes.guess,
    )


def _reserve(card: Hardware) -> tuple[int, int]:
    """The rows `reserve` and `context` of an account, which depend on its card alone."""
    device = device_of(card)
    context = card.context_bytes if device.caching else 0
    return BOOKKEEPING_BYTES + context + sum(device.library_workspaces(card)), context


def for_card(account: Account, card: Hardware) -> Account:
    """The account of the same step alone on another card of the same kind, without the allocator's overhead."""
    alone = replace(account, elsewhere=0, tolerance=0, unforeseen=0, rounding=0, fragmentation=0, card_state=None)
    reserve, context = _reserve(card)
    return replace(alone, reserve=reserve, context=context)


def in_blocks(sizes: Iterable[int], device: Hardware | torch.device) -> int:
    """The sum of sizes in bytes, each rounded up as the allocator of the device does."""
    block = device_of(device).block_bytes
    return sum(-(-size // block) * block for size in sizes)


def distinct_bytes(tensors: Iterable[torch.Tensor], block_bytes: int = 1) -> int:
    """The bytes of the storages of `tensors`, each counted once and rounded up to multiples of `block_bytes`. A tensor
    subclass counts as the tensors inside it, a sparse tensor as its indices and values."""
    sizes = bytes_of_storages(tensors)
    return sum(sizes) if block_bytes == 1 else sum(-(-nbytes // block_bytes) * block_bytes for nbytes in sizes)


ANY_LINK = Link(math.inf)
"""An infinitely fast link, for simulations of which only the bytes are needed: these do not depend on its rate."""

TEMPORARIES, WORKSPACE = "backward temporaries", "workspace"
SAVED, RECOMPUTED, FETCHED = "saved activations", "recomputed activations", "fetched activations"
BROUGHT = "fetched parameters"
OPTIMIZER_STEP = "optimizer.step()"
EAGER = "eager_code"
"""The name of ops that stand for what eager code between captured regions holds."""
BETWEEN_REGIONS = "between the regions"
MEANWHILE = "until the backward"
"""The row of what other code takes between the forward and the backward."""


@dataclass(frozen=True)
class Breakdown:
    """The peak of a step in bytes, the op that runs at that moment (`at`), and the rows that add up to the peak."""

    peak_bytes: int
    at: str
    rows: tuple[tuple[str, int], ...]


def breakdown(problem: RematProblem, schedule: Schedule, account: Account) -> Breakdown:
    """The rows of memory, in bytes, at the step's peak: in the forward, the backward or the optimizer's step. Resident
    bytes come from `account`; `problem.resident_bytes` is ignored."""
    simulation = simulate(problem, schedule, ANY_LINK)
    moving = simulation.peak_bytes - problem.resident_bytes
    graph_peak = account.resident_bytes + moving
    in_step = account.optimizer_rows(problem.output_bytes)
    optimizer_peak = sum(in_step.values())
    if optimizer_peak > graph_peak:
        return Breakdown(optimizer_peak, OPTIMIZER_STEP, _ordered(in_step))
    rows = dict(account.resident_rows)
    for name, nbytes in live_bytes_by_kind(problem, schedule, simulation.peak_position).items():
        rows[name] = rows.get(name, 0) + nbytes
    at = problem.ops[schedule.evaluations[simulation.peak_position]].name
    return Breakdown(graph_peak, at, _ordered(rows))


def live_bytes_by_kind(problem: RematProblem, schedule: Schedule, position: int) -> dict[str, int]:
    """Bytes alive while evaluation `position` runs, by row: of storages (`kind_of`), workspace, and other code."""
    op_now = problem.ops[schedule.evaluations[position]]
    totals: Counter[str] = Counter()
    for storage, evaluation in live_versions(problem, schedule, position):
        maker = problem.producer[storage]
        first = schedule.evaluations.index(maker) == evaluation
        kind = kind_of(problem, storage, first=first, fetched=schedule.evaluations[evaluation] != maker)
        totals[kind] += problem.storages[storage].bytes
    if op_now.name == EAGER:
        row = BETWEEN_REGIONS
    else:
        row = MEANWHILE if op_now.workspace_bytes and op_now.is_receipt else WORKSPACE
    totals[row] += op_now.workspace_bytes
    return dict(totals)


def kind_of(problem: RematProblem, storage: int, *, first: bool, fetched: bool) -> str:
    """The row of the breakdown in which a live storage counts. `first`: its contents come from the first evaluation of
    its producer, not from a recomputation. `fetched`: its contents were copied back from the host."""
    maker = problem.producer[storage]
    if problem.ops[maker].name == EAGER:
        return BETWEEN_REGIONS
    if problem.storages[storage].home:
        return BROUGHT
    in_forward = maker < problem.forward_ops
    if problem.storages[storage].kept and first:
        return OUTPUTS if in_forward or problem.ops[maker].is_receipt else GRADIENTS
    if fetched:
        return FETCHED
    if not in_forward:
        return TEMPORARIES
    return SAVED if first else RECOMPUTED


def live_versions(problem: RematProblem, schedule: Schedule, position: int) -> Iterator[tuple[int, int]]:
    """The storages alive while evaluation `position` runs. Each comes with the position of the evaluation that made its
    current contents; if these were copied back from the host, with the position before which that copy began."""
    for storage, born, dies in lifetimes(problem, schedule.evaluations, schedule.offloads):
        if born <= position <= dies:
            yield storage, born


def _ordered(rows: dict[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple((name, size) for name, size in sorted(rows.items(), key=lambda row: -row[1]) if size)
