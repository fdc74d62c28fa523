"""What a step holds on a card beside what it asks for: the allocator's rounding and fragmentation, by a replay."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle

from memopt.account.account import Account
from memopt.account.allocator_replay import AllocatorPeaks, StepBlocks, least_limit, replay
from memopt.account.breakdown import breakdown
from memopt.account.caching_allocator import CardFullError
from memopt.device.workspace_cuda import library_workspaces
from memopt.planning.captured import Joined
from memopt.solver import Schedule


def on_card(joined: Joined, schedule: Schedule, account: Account, *, expandable: bool | None = None) -> Account:
    """The account with the least that the allocator must hold beyond what it hands out; as it is on the CPU.

    A process with this much, and no more, completes its steps: where the card is full, the allocator gives back what
    lies free in whole segments. `expandable`: whether segments grow; None: as the environment says.
    """
    bare = without_allocator(account)
    if not account.context:
        return bare
    setting = expandable_segments() if expandable is None else expandable
    key = (schedule, replace(bare, lowering=0), setting)
    if key not in joined.on_cards:
        blocks = _blocks(joined, bare)
        least, peaks = least_limit(joined.problem, schedule, blocks, expandable_segments=setting)
        joined.on_cards[key] = _with(joined, schedule, bare, peaks, least)
    found = joined.on_cards[key]
    return replace(bare, rounding=found.rounding, fragmentation=found.fragmentation)


def within(joined: Joined, schedule: Schedule, account: Account, budget_bytes: int) -> Account | None:
    """The account with what the allocator comes to hold of a budget, from which it gives nothing back before it must;
    None where it needs more. What is lowered beside the schedule is not replayed."""
    bare = without_allocator(account)
    if not account.context:
        return bare
    limit = budget_bytes - account.context - account.lowering
    blocks, setting = _blocks(joined, bare), expandable_segments()
    try:
        peaks = replay(joined.problem, schedule, blocks, expandable_segments=setting, limit_bytes=limit)
    except CardFullError:
        return None
    fitted = _with(joined, schedule, bare, peaks, peaks.reserved_bytes)
    return fitted if breakdown(joined.problem, schedule, fitted).peak_bytes <= budget_bytes else None


def without_allocator(account: Account) -> Account:
    return replace(account, rounding=0, fragmentation=0)


def expandable_segments() -> bool:
    """Whether torch's allocator is told, by its environment, to grow segments rather than to take new ones."""
    settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF") or ""
    return re.search(r"expandable_segments\s*:\s*True", settings) is not None


def _blocks(joined: Joined, account: Account) -> StepBlocks:
    """The account's sums in blocks: parameters, buffers and inputs as they are given, all else in such sizes too."""
    there = account.parameters + account.buffers + account.inputs
    held = _filled(account.gradients if account.gradients_held else 0, joined.given)
    eager = (account.other_forwards, account.between_regions)
    return StepBlocks(
        resident=(*_filled(there, joined.given), *library_workspaces(joined.major), *held, *eager),
        state=_filled(account.optimizer_state, joined.given),
        temporaries=_filled(account.optimizer_temporaries, joined.given),
    )


def _with(joined: Joined, schedule: Schedule, bare: Account, peaks: AllocatorPeaks, held: int) -> Account:
    """What the allocator hands out, and holds, above what the step is counted to ask for."""
    asked = breakdown(joined.problem, schedule, replace(bare, lowering=0)).peak_bytes - bare.context
    allocated = max(asked, peaks.allocated_bytes)
    return replace(bare, rounding=allocated - asked, fragmentation=max(0, held - allocated))


def _filled(total: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """`total` bytes in blocks of `sizes`, over and over in this order while they fit, and the rest as one."""
    return tuple(_filling(total, [size for size in sizes if size > 0]))


def _filling(total: int, sizes: Sequence[int]) -> Iterator[int]:
    left = total
    for size in cycle(sizes):
        if size > left:
            break
        yield size
        left -= size
    if left:
        yield left
