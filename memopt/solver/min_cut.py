"""Which storages to save at a price of memory, by a minimum cut.

At a price of λ seconds a byte the minimum cut minimises `recompute seconds + λ · saved bytes` over all sets of saved
storages from which the backward's reads can be recomputed. The network has one node for each forward storage s and each
forward op o:

source → s        ∞          s is needed     s → producer(s)   λ·bytes    cut: save s     o → each s read   ∞
recomputing o needs its inputs     o → sink          seconds    cut: recompute o

With a link to the host, the second kind of edge costs the smaller of λ·bytes and the price in seconds of the storage's
transfers: if it is cut, the storage is saved on the device or on the host, whichever is cheaper. This price is the
seconds by which the two transfers exceed the time between its last use in the forward and its first read in the
backward, plus μ times the seconds of one transfer, where μ in [0, 1] is the shadow price of a second of the link. At
μ = 0 transfers that hide are free; at μ = 1 the link's time costs as much as compute. A cut uses the least μ at which
the link has time for the offloaded storages (Lagrangian relaxation of its capacity). POFO (Beaumont et al., 2021)
weighs the three choices together as well, by dynamic programming over chains.

After Jain et al., "Checkmate" (2020), and the minimum cut of PyTorch's partitioner (He and Yu, 2022), which prices
nodes; here storages are priced, and a chain of recomputed ops costs the seconds of all of them. Exact at each λ.

The lower hull of saved bytes and recomputed seconds holds the cuts that are cheapest at some price. The just-in-time
schedule of each recomputes before each backward op what the op misses.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Collection, Iterator, Sequence, Set
from dataclasses import dataclass, field

import numpy as np

from memopt.solver.arrays import Floats
from memopt.solver.max_flow import FlowNetwork
from memopt.solver.problem import Link, RematProblem, Schedule

_SOURCE, _SINK = 0, 1
_NONE = -1


@dataclass(frozen=True)
class Cut:
    """A choice of saved storages, with the bytes and seconds that it costs."""

    saved: frozenset[int]
    """The storages saved from the forward for the backward."""
    saved_bytes: int
    """Bytes of `saved` on the device, without storages that are held in any case."""
    recompute_seconds: float
    """Seconds of the ops to recompute, each once."""
    offloaded: frozenset[int] = frozenset()
    """The part of `saved` that is offloaded; its bytes are not in `saved_bytes`."""
    bound: float = field(default=0.0, compare=False)
    """A lower bound on `seconds + price · bytes (+ offload seconds)` over all cuts, at the price of this one."""


def needed_by_backward(problem: RematProblem) -> frozenset[int]:
    """The storages made by forward ops that a backward op reads."""
    first = problem.forward_ops
    read = {storage for op in problem.ops[first:] for storage in op.reads}
    return frozenset(storage for storage in read if problem.producer[storage] < first)


class CutNetwork:
    """A flow network, each cut of which says which forward storages are saved, and which are recomputed from these so
    that the backward has all that are `needed`. Built once, and cut at many prices, in seconds, of a saved byte.

    `held` storages are live in any case and cost nothing to save. By default, `needed` are the forward storages that
    the backward reads, and `held` those that stay to the end of the step (`Storage.kept`), such as outputs."""

    def __init__(self, problem: RematProblem, needed: Set[int] | None = None, held: Set[int] | None = None) -> None:
        self._problem = problem
        needed = needed_by_backward(problem) if needed is None else needed
        if held is None:
            held = {number for number, storage in enumerate(problem.storages) if storage.kept}
        self._storage_node: dict[int, int] = {}
        self._op_node: dict[int, int] = {}
        columns = list(zip(*self._arcs(set(needed) - held, held), strict=True)) or [()] * 4
        tails, heads, self._arc_storages = (np.array(column, np.int64) for column in columns[:3])
        self._arc_seconds = np.array(columns[3], np.float64)
        sizes = np.array([*(storage.bytes for storage in problem.storages), 0], np.float64)  # the last is `_NONE`'s
        self._arc_bytes = sizes[self._arc_storages]
        self._flow = FlowNetwork(tails, heads, 2 + len(self._storage_node) + len(self._op_node))

    @property
    def total_bytes(self) -> int:
        """Bytes of all storages that the network may save."""
        return sum(self._problem.storages[storage].bytes for storage in self._storage_node)

    @property
    def total_seconds(self) -> float:
        """Seconds of all ops that the network may recompute."""
        return float(self._arc_seconds[np.isfinite(self._arc_seconds)].sum())

    def cut(self, price: float, offload_seconds: Floats | None = None) -> Cut:
        """The cheapest cut, where each saved byte costs `price` seconds and each recomputed op costs its own seconds.

        `offload_seconds` is the price in seconds of offloading each storage of the problem, infinite for a storage that
        cannot be offloaded. With None, no storage can.
        """
        if not self._arc_storages.size:
            return Cut(frozenset(), 0, 0.0)
        save_costs = price * self._arc_bytes
        if offload_seconds is not None:
            is_storage = self._arc_storages >= 0
            save_costs[is_storage] = np.minimum(save_costs, offload_seconds[self._arc_storages])[is_storage]
        side, bound = self._flow.cut(self._arc_seconds + save_costs, _SOURCE, _SINK)
        problem = self._problem
        again = {op for op, node in self._op_node.items() if side[node]}
        on_source_side = (storage for storage, node in self._storage_node.items() if side[node])
        saved = frozenset(storage for storage in on_source_side if problem.producer[storage] not in again)
        offloaded: frozenset[int] = frozenset()
        if offload_seconds is not None:
            offloaded = frozenset(s for s in saved if offload_seconds[s] < price * problem.storages[s].bytes)
        saved_bytes = sum(problem.storages[storage].bytes for storage in saved - offloaded)
        return Cut(saved, saved_bytes, sum(problem.ops[op].seconds for op in sorted(again)), offloaded, bound)

    def _arcs(self, needed: Set[int], held: Set[int]) -> Iterator[tuple[int, int, int, float]]:
        """The arcs of the needed storages and of all ops and storages from which they can be recomputed: tail, head,
        the storage whose bytes the arc costs, times the price of the cut, and the seconds that it costs at any price.
        """
        problem, storage_node, op_node = self._problem, self._storage_node, self._op_node
        pending = sorted(needed)
        for storage in pending:
            yield _SOURCE, self._node(storage_node, storage), _NONE, math.inf
        while pending:
            storage = pending.pop()
            op = problem.producer[storage]
            if not problem.ops[op].recomputable:
                yield storage_node[storage], _SINK, storage, 0.0
                continue
            is_new = op not in op_node
            yield storage_node[storage], self._node(op_node, op), storage, 0.0
            if not is_new:
                continue
            yield op_node[op], _SINK, _NONE, problem.ops[op].seconds
            for read in sorted(set(problem.ops[op].reads) - held):
                if read not in storage_node:
                    pending.append(read)
                yield op_node[op], self._node(storage_node, read), _NONE, math.inf

    def _node(self, nodes: dict[int, int], key: int) -> int:
        """The network node of a storage or an op, added to `nodes` if it is new."""
        if key not in nodes:
            nodes[key] = 2 + len(self._storage_node) + len(self._op_node)
        return nodes[key]


# A new point counts only if it lies below the line through its neighbours by this share; less is rounding.
_TOLERANCE = 1e-9


def lower_hull(network: CutNetwork, limit: int = 40) -> tuple[Cut, ...]:
    """The vertices of the lower convex hull of (saved bytes, recomputed seconds) of all cuts, by rising bytes and
    falling seconds, found with about `limit` cuts at most.

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
    """The two ends of the lower hull: the cut that saves the fewest bytes, and the cut that recomputes the least."""
    if network.total_bytes == 0 or network.total_seconds == 0:
        only = network.cut(1.0)
        return only, only
    balanced = network.total_seconds / network.total_bytes
    return network.cut(balanced * 1e7), network.cut(balanced * 1e-7)


