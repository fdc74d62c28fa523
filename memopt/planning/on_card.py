"""The bytes that a step holds on a GPU beyond those it allocates: the allocator's rounding and fragmentation, found by
a replay of its allocations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import cycle

from memopt.account.account import Account, breakdown
from memopt.account.allocator_replay import (
    AllocatorPeaks,
    StepBlocks,
    peaks_without_limit,
    replay_with_spare,
    step_ways,
    with_spare,
)
from memopt.account.caching_allocator import SMALL_BYTES, CardFullError
from memopt.account.card_state import CardState, Kind, rounded_bytes
from memopt.errors import as_text_has_it
from memopt.planning.joined import Joined
from memopt.solver import Schedule
from memopt.solver.problem import BlockCall

SPARE = 15
"""The margin (see `with_spare`) for what no replay knows: the order of a kernel's own blocks, small blocks, what a
compiler changes."""
SPARE_COMPILED = 5
"""The margin for compiled code, whose allocations are known, if the allocator returns no segment. If it has to, the
gaps between its blocks may differ from those of the replay, and the margin is `SPARE`."""
UNSPLIT = 3, 1000
"""The share of the allocator's bytes, as a fraction, by which they may exceed those of the replay: some blocks are a
little larger than requested, and which ones depends on all that was allocated before."""
_NEXT = 1024
"""The next budget to try is larger by one part in this many."""
_SHARE = 1 / 256
"""The precision to which the least budget is found, as a fraction of the bytes allocated."""


def on_card(joined: Joined, schedule: Schedule, account: Account) -> Account:
    """The account with the least rounding and fragmentation of torch's allocator with which the step completes, found
    by replaying its allocations. On the CPU both are 0.

    An allocator on a full card returns free segments, so a process with exactly the resulting peak as its memory
    completes its steps: a `BudgetError` names this budget. With some larger budgets the replay may still fail."""
    bare = without_allocator(account)
    if not account.caching:
        return bare
    bare = replace(bare, lowering=0)
    key = (schedule, bare)
    if key not in joined.on_cards:
        blocks = _step_blocks(joined, bare)
        free = peaks_without_limit(_ways(joined, schedule), blocks, expandable_segments=bare.expandable)
        fitted = partial(within, joined, schedule, bare)
        joined.on_cards[key] = _with_least_budget(fitted, joined, schedule, bare.context, free)
    found = joined.on_cards[key]
    return replace(account, rounding=found.rounding, fragmentation=found.fragmentation)


def _ways(joined: Joined, schedule: Schedule) -> tuple[Sequence[BlockCall], ...]:
    """The result of `step_ways`, cached in `Joined.ways` for a schedule that is replayed for several budgets."""
    if schedule not in joined.ways:
        joined.ways[schedule] = step_ways(joined.problem, schedule)
    return joined.ways[schedule]


def _with_least_budget(
    fitted: Callable[[int], Account | None],
    joined: Joined,
    schedule: Schedule,
    context: int,
    free: AllocatorPeaks,
    above: int = 0,
) -> Account:
    """The account that `fitted` returns for the least budget for which it returns one, found to 0.4% of the bytes
    allocated. Its fragmentation is raised until its peak is that budget, which was tried itself: a budget above one
    that works need not work.

    Only budgets above `above` are tried, rounded up by `as_text_has_it`; `free` has the peaks without a limit."""
    low = max(above, context + with_spare(free.allocated_bytes, SPARE) - 1)
    high = as_text_has_it(max(low + 1, context + with_spare(free.reserved_bytes, SPARE)))
    found = None
    # The least budget is mostly nearer to the bytes allocated than to the bytes reserved.
    while high - low > _SHARE * free.allocated_bytes and (middle := as_text_has_it(low + (high - low + 3) // 4)) < high:
        account = fitted(middle)
        low, high, found = (middle, high, found) if account is None else (low, middle, account)
    while found is None and (found := fitted(high)) is None:
        high = as_text_has_it(high + high // _NEXT)
    peak = breakdown(joined.problem, schedule, found).peak_bytes
    return replace(found, fragmentation=found.fragmentation + high - peak)


def within(joined: Joined, schedule: Schedule, account: Account, budget_bytes: int) -> Account | None:
    """The account with the allocator's overhead in a process that has `budget_bytes`, in which the allocator returns
    free segments only when it must; None where the step needs more. `Account.lowering` is not replayed."""
    bare = without_allocator(account)
    if not account.caching:
        return bare
    limit = budget_bytes - account.context - account.lowering
    ways, blocks = _ways(joined, schedule), _step_blocks(joined, bare)
    try:
        peaks = replay_with_spare(ways, blocks, SPARE, expandable_segments=bare.expandable, limit_bytes=limit)
    except CardFullError:
        return None
    requested = _requested_bytes(joined, schedule, replace(bare, lowering=0))
    fitted = _with_overhead(bare, requested, peaks, with_spare(peaks.reserved_bytes, SPARE))
    return fitted if breakdown(joined.problem, schedule, fitted).peak_bytes <= budget_bytes else None


def compiled_within(
    joined: Joined, schedule: Schedule, account: Account, ways: Sequence[Sequence[BlockCall]], budget_bytes: int
) -> Account:
    """The account with the allocator's overhead of compiled code. `ways` has the sequences of allocator calls that the
    code may make, and the overhead suffices for each of them. It is the overhead in a process that has `budget_bytes`,
    or, where that is too little, in one that has the fewest bytes in which the step completes."""
    bare = without_allocator(account)
    if not account.caching:
        return bare
    blocks, setting = _step_blocks(joined, bare), bare.expandable
    requested = _requested_bytes(joined, schedule, bare)

    def fitted(budget_bytes: int) -> Account | None:
        for spare, may_release in ((SPARE_COMPILED, False), (SPARE, True)):
            with suppress(CardFullError):
                limit = budget_bytes - account.context
                peaks = replay_with_spare(ways, blocks, spare, expandable_segments=setting, limit_bytes=limit)
                if may_release or not peaks.releases:
                    return _with_overhead(bare, requested, peaks, with_spare(peaks.reserved_bytes, spare))
        return None

    def passing(budget_bytes: int) -> Account | None:
        found = fitted(budget_bytes)
        fits = found is not None and breakdown(joined.problem, schedule, found).peak_bytes <= budget_bytes
        return found if fits else None

    if found := fitted(budget_bytes):
        return found
    free = peaks_without_limit(ways, blocks, expandable_segments=setting)
    return _with_least_budget(passing, joined, schedule, account.context, free, budget_bytes)


def without_allocator(account: Account) -> Account:
    """The account without rounding and fragmentation of the allocator."""
    return replace(account, rounding=0, fragmentation=0)


def _step_blocks(joined: Joined, account: Account) -> StepBlocks:
    """The account's rows, less what is allocated already, as allocations: parameters, buffers and inputs in their
    actual sizes, gradients and what the optimizer holds in those of the parameters that are trained."""
    trained = account.trained or joined.trained
    there = account.card_state or CardState()
    rows: dict[Kind, tuple[int, int]] = {  # the bytes that are planned, and those that lie on the card
        "given": (account.parameters + account.buffers + account.inputs, there.given_bytes),
        "gradients": (account.gradients if account.gradients_held else 0, there.gradient_bytes),
        "state": (account.optimizer_state, there.state_bytes),
    }
    # Where more lie there, they are not those planned: they are freed, and the whole row is still to be allocated.
    freed = [kind for kind, (planned, found) in rows.items() if found > planned]
    given, held, state = (planned - (0 if kind in freed else found) for kind, (planned, found) in rows.items())
    libraries = Counter(map(rounded_bytes, joined.libraries))
    libraries.subtract(there.libraries)
    wrapper = (account.buckets, account.output_clones, account.gathered, account.kept, account.exchange)
    eager = (*wrapper, account.other_forwards, account.elsewhere)
    return StepBlocks(
        resident=(
            *_split_into(given, joined.given),
            *libraries.elements(),
            *_split_into(held, trained),
            *_beyond(eager, there.other_bytes),
        ),
        state=_split_into(state, account.state_blocks or trained),
        temporaries=_split_into(account.optimizer_temporaries, trained),
        copies=(account.inputs,) if SMALL_BYTES < account.inputs <= state else (),
        there=there.without(freed),
    )


def _beyond(sizes: Sequence[int], there: int) -> Iterator[int]:
    """The sizes, reduced by `there` bytes in total: the last size first, then those before it."""
    left: list[int] = []
    for nbytes in reversed(sizes):
        taken = min(nbytes, there)
        there -= taken
        left.append(nbytes - taken)
    return reversed(left)


def _requested_bytes(joined: Joined, schedule: Schedule, bare: Account) -> int:
    """The bytes that a step asks the allocator for at its peak."""
    return breakdown(joined.problem, schedule, bare).peak_bytes - bare.context


def _with_overhead(bare: Account, requested: int, peaks: AllocatorPeaks, held: int) -> Account:
    """The account with the allocator's overhead: what it allocates beyond `requested`, and `held` beyond that."""
    share, whole = UNSPLIT
    allocated = max(requested, peaks.allocated_bytes)
    allocated += allocated * share // whole
    return replace(bare, rounding=allocated - requested, fragmentation=max(0, held - allocated))


def _split_into(total: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """`total` bytes as blocks of the positive `sizes`, repeated in this order until one does not fit, then the rest."""
    blocks, left = [], total
    for size in cycle(size for size in sizes if size > 0):
        if size > left:
            break
        blocks.append(size)
        left -= size
    return (*blocks, left) if left else tuple(blocks)
