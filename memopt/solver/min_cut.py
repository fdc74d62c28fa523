"""Which storages to save at a price of memory, by a minimum cut.

At a price of λ seconds a byte the minimum cut minimises `recompute seconds + λ · saved bytes` over all sets of saved
storages from which the backward's reads can be recomputed. The network has one node for each forward storage s and each
forward op o:

source → s        ∞          s is needed     s → producer(s)   λ·bytes    cut: save s     o → each s read   ∞
recomputing o needs its inputs     o → sink          seconds    cut: recompute o

With a link to the host, the second kind of edge costs the smaller of λ·bytes and the price in seconds of the storage's
transfers: if it is cut, the storage is saved on the device or on the host, whichever is cheaper.

After Jain et al., "Checkmate" (2020), and the minimum cut of PyTorch's partitioner (He and Yu, 2022), which prices
nodes; here storages are priced, and a chain of recomputed ops costs the seconds of all of them. Exact at each λ.

The lower hull of saved bytes and recomputed seconds holds the cuts that are cheapest at some price. `MinimumCut`
proposes the just-in-time schedule of each: before each backward op it recomputes what the op misses.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np

from memopt.solver.arrays import Flags, Floats
from memopt.solver.max_flow import FlowNetwork
from memopt.solver.problem import RematProblem, Schedule

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


def needed_by_backward(problem: RematProblem) -> frozenset[int]:
    """The storages made by forward ops that a backward op reads."""
    first = problem.forward_ops
    read = {storage for op in problem.ops[first:] for storage in op.reads}
    return frozenset(storage for storage in read if problem.producer[storage] < first)


def kept_by_forward(problem: RematProblem) -> frozenset[int]:
    """The forward's storages that are live to the end of the step in any case (`Storage.kept`), such as outputs."""
    makes = {storage for op in problem.ops[: problem.forward_ops] for storage in op.makes}
    return frozenset(storage for storage in makes if problem.storages[storage].kept)