def slope(left: Cut, right: Cut) -> float:
    """The price of a saved byte, in seconds, at which the two cuts cost the same."""
    return (left.recompute_seconds - right.recompute_seconds) / (right.saved_bytes - left.saved_bytes)


def between(network: CutNetwork, left: Cut, right: Cut) -> Cut | None:
    """A vertex of the lower hull between two cuts, below the line through them; None if there is none."""
    if right.saved_bytes <= left.saved_bytes or left.recompute_seconds <= right.recompute_seconds:
        return None
    price = slope(left, right)
    middle = network.cut(price)
    line = left.recompute_seconds + price * left.saved_bytes
    here = middle.recompute_seconds + price * middle.saved_bytes
    inside = left.saved_bytes < middle.saved_bytes < right.saved_bytes
    return middle if inside and here < line * (1 - _TOLERANCE) else None


def _gap(left: Cut, right: Cut) -> tuple[float, int, Cut, Cut]:
    """An entry of the heap of gaps, which sorts those with the larger triangle under their two points first."""
    height = left.recompute_seconds - right.recompute_seconds
    return (-height * (right.saved_bytes - left.saved_bytes), left.saved_bytes, left, right)


# The number of prices of a byte that are tried, and steps of the bisection for μ at each.
_PRICES, _PRICE_BISECTIONS = 5, 6


