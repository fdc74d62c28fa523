"""A training step as pages, pictures and exports show it: what runs, and what is in memory meanwhile, by module."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from memopt.account.account import GRADIENTS, WORKSPACE

_BY_PARAMETERS = frozenset({"parameters", "optimizer state", GRADIENTS})
"""Rows of the account that are divided among modules in proportion to their parameters."""

WHY = {
    "saved": "the backward reads it, and the budget has room to hold it: recomputing it would add time",
    "recomputed": "the backward reads it, and its memory is needed for other values meanwhile; of all values to "
    "recompute, these add the least time that was found for this budget",
    "offloaded": "the backward reads it, and copying it to the host and back takes less time than recomputing it",
    "output": "the caller gets it",
    "gradient": "it is the gradient of a parameter or an input, which the optimizer reads",
    "temporary": "it is freed after its last reader, in the same half of the step that makes it",
    "alias": "it is a view of another value's memory and allocates none",
    "fused": "it runs as a part of the ops that read it, and allocates no memory",
    "input": "it exists before the step begins",
}
"""Why a plan treats a value as it does, in a clause for each fate of `Plan.networkx`."""


@dataclass(frozen=True)
class StepOp:
    """One operator of the captured step, and what the plan does with its result."""

    name: str
    """Name of its node in the captured graph."""
    operator: str
    """Name of the operator without namespace and overload: "addmm"."""
    half: str
    """"input", "forward" or "backward"."""
    module: str
    """Path of the module that called it, or whose call it differentiates; "" outside of submodules."""
    fate: str
    """What happens to its result: one of the fates of `Plan.networkx`."""
    value: str = ""
    """Dtype and shape of its result: "bf16[4, 512]"."""
    source: str = ""
    """The line of the user's code that called it, as "file:line"."""
    code: str = ""
    """The text of that line."""
    nbytes: int = 0
    """Bytes of memory that it allocates; 0 for a view."""
    seconds: float = 0.0
    """Seconds of one run, by the time model."""
    recomputed: int = 0
    """How many times it runs beyond the first."""


@dataclass(frozen=True)
class LiveRange:
    """A period in which a storage is in device memory: from the evaluation that makes it, or fetches it from the host,
    to the last one that needs it. A recomputed storage has several."""

    op: int
    """Number of the operator that makes the storage, in `Step.ops`."""
    nbytes: int
    kind: str
    """The row of the account to which its bytes belong."""
    first: int
    last: int
    """The positions in `StepMemory.evaluations` of the first and last evaluation, both included."""


@dataclass(frozen=True)
class Evaluation:
    """One run of an operator."""

    op: int
    """Number of the operator in `Step.ops`."""
    start: float
    """Seconds from the beginning of the step."""
    workspace_bytes: int = 0
    """Bytes that its kernel takes for itself meanwhile."""
    again: bool = False
    """Whether the operator ran before in this step: this is a recomputation."""


@dataclass(frozen=True)
class Copy:
    """One copy of an offloaded value to the host (`out=True`) or back: the index in `Step.ops` of the operator that
    made the value, its bytes, and start and end in seconds from the beginning of the step."""

    op: int
    nbytes: int
    out: bool
    start: float
    end: float


@dataclass(frozen=True)
class StepMemory:
    """Everything that a step holds at every moment. There is one moment for each evaluation, and a last one,
    `len(evaluations)`, for `optimizer.step()`."""

    resident: Mapping[str, int]
    """The bytes of the rows of the account that are held through forward and backward."""
    evaluations: tuple[Evaluation, ...]
    boundary: int
    """The number of evaluations that belong to the forward, which are the first ones."""
    ranges: tuple[LiveRange, ...]
    optimizer: Mapping[str, int]
    """The bytes of the rows of the account while the optimizer steps."""
    seconds: float
    """Seconds of forward and backward."""
    copies: tuple[Copy, ...] = ()

    @cached_property
    def live_bytes(self) -> tuple[int, ...]:
        """The bytes held at each moment."""
        return tuple(sum(rows.values()) for rows in self.held())

    def held(self) -> Iterator[Mapping[str, int]]:
        """For each moment, the bytes held by row of the account, including the workspace of the operator that runs."""
        change: list[Counter[str]] = [Counter() for _ in range(len(self.evaluations) + 1)]
        for kept in self.ranges:
            change[kept.first][kept.kind] += kept.nbytes
            change[kept.last + 1][kept.kind] -= kept.nbytes
        now = Counter(self.resident)
        for more, one in zip(change[:-1], self.evaluations, strict=True):
            now.update(more)
            yield {**now, WORKSPACE: one.workspace_bytes}
        yield self.optimizer

    @property
    def peak(self) -> int:
        """The first moment with the most bytes."""
        return max(range(len(self.live_bytes)), key=self.live_bytes.__getitem__)

    @property
    def peak_bytes(self) -> int:
        """The most bytes held at any moment."""
        return self.live_bytes[self.peak]

    def alive(self, moment: int) -> Iterator[tuple[int, str, int]]:
        """The number in `Step.ops` of an operator, a row of the account and bytes, for each storage that is alive at a
        moment and for the workspace of the operator that runs; nothing at the moment of the optimizer's step."""
        for now in self.evaluations[moment : moment + 1]:
            yield from ((one.op, one.kind, one.nbytes) for one in self.ranges if one.first <= moment <= one.last)
            yield now.op, WORKSPACE, now.workspace_bytes

    def rows(self, moment: int) -> Mapping[str, int]:
        """The rows of the account that are constant before the optimizer's step, or, at that moment, its rows."""
        return self.resident if moment < len(self.evaluations) else self.optimizer


@dataclass(frozen=True)
class Step:
    """The operators of a training step, and its memory with nothing recomputed (`plain`) and as planned."""

    ops: tuple[StepOp, ...]
    plain: StepMemory
    planned: StepMemory
    parameters: Mapping[str, int] = field(default_factory=dict)
    """Bytes of trained parameters by the path of their module; "" for those whose module is not known."""
    types: tuple[tuple[str, str, str, str, str], ...] = ()
    """Of each operator of the forward its name, operator and module, the dtype of its result, and the reason for it."""

    def by_module(self, memory: StepMemory, moment: int) -> dict[str, Counter[str]]:
        """The bytes of each module at a moment, by row of the account; "" is for bytes of no module. They add up to the
        bytes held, except for negative rows, which are left out."""
        found: dict[str, Counter[str]] = defaultdict(Counter)
        for row, nbytes in memory.rows(moment).items():
            for module, share in self.shares(row, nbytes):
                found[module][row] += share
        for op, row, nbytes in memory.alive(moment):
            found[self.ops[op].module][row] += nbytes
        kept_rows = {module: Counter({row: n for row, n in rows.items() if n > 0}) for module, rows in found.items()}
        return {module: rows for module, rows in kept_rows.items() if rows}

    def shares(self, row: str, nbytes: int) -> Iterator[tuple[str, int]]:
        """Each module's share of `nbytes` bytes of a row of the account; "" gets the bytes that belong to no module."""
        known = sum(self.parameters.values())
        if row not in _BY_PARAMETERS or not known:
            yield "", nbytes
            return
        whole = max(nbytes, known) if row == "parameters" else known
        left = nbytes
        for module, own in self.parameters.items():
            share = nbytes * own // whole
            left -= share
            yield module, share
        yield "", left