class CutNetwork:
    """A flow network, each cut of which says which forward storages are saved, and which are recomputed from these so
    that the backward has all that are `needed`. Built once, and cut at many prices, in seconds, of a saved byte.

    `held` storages are live in any case and cost nothing to save. By default, `needed` are the forward storages that
    the backward reads, and `held` those of `kept_by_forward`."""

    def __init__(
        self, problem: RematProblem, needed: Iterable[int] | None = None, held: Collection[int] | None = None
    ) -> None:
        self._problem = problem
        needed = needed_by_backward(problem) if needed is None else needed
        held = kept_by_forward(problem) if held is None else held
        self._storage_node: dict[int, int] = {}
        self._op_node: dict[int, int] = {}
        self._tails: list[int] = []
        self._heads: list[int] = []
        self._storages: list[int] = []
        self._bytes: list[int] = []
        self._seconds: list[float] = []
        self._build([storage for storage in needed if storage not in held], held)
        self._arc_storages = np.array(self._storages, np.int64)
        self._arc_bytes = np.array(self._bytes, np.float64)
        self._arc_seconds = np.array(self._seconds, np.float64)
        nodes = 2 + len(self._storage_node) + len(self._op_node)
        self._flow = FlowNetwork(np.array(self._tails, np.int64), np.array(self._heads, np.int64), nodes)

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
        return self.cut_and_bound(price, offload_seconds)[0]

    def cut_and_bound(self, price: float, offload_seconds: Floats | None = None) -> tuple[Cut, float]:
        """The cheapest cut, and a lower bound on `seconds + price · bytes (+ offload seconds)` over all cuts.

        Capacities are rounded down, so the flow's value is a true lower bound.
        """
        if not self._tails:
            return Cut(frozenset(), 0, 0.0), 0.0
        save_costs = price * self._arc_bytes
        if offload_seconds is not None:
            is_storage = self._arc_storages >= 0
            save_costs[is_storage] = np.minimum(save_costs, offload_seconds[self._arc_storages])[is_storage]
        side, bound = self._flow.cut(self._arc_seconds + save_costs, _SOURCE, _SINK)
        return self._read_cut(side, price, offload_seconds), bound

    def _read_cut(self, side: Flags, price: float, offload_seconds: Floats | None) -> Cut:
        """The cut with the nodes of `side` on the source's side, for the given prices."""
        problem = self._problem
        recomputed = [op for op, node in self._op_node.items() if side[node]]
        again = set(recomputed)
        saved = frozenset(
            storage
            for storage, node in self._storage_node.items()
            if side[node] and problem.producer[storage] not in again
        )
        offloaded: frozenset[int] = frozenset()
        if offload_seconds is not None:
            offloaded = frozenset(s for s in saved if offload_seconds[s] < price * problem.storages[s].bytes)
        saved_bytes = sum(problem.storages[storage].bytes for storage in saved - offloaded)
        return Cut(saved, saved_bytes, sum(problem.ops[op].seconds for op in sorted(recomputed)), offloaded)

    def _build(self, needed: list[int], held: Collection[int]) -> None:
        """Add the arcs of the needed storages and of all ops and storages from which they can be recomputed."""
        problem = self._problem
        pending = sorted(needed)
        for storage in pending:
            self._arc(_SOURCE, self._node(self._storage_node, storage), seconds=float("inf"))
        seen = set(pending)
        while pending:
            storage = pending.pop()
            op = problem.producer[storage]
            if not problem.ops[op].recomputable:
                self._arc(self._storage_node[storage], _SINK, storage)
                continue
            is_new = op not in self._op_node
            self._arc(self._storage_node[storage], self._node(self._op_node, op), storage)
            if not is_new:
                continue
            self._arc(self._op_node[op], _SINK, seconds=problem.ops[op].seconds)
            for read in sorted(set(problem.ops[op].reads)):
                if read in held:
                    continue
                self._arc(self._op_node[op], self._node(self._storage_node, read), seconds=float("inf"))
                if read not in seen:
                    seen.add(read)
                    pending.append(read)

    def _node(self, nodes: dict[int, int], key: int) -> int:
        """The network node of a storage or an op, added to `nodes` if it is new."""
        if key not in nodes:
            nodes[key] = 2 + len(self._storage_node) + len(self._op_node)
        return nodes[key]

    def _arc(self, tail: int, head: int, storage: int = _NONE, seconds: float = 0.0) -> None:
        """Add an arc that costs the bytes of `storage` times the price of the cut, or `seconds` at any price."""
        self._tails.append(tail)
        self._heads.append(head)
        self._storages.append(storage)
        self._bytes.append(0 if storage == _NONE else self._problem.storages[storage].bytes)
        self._seconds.append(seconds)


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


def between(network: CutNetwork, left: Cut, right: Cut) -> Cut | None:
    """A vertex of the lower hull between the cuts `left` and `right`, below the line through them; None if there is
    none."""
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


class MinimumCut:
    """Proposes, for each cut of `lower_hull`, the schedule that saves its storages (`just_in_time`).

    The schedules are the same at every budget; the portfolio takes those that fit, and repairs those with the next
    higher peaks.
    """

    name = "minimum cut"

    def candidates(self, problem: RematProblem, budget_bytes: int) -> list[Schedule]:
        return [just_in_time(problem, cut.saved) for cut in lower_hull(CutNetwork(problem))]


def just_in_time(problem: RematProblem, saved: Collection[int]) -> Schedule:
    """The forward in order, then each backward op, preceded by the recomputation of the storages that it misses.

    A recomputed storage is held until its last read, so every op runs at most twice. Storages that are live to the end
    (`Storage.kept`) and those that cannot be recomputed count as saved. Raises `ValueError` for a storage that is not
    in the problem."""
    unknown = [storage for storage in saved if not 0 <= storage < len(problem.storages)]
    if unknown:
        raise ValueError(f"storages {unknown} to save are not among the problem's {len(problem.storages)} storages")
    first = problem.forward_ops
    present = set(saved)
    for index, op in enumerate(problem.ops[:first]):
        present.update(s for s in op.makes if problem.storages[s].kept or not problem.ops[index].recomputable)
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
