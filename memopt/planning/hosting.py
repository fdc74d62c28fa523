"""Which frozen parameters may lie in the host's memory together; the solver decides when they are on the device."""

from __future__ import annotations

from itertools import accumulate

from memopt.planning.priced_step import PricedStep
from memopt.units import size

_SHARES = 8
"""Plans are tried with 1/8, 2/8, … and all of the bytes of frozen parameters that may lie on the host."""


def lacking(step: PricedStep) -> tuple[str, ...]:
    """A note for the plan where host memory has no room for all frozen parameters that may lie there; else none."""
    total, link = sum(step.hostable.values()), step.settings.link
    room = None if link is None else link.host_bytes
    if room is None or total <= room:
        return ()
    return (
        f"the host has room for {size(int(room))} of the {size(total)} of frozen parameters that may lie there: give "
        "host_gb if it has more",
    )


def stacked(step: PricedStep) -> tuple[str, ...]:
    """A note for the plan where parameters on the host are stacks of matrices, as of experts; else none."""
    (region, *_) = step.traced.regions
    inputs = enumerate(region.module.graph.find_nodes(op="placeholder"))
    three = (node for number, node in inputs if number in step.settings.hosted and node.meta["val"].dim() == 3)
    count = sum(not any("conv" in str(user.target) for user in node.users) for node in three)
    return (
        f"{count} of the parameters on the host are stacks of matrices, as of experts: each is copied to the device as "
        "a whole, even if a batch reaches few of the experts",
    ) * (count > 0)


def choices(step: PricedStep) -> list[tuple[int, ...]]:
    """Sets of inputs (frozen parameters) to put on the host, as input numbers, from few to all that the host has room
    for. Each set is spread evenly over the step, so that compute hides as many of the copies as possible."""
    hostable, link = step.hostable, step.settings.link
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
    """The numbers below `count`, every prefix spread evenly: by their bits read backwards (van der Corput, 1935)."""
    bits = max(1, (count - 1).bit_length())
    return sorted(range(count), key=lambda number: int(f"{number:0{bits}b}"[::-1], 2))
