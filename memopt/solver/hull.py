"""The lower hull of saved bytes against recomputed seconds: every trade that is best at some price."""

from __future__ import annotations

import heapq

from memopt.solver.min_cut import Cut, CutNetwork

# A new point must lie below the line through its neighbours by this share of the hull's height, else it is rounding.
_TOLERANCE = 1e-9


def lower_hull(network: CutNetwork, limit: int = 40) -> tuple[Cut, ...]:
    """Cuts by rising saved bytes and falling seconds, at most `limit` of them.

    Recursion on slopes (Eisner and Severance, 1976): the price at which two neighbours cost the same is cut at; either
    nothing is cheaper there, or a new vertex lies between them. Widest gaps go first, so that `limit` leaves out the
    finest detail.
    """
    fewest, most = end_points(network)
    points = {cut.saved_bytes: cut for cut in (most, fewest)}
    gaps = [_gap(fewest, most)]
    cuts = 2
    while gaps and cuts < limit:
        _, _, left, right = heapq.heappop(gaps)
        middle = between(network, left, right)
        cuts += 1
        if middle is not None:
            points[middle.saved_bytes] = middle
            for gap in (_gap(left, middle), _gap(middle, right)):
                heapq.heappush(gaps, gap)
    return tuple(points[saved_bytes] for saved_bytes in sorted(points))


def end_points(network: CutNetwork) -> tuple[Cut, Cut]:
    """The hull's two ends: (fewest bytes saved, fewest seconds recomputed)."""
    if network.total_bytes == 0 or network.total_seconds == 0:
        only = network.cut(1.0)
        return only, only
    balanced = network.total_seconds / network.total_bytes
    return network.cut(balanced * 1e7), network.cut(balanced * 1e-7)


def between(network: CutNetwork, left: Cut, right: Cut) -> Cut | None:
    """A vertex of the hull strictly between two of its points and below the line through them, if there is one."""
    if right.saved_bytes <= left.saved_bytes or left.recompute_seconds <= right.recompute_seconds:
        return None
    price = (left.recompute_seconds - right.recompute_seconds) / (right.saved_bytes - left.saved_bytes)
    middle = network.cut(price)
    line = left.recompute_seconds + price * left.saved_bytes
    here = middle.recompute_seconds + price * middle.saved_bytes
    inside = left.saved_bytes < middle.saved_bytes < right.saved_bytes
    return middle if inside and here < line * (1 - _TOLERANCE) else None


def _gap(left: Cut, right: Cut) -> tuple[float, int, Cut, Cut]:
    """An entry of the queue: the larger the triangle under the two points, the sooner it is looked into."""
    height = left.recompute_seconds - right.recompute_seconds
    return (-height * (right.saved_bytes - left.saved_bytes), left.saved_bytes, left, right)
