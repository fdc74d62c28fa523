"""Checks a plan's account against a training step that really runs: each row's predicted and measured bytes."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from memopt.account.account import ANY_LINK
from memopt.account.optimizer_trial import optimizer_restored, state_tensors
from memopt.capture.inputs import Call, batch_call, check_device, tensors_in
from memopt.checks.measured_step import bytes_on, optimised
from memopt.compat.host import MemoryEvents
from memopt.device.devices import device_of
from memopt.meter import start_with_resident
from memopt.planning.plan import Plan
from memopt.planning.schedule_parts import held_storages
from memopt.price.price import RETURN_OUTPUTS
from memopt.progress import stage
from memopt.run.loss import scalar_loss
from memopt.show.report import as_text, new_table
from memopt.solver import simulate
from memopt.training_state import TrainingState
from memopt.units import size

Rows = dict[str, int]
# The mark that ends a phase in the recording: an allocation at an impossible address, of a size that no tensor has.
_MARK_ADDRESS, _MARK_BYTES = 1, (1 << 61) - 1


@dataclass(frozen=True)
class AccountRow:
    """One row of a step's account: the bytes that the plan predicted, and those that `memopt.check` measured."""

    name: str
    predicted_bytes: int
    measured_bytes: int

    @property
    def difference_bytes(self) -> int:
        """Predicted less measured bytes: negative where the plan predicted too little."""
        return self.predicted_bytes - self.measured_bytes

    @property
    def difference(self) -> float:
        """The difference as a fraction of the measured bytes; infinite where these are 0."""
        if not self.difference_bytes:
            return 0.0
        return self.difference_bytes / self.measured_bytes if self.measured_bytes else math.inf


@dataclass(frozen=True)
class AccountCheck:
    """The account of a plan compared with a step that ran, row by row.

    `rows` overlap: "forward and backward", for instance, includes the gradients and what the forward saved.
    `total` is the peak of the whole step."""

    model: str
    optimizer: str
    device: str
    rows: tuple[AccountRow, ...]
    total: AccountRow

    @property
    def under(self) -> bool:
        """Whether the step held more than the plan predicted."""
        return self.total.difference_bytes < 0

    @property
    def worst(self) -> AccountRow:
        """The one of all rows, `total` included, whose predicted and measured bytes differ most."""
        return max((*self.rows, self.total), key=lambda row: abs(row.difference_bytes))

    def row(self, name: str) -> AccountRow:
        """The row of that name. Raises `KeyError` where there is none."""
        return {row.name: row for row in (*self.rows, self.total)}[name]

    def table(self) -> str:
        """All rows with predicted and measured bytes and their difference, as text."""
        title = f"{self.model} with {self.optimizer} on {self.device}: predicted, and measured in a step"
        table = new_table(title, "row", right=("predicted", "measured", "difference", ""))
        for row in self.rows:
            table.add_row(*_cells(row))
        table.add_section()
        table.add_row(*_cells(self.total))
        return as_text(table)

    def __str__(self) -> str:
        return self.table()


def _cells(row: AccountRow) -> tuple[str, ...]:
    apart = row.difference_bytes
    share = f"{row.difference:+.2%}" if apart and row.measured_bytes else ""
    difference = f"{'+' * (apart > 0)}{size(apart)}"
    return row.name, size(row.predicted_bytes), size(row.measured_bytes), difference, share


def check(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, *, set_to_none: bool = True) -> AccountCheck:
    """Train some steps of the optimised `model`, measure the memory of the last, and compare it with what its plan
    predicted.

    The first step plans and compiles where that is not yet done, and makes the optimizer's state; the last one is
    measured. Afterwards parameters, gradients, buffers, the optimizer's state and random states are restored, also when
    a step fails, from copies held in the host's memory.

    On CUDA the bytes measured are those allocated by torch's allocator: the context and fragmentation are not among
    them, and are left out of the prediction.

    Args:
        optimizer: steps the model's parameters. Where its class or options are not those that the model was optimised
            for, the rows of the optimizer differ.
        batch: as in `compare`.
        set_to_none: whether gradients are freed between steps, as by `zero_grad()`, or kept and filled with zeros.

    Raises:
        ValueError: the model is not optimised or not in training mode, or its loss is no scalar.
        TypeError: `optimizer` is not an instance, `batch` not a tuple, dict or tensor, or the model returns no loss.
        BudgetError: no plan for this batch fits the budget.
    """
    planned = optimised(model)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be an instance of torch.optim.Optimizer, not {optimizer!r}")
    calls = planned.with_loss or planned.forward
    call = batch_call(batch, calls.loss_fn)
    check_device(call, planned.model)
    model = planned.model  # the module inside DDP, so that no gradients are exchanged

    def forward() -> Any:
        return calls(*call[0], **call[1])

    with calls.share.held_still(call), calls.plain_calls.only_way(plain=False), stage("metering steps"):
        start = TrainingState.whole(model)
        with optimizer_restored(optimizer), torch.enable_grad():
            try:
                start.restore()
                for _ in range(1 if set_to_none else 2):  # a step that begins with gradients has another plan
                    _train(forward, optimizer)
                    optimizer.zero_grad(set_to_none=set_to_none)
                measured = _measure(forward, model, optimizer, call, calls.share.latest_elsewhere(call))
            finally:
                start.restore()
                start.restore_gradients()
    plan = planned.latest
    assert plan is not None
    predicted = predicted_rows(plan)
    rows = tuple(AccountRow(name, predicted[name], measured[name]) for name in measured)
    return AccountCheck(type(model).__name__, type(optimizer).__name__, str(start.device), rows[:-1], rows[-1])


