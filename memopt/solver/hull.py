"""The lower hull of saved bytes and recomputed seconds: the cuts that are cheapest at some price of a byte."""

from __future__ import annotations

import heapq

from memopt.solver.min_cut import Cut, CutNetwork

# A new point counts only if it lies below the line through its neighbours by this share; less is rounding.
_TOLERANCE = 1e-9


def lower_hull(network: CutNetwork, limit: int = 40) -> tuple[Cut, ...]:
    """The hull's vertices by rising saved bytes and falling recomputed seconds, from at most about `limit` cuts.

    Recursion on slopes (Eisner and Severance, 1976): the network is cut at the price at which two neighbours cost the
    same; either no cut is cheaper, or a new vertex lies between them. The widest gaps go first, so that `limit` leaves
    out the finest detail.
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
    """The two ends of the hull: the cut that saves the fewest bytes, and the cut that recomputes the least."""
    if network.total_bytes == 0 or network.total_seconds == 0:
        only = network.cut(1.0)
        return only, only
    balanced = network.total_seconds / network.total_bytes
    return network.cut(balanced * 1e7), network.cut(balanced * 1e-7)


def between(network: CutNetwork, left: Cut, right: Cut) -> Cut | None:
    """A vertex of the hull strictly between two of its points and below the line through them; None without one."""
    if right.saved_bytes <= left.saved_bytes or left.recompute_seconds <= right.recompute_seconds:
        return None
    price = (left.recompute_seconds - right.recompute_seconds) / (right.saved_bytes - left.saved_bytes)
    middle = network.cut(price)
    line = left.recompute_seconds + price * left.saved_bytes
    here = middle.recompute_seconds + price * middle.saved_bytes
    inside = left.saved_bytes < middle.saved_bytes < right.saved_bytes
    return middle if inside and here < line * (1 - _TOLERANCE) else None


def _gap(left: Cut, right: Cut) -> tuple[float, int, Cut, Cut]:
    """An entry of the heap of gaps, which sorts those with the larger triangle under their two points first."""
    height = left.recompute_seconds - right.recompute_seconds
    return (-height * (right.saved_bytes - left.saved_bytes), left.saved_bytes, left, right)
