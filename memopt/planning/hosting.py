"""Which frozen parameters lie on the host: none where a step fits its budget without, else as many as make the fastest
plan. When they are brought, and how long they stay, the solver decides."""

from __future__ import annotations

from collections.abc import Collection
from itertools import accumulate
from typing import TYPE_CHECKING

from memopt.errors import BudgetError
from memopt.planning.options import Effort
from memopt.planning.planner import NEGLIGIBLE
from memopt.units import size

if TYPE_CHECKING:
    from memopt.planning.plan import Plan
    from memopt.planning.stages import Priced

_SHARES = 8
"""The parts of the bytes that may lie on the host of which one, two, … and all are tried."""
_QUICK = Effort("fast")


def solve_hosting(priced: Priced, budget_bytes: int, effort: Effort, *, offload: bool) -> Plan:
    """The fastest plan found within the budget, with some of the step's hostable inputs on the host where that adds
    less time, or is needed. Without `offload` none are. Raises `BudgetError`."""
    found, refused = _tried(priced, budget_bytes, effort, offload=offload)
    if found is not None and (not offload or found.added_time <= NEGLIGIBLE):
        return found
    if refused is not None and not offload:
        # What is refused may fit with parameters on the host, so that its budget is not the smallest that works.
        everything = hosting_all(priced)
        hosted = (refused.smallest_bytes, "") if everything is None else everything.smallest()
        if hosted[0] >= refused.smallest_bytes:
            raise refused.adding(*_lacking(priced))
        fits = hosted[0] <= budget_bytes
        least = (refused.smallest_bytes, refused.dominated_by) if fits else hosted
        raise BudgetError(budget_bytes, *least, least=not fits, further=_lacking(priced))
    chosen: Collection[int] = ()
    fastest = found
    for numbers in _choices(priced):
        plan, error = _tried(priced.hosting(numbers), budget_bytes, _QUICK)
        refused = error or refused
        if plan is not None and (fastest is None or plan.added_seconds < fastest.added_seconds):
            fastest, chosen = plan, numbers
    if fastest is None:
        assert refused is not None
        raise refused.adding(*_lacking(priced))
    return priced.hosting(chosen).solve_as_is(budget_bytes, effort) if chosen else fastest


def hosting_all(priced: Priced) -> Priced | None:
    """The step with as much on the host as may lie there; None where nothing may."""
    choices = _choices(priced)
    return priced.hosting(choices[-1]) if choices else None


def _lacking(priced: Priced) -> tuple[str, ...]:
    """A note where the host has no room for all that may lie there; else nothing."""
    total, link = sum(priced.step.hostable.values()), priced.step.settings.link
    room = None if link is None else link.host_bytes
    if room is None or total <= room:
        return ()
    return (
        f"the host has room for {size(int(room))} of the {size(total)} of frozen parameters that may lie there: give "
        "host_gb where it has more",
    )


def _choices(priced: Priced) -> list[tuple[int, ...]]:
    """Ever larger sets of hostable inputs, up to all that the host has room for. Each is spread evenly over the step,
    so that compute hides as many of their copies as it can."""
    hostable, link = priced.step.hostable, priced.step.settings.link
    numbers = list(hostable)
    order = [numbers[place] for place in _spread(len(numbers))]
    total, room = sum(hostable.values()), None if link is None else link.host_bytes
    sums = list(accumulate(hostable[number] for number in order))
    found: dict[int, tuple[int, ...]] = {}
    for part in range(1, _SHARES + 1):
        most = total * part // _SHARES
        count = sum(nbytes <= (most if room is None else min(most, room)) for nbytes in sums)
        found[count] = tuple(order[:count])
    return [chosen for count, chosen in sorted(found.items()) if count]


def _spread(count: int) -> list[int]:
    """The numbers below `count` in an order of which every beginning is spread evenly over them: that of their bits
    read backwards (van der Corput, 1935)."""
    bits = max(1, (count - 1).bit_length())
    return sorted(range(count), key=lambda number: int(f"{number:0{bits}b}"[::-1], 2))


def _tried(
    priced: Priced, budget_bytes: int, effort: Effort, *, offload: bool = True
) -> tuple[Plan | None, BudgetError | None]:
    """The plan of a step as it is, or the refusal."""
    try:
        return priced.solve_as_is(budget_bytes, effort, offload=offload), None
    except BudgetError as error:
        return None, error.with_traceback(None)