def predicted_rows(plan: Plan) -> Rows:
    """The bytes of each row as a plan predicts them. The peak leaves out what torch's allocator does not count, what
    else is on the device, and the bytes left free as a tolerance.

    The plan must have been made in this process, not loaded."""
    step, schedule = plan.solved
    account, problem = plan.account, step.seen.problem
    held = set(held_storages(problem, schedule))
    held |= {storage for op in problem.ops if op.name == RETURN_OUTPUTS for storage in op.reads}
    moving = simulate(problem, schedule, ANY_LINK).peak_bytes - problem.resident_bytes
    return {
        "parameters": account.parameters,
        "buffers": account.buffers,
        "inputs": account.inputs,
        "optimizer state": account.optimizer_state,
        "gradients": account.gradients,
        "outputs": problem.output_bytes,
        "held by the forward": sum(problem.storages[storage].bytes for storage in held),
        "forward and backward": moving,
        "optimizer temporaries": account.optimizer_temporaries,
        "peak of the step": plan.planned.peak_bytes - account.uncounted_bytes - account.elsewhere - account.tolerance,
    }


def _measure(
    call: Callable[[], Any], model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Call, elsewhere: int
) -> Rows:
    """The bytes of each row, measured in one step. `elsewhere` is the bytes on the device beside the step."""
    parameters = list(model.parameters())
    device = parameters[0].device
    kind = device_of(device)

    def held(tensors: Iterable[torch.Tensor | None]) -> int:
        return bytes_on(device, (one for one in tensors if one is not None), kind.block_bytes)

    fixed = {
        "parameters": held(parameters),
        "buffers": held([*parameters, *model.buffers()]) - held(parameters),
        "inputs": held(tensors_in(inputs)),
        "optimizer state": held(state_tensors(optimizer)),
    }
    before = held(parameter.grad for parameter in parameters)
    gc.collect()
    resident = sum(fixed.values()) + before
    if kind.caching:  # also counts libraries' workspaces, which are no tensors
        resident = max(resident, kind.allocated_bytes(device) - elsewhere)
    with _PhaseMeter(device) as meter:
        _train(call, optimizer, meter.end_phase)
    forward, backward, step = meter.phases
    gradients = held(parameter.grad for parameter in parameters)
    return {
        **fixed,
        "gradients": gradients,
        "outputs": backward.left_bytes - (gradients - before),
        "held by the forward": forward.left_bytes,
        "forward and backward": max(forward.peak_bytes, backward.peak_bytes),
        "optimizer temporaries": step.peak_bytes - backward.left_bytes,
        "peak of the step": resident + max(phase.peak_bytes for phase in meter.phases),
    }


def _train(
    call: Callable[[], Any], optimizer: torch.optim.Optimizer, end_phase: Callable[[], None] = lambda: None
) -> None:
    """Run a training step, and hold the outputs meanwhile. `end_phase` is called after each of its three phases."""
    output = call()
    loss = scalar_loss(output)
    end_phase()
    loss.backward()  # type: ignore[no-untyped-call]
    end_phase()
    optimizer.step()
    end_phase()


@dataclass(frozen=True)
class _Phase:
    """A phase's peak and the bytes left at its end, beyond those at the beginning of the recording."""

    peak_bytes: int
    left_bytes: int


class _PhaseMeter:
    """Measures allocations and frees of its `with` block on `device`, divided into phases by `end_phase()`.

    On the CPU, frees are seen of memory allocated in the block and of memory that Python tensors hold at its start (see
    `measure_peak`). On CUDA the allocator's own statistics are read, and its peak is reset."""

    def __init__(self, device: torch.device) -> None:
        self.phases: tuple[_Phase, ...] = ()
        """The phases that have ended; on the CPU they are known once the block has ended."""
        self._device = device
        self._events = MemoryEvents()
        self._start = 0

    def __enter__(self) -> _PhaseMeter:
        kind = device_of(self._device)
        if kind.caching:
            self._start = kind.allocated_bytes(self._device)
            kind.reset_peak(self._device)
            return self
        self._start = len(start_with_resident(self._events))
        return self

    def end_phase(self) -> None:
        """End the current phase. The bytes that are then allocated count as held from the start of the next one."""
        kind = device_of(self._device)
        if not kind.caching:
            self._events.declare(_MARK_ADDRESS, _MARK_BYTES)
            return
        peak, now = kind.peak_bytes(self._device), kind.allocated_bytes(self._device)
        self.phases += (_Phase(peak - self._start, now - self._start),)
        kind.reset_peak(self._device)

    def __exit__(self, *_: object) -> None:
        if not device_of(self._device).caching:
            self.phases = _phases(self._events.stop()[self._start :])


def _phases(events: list[int]) -> tuple[_Phase, ...]:
    """The phases in a recording of bytes allocated and (negative) freed, each of which ends with a mark."""
    phases: list[_Phase] = []
    left = begin = 0
    for end in [index for index, nbytes in enumerate(events) if nbytes == _MARK_BYTES]:
        held = list(accumulate(events[begin:end], initial=left))
        phases.append(_Phase(max(held), left := held[-1]))
        begin = end + 1
    return tuple(phases)