def offload_cuts(problem: RematProblem, network: CutNetwork, hull: Sequence[Cut], link: Link) -> tuple[Cut, ...]:
    """The cheapest cuts, with offloads, at several prices, in seconds, of a saved byte: these are slopes of `hull`, the
    lower hull of the problem's `network`. The link's time has a price, too: for each cut the least, from 0 to that of
    compute, at which its transfers take no longer than the forward, nor than the backward, in either direction."""
    slopes = [slope(left, right) for left, right in itertools.pairwise(hull)]
    prices = [slopes[int(place)] for place in np.linspace(0, len(slopes) - 1, min(_PRICES, len(slopes)))]
    seconds = np.array([link.transfer_seconds(storage.bytes) for storage in problem.storages])
    unhidden = np.maximum(0.0, 2 * seconds - _idle_seconds(problem))
    forward = sum(op.seconds for op in problem.ops[: problem.forward_ops])
    capacity_seconds = min(forward, problem.seconds - forward)  # out in the one, back in the other

    def fits(cut: Cut) -> bool:
        return float(seconds[sorted(cut.offloaded)].sum()) <= capacity_seconds

    cuts = {}
    for price in prices:
        cut = network.cut(price, unhidden)
        if not fits(cut):
            low, high = 0.0, 1.0
            cut = network.cut(price, unhidden + seconds)
            for _ in range(_PRICE_BISECTIONS):
                middle = (low + high) / 2
                here = network.cut(price, unhidden + middle * seconds)
                if fits(here):
                    high, cut = middle, here
                else:
                    low = middle
        cuts[cut.saved] = cut
    return tuple(cuts.values())


def _idle_seconds(problem: RematProblem) -> Floats:
    """Per storage: seconds of the plain step from its last use in the forward to its first read in the backward."""
    begins = np.concatenate([[0.0], np.cumsum([op.seconds for op in problem.ops])])
    last_used, first_read = np.zeros(len(problem.storages)), np.zeros(len(problem.storages))
    for index, op in enumerate(problem.ops[: problem.forward_ops]):
        last_used[[*op.reads, *op.makes]] = begins[index + 1]
    for index in reversed(range(problem.forward_ops, len(problem.ops))):
        first_read[list(problem.ops[index].reads)] = begins[index]
    return np.maximum(0.0, first_read - last_used)


def just_in_time(problem: RematProblem, saved: Collection[int]) -> Schedule:
    """The forward in order, then each backward op, preceded by the recomputation of the storages that it misses.

    A recomputed storage is held until its last read, so every op runs at most twice. Storages that are live to the end
    (`Storage.kept`) and those that cannot be recomputed count as saved."""
    first = problem.forward_ops
    present = set(saved)
    for op in problem.ops[:first]:
        present.update(s for s in op.makes if problem.storages[s].kept or not op.recomputable)
    evaluations = list(range(first))
    for index in range(first, len(problem.ops)):
        missing = _missing_ops(problem, index, present)
        for op_index in (*missing, index):
            evaluations.append(op_index)
            present.update(problem.ops[op_index].makes)
    return Schedule(tuple(evaluations))


def _missing_ops(problem: RematProblem, index: int, present: set[int]) -> list[int]:
    """The ops that make the storages that op `index` misses, given those `present`, in program order."""
    missing: set[int] = set()
    pending = [index]
    while pending:
        for storage in problem.ops[pending.pop()].reads:
            producer = problem.producer[storage]
            if storage not in present and producer not in missing:
                missing.add(producer)
                pending.append(producer)
    return sorted(missing)
