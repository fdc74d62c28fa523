"""Save, offload or recompute: minimum cuts in which a saved storage may also be offloaded.

Offloading a storage is priced at the seconds by which its two transfers exceed the time between its last use in the
forward and its first read in the backward, plus μ times the seconds of one transfer, where μ in [0, 1] is the shadow
price of a second of the link. At μ = 0 transfers that hide are free; at μ = 1 the link's time costs as much as compute.
A cut uses the least μ at which the link has time for the offloaded storages (Lagrangian relaxation of its capacity).
POFO (Beaumont et al., 2021) weighs the three choices together as well, by dynamic programming over chains.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from memopt.solver.arrays import Floats
from memopt.solver.min_cut import Cut, CutNetwork
from memopt.solver.problem import Link, RematProblem

# The number of prices of a byte that are tried, and steps of the bisection for μ at each.
_PRICES, _BISECTIONS = 5, 6


def offload_cuts(
    problem: RematProblem, network: CutNetwork, hull: Sequence[Cut], link: Link, capacity_seconds: float
) -> tuple[Cut, ...]:
    """The cheapest cuts at several prices of a byte, each with its own shadow price of the link's time.

    The prices are slopes of `hull`, the lower hull of the problem's `network`; `capacity_seconds` is the time for which
    each direction of the link can be used.
    """
    slopes = [
        (left.recompute_seconds - right.recompute_seconds) / (right.saved_bytes - left.saved_bytes)
        for left, right in itertools.pairwise(hull)
    ]
    prices = [slopes[int(place)] for place in np.linspace(0, len(slopes) - 1, min(_PRICES, len(slopes)))]
    seconds = np.array([link.transfer_seconds(storage.bytes) for storage in problem.storages])
    unhidden = np.maximum(0.0, 2 * seconds - _idle_seconds(problem))
    cuts = {}
    for price in prices:
        cut = _within_capacity(network, price, unhidden, seconds, capacity_seconds)
        cuts[cut.saved] = cut
    return tuple(cuts.values())


def _within_capacity(network: CutNetwork, price: float, unhidden: Floats, seconds: Floats, capacity: float) -> Cut:
    """The cut at the least shadow price, or at 1, at which transfers take at most `capacity` seconds each way."""
    cut = network.cut(price, unhidden)
    if _busy(cut, seconds) <= capacity:
        return cut
    low, high = 0.0, 1.0
    cut = network.cut(price, unhidden + seconds)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        here = network.cut(price, unhidden + middle * seconds)
        if _busy(here, seconds) <= capacity:
            high, cut = middle, here
        else:
            low = middle
    return cut


def _busy(cut: Cut, seconds: Floats) -> float:
    """Seconds that the cut's offloads keep one direction of the link busy."""
    return float(seconds[sorted(cut.offloaded)].sum())


def _idle_seconds(problem: RematProblem) -> Floats:
    """Per storage: seconds of the plain step from its last use in the forward to its first read in the backward."""
    begins = np.concatenate([[0.0], np.cumsum([op.seconds for op in problem.ops])])
    last_used, first_read = np.zeros(len(problem.storages)), np.zeros(len(problem.storages))
    for index, op in enumerate(problem.ops[: problem.forward_ops]):
        last_used[[*op.reads, *op.makes]] = begins[index + 1]
    for index in reversed(range(problem.forward_ops, len(problem.ops))):
        first_read[list(problem.ops[index].reads)] = begins[index]
    return np.maximum(0.0, first_read - last_used)
