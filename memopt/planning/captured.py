"""A captured training call, rewritten and ready to be priced, and the problem that its regions make together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import fx

from memopt.account.account import Account
from memopt.account.breakdown import is_receipt
from memopt.account.caching_allocator import ROUNDING_BYTES
from memopt.capture.between import EagerBytes, Passed
from memopt.capture.data_sizes import DataSizes
from memopt.capture.joint import JointGraph
from memopt.capture.operators import NOTHING, Operators, Rewriting
from memopt.compat.symbols import known_sizes
from memopt.device import Hardware
from memopt.device.storages import storage_bytes, tensors_of
from memopt.optimizers import Stepping
from memopt.planning.sharded_call import ShardedCall
from memopt.price.eager_ops import with_eager
from memopt.price.node_prices import price_nodes
from memopt.price.parameter_steps import ParameterSteps
from memopt.price.price import price
from memopt.price.priced_graph import NodePrice, PassedOn, PricedGraph, PricedParameterStep
from memopt.price.scheduled_nodes import is_scheduled
from memopt.solver import Link, OffloadPortfolio, Op, Portfolio, RematProblem, SaveAll, Solution, Solver
from passes.graphs.node_facts import is_tangent


@dataclass(eq=False)
class Captured:
    """The joint graphs of one training call, in the order of their forwards, and the device that they are priced for.

    It owns the prices and the problems that are made from them: a few, since they differ by a few flags only.
    """

    model_name: str
    regions: tuple[JointGraph, ...]
    hardware: Hardware
    notes: tuple[str, ...] = ()
    data_sizes: DataSizes = field(default_factory=DataSizes)
    """The sizes of a call that is one region."""
    timed: bool = False
    """Whether operators are timed on this machine where that is possible, rather than estimated."""
    rewriting: Rewriting = NOTHING
    """The rewriting by which the operator graphs of the regions were changed."""
    recompute: bool = True
    """Whether operators may be recomputed."""
    link: Link | None = None
    """The link over which activations may be offloaded to the host; None where they may not be."""
    stepping: Stepping | None = None
    """How the optimiser steps within the backward; None where it steps after it."""
    solvers: tuple[Solver, ...] = ()
    """The user's own solvers, whose schedules compete with those of memopt's."""
    run_sizes: tuple[DataSizes, ...] = ()
    """The changing sizes of each region of a call in several; empty for one region, whose sizes are `data_sizes`."""
    eager: tuple[EagerBytes, ...] = ()
    """The bytes of eager code around each region of a call in several, as `eager_of_runs` has them; else empty."""
    passed: tuple[Passed, ...] = ()
    """The results of each region of a call in several that do not stay to the end of the step; else empty."""
    sharded: ShardedCall | None = None
    """How the parameters are spread over a cluster; None for one card."""
    kept: tuple[tuple[str, int], ...] = ()
    """Under FSDP2, the path and the bytes of each block that stays gathered from its forward to its backward."""
    base: Captured | None = field(default=None, repr=False, compare=False)
    """The same call without `stepping`, which owns the prices; None where this is that call."""
    _siblings: dict[Stepping, Captured] = field(default_factory=dict, init=False, repr=False)
    _node_prices: dict[object, Callable[[fx.Node], NodePrice]] = field(default_factory=dict, init=False, repr=False)
    """The prices of nodes, by their graph and the sizes that they are for."""
    _joined: dict[tuple[bool, bool, frozenset[int], bool], Joined] = field(default_factory=dict, init=False, repr=False)
    """The problems, by the arguments of `joined`."""

    def stepping_by(self, stepping: Stepping | None) -> Captured:
        """The same call with the optimiser stepping as `stepping` says; equal arguments return the same object."""
        base = self.base or self
        if stepping is None:
            return base
        if stepping not in base._siblings:
            base._siblings[stepping] = replace(base, stepping=stepping, base=base)
        return base._siblings[stepping]

    def stepping_as(self, steps: Sequence[Sequence[int]]) -> Captured:
        """The same call with only the inputs of `steps`, one sequence of input numbers per region, stepped earlier than
        at the end of their region's backward."""
        if self.stepping is None:
            return self
        inside = {number for numbers_of_region in steps for number in numbers_of_region}
        numbers = {number for region in self.regions for number in region.parameter_inputs}
        return self.stepping_by(self.stepping.leaving(numbers - inside))

    def forget_solvers(self) -> None:
        """Free the solvers of all problems that were made from this call, as `Joined.forget_solvers` does."""
        for joined in self._joined.values():
            joined.forget_solvers()
        for sibling in self._siblings.values():
            sibling.forget_solvers()

    @property
    def rewriting_of_regions(self) -> Rewriting:
        """The rewriting for a call of several regions, which need not find something to rewrite in every one."""
        return replace(self.rewriting, needed="")

    @property
    def all_notes(self) -> tuple[str, ...]:
        """The notes for the plan on the capture, on the passes of each region, and on data-dependent sizes."""
        regions = (note for region in self.regions if region.operators for note in region.operators.notes)
        return self.notes + tuple(dict.fromkeys(regions)) + self.data_sizes.notes()

    @property
    def operators(self) -> tuple[Operators, ...]:
        """The operator graphs, with the stages of their passes, of the regions whose operator graphs were rewritten."""
        return tuple(region.operators for region in self.regions if region.operators and region.operators.stages)

    def joined(
        self, *, accumulating: bool, as_seen: bool = False, left: frozenset[int] = frozenset(), reinplace: bool = True
    ) -> Joined:
        """The regions as one problem, which is made once for the same arguments.

        Args:
            accumulating: gradients are added to an existing `.grad`.
            as_seen: data-dependent sizes are those of the batch at hand rather than the largest that are allowed.
            left: the numbers of further parameters that are stepped at the end of the backward only.
            reinplace: results may be written over operands.
        """
        key = (accumulating, as_seen and self._seen_differs, left, reinplace)
        if key not in self._joined:
            self._joined[key] = replace(
                join(self._prices(accumulating, key[1], left, reinplace=reinplace), self.passed),
                recompute=self.recompute,
                solvers=self.solvers,
                link=self.link,
                given=self._given(key[1]),
                trained=self._given(key[1], trained=True),
                major=self.hardware.major,
                left=left,
                leaving=lambda more: self.joined(accumulating=accumulating, as_seen=as_seen, left=left | more),
            )
        return self._joined[key]

    @cached_property
    def _seen_differs(self) -> bool:
        """Whether the sizes of the batch at hand are others than the largest that are allowed."""
        return any(sizes.seen != sizes.allowed for sizes in (self.data_sizes, *self.run_sizes))

    def sizes_of(self, number: int, *, as_seen: bool = False) -> Mapping[str, int]:
        """The values of the symbols of region `number`: the largest that are allowed, or those of the batch at hand."""
        sizes = self.run_sizes[number] if self.run_sizes else self.data_sizes
        return sizes.seen if as_seen else sizes.allowed

    def _given(self, as_seen: bool, *, trained: bool = False) -> tuple[int, ...]:
        """The bytes of each tensor that the regions take as input: parameters, buffers and inputs of the call; only of
        those that get a gradient if `trained`."""
        given: list[int] = []
        for number, region in enumerate(self.regions):
            (results,) = region.module.graph.output_node().args
            assert isinstance(results, (tuple, list))
            gradients = results[region.forward_outputs :]
            with known_sizes(self.sizes_of(number, as_seen=as_seen)):
                nodes = region.module.graph.find_nodes(op="placeholder")
                inputs = [node for node in nodes if not is_tangent(node)]
                if trained:
                    received = region.receivers.items()
                    inputs = [inputs[number] for position, number in received if gradients[position] is not None]
                given += (storage_bytes(tensor) for node in inputs for tensor in tensors_of(node))
        return tuple(given)

    def _prices(self, accumulating: bool, as_seen: bool, left: frozenset[int], *, reinplace: bool) -> list[PricedGraph]:
        found: list[PricedGraph] = []
        for number, region in enumerate(self.regions):
            with known_sizes(self.sizes_of(number, as_seen=as_seen)):
                priced = price(
                    region.module,
                    region.forward_outputs,
                    self._prices_of_nodes(number, as_seen),
                    region.parameter_gradients if accumulating and self.sharded is None else (),
                    region.fused_away,
                    self.hardware.least_moved_bytes,
                    1 if self.hardware.name == "cpu" else ROUNDING_BYTES,
                    self._steps(region, left),
                    region.reuses if reinplace else (),
                    region.released,
                    self._passed_on(number),
                    region.overwritten,
                    self.sharded.reductions(region, accumulating=accumulating) if self.sharded else (),
                    region.receivers if region.places else None,
                )
            found.append(with_eager(priced, number, self.eager) if self.eager else priced)
        return found

    def _passed_on(self, number: int) -> PassedOn | None:
        """The results of a region that other code takes, and its inputs that are other regions' outputs. None for a
        call in one region, whose results all stay in memory to the end of the step."""
        if not self.passed:
            return None
        region, passed = self.regions[number], self.passed[number]
        (results,) = region.trace.region.graph_module.graph.output_node().args
        outputs = passed.outputs if len(results) == region.forward_outputs else frozenset()
        gradients = {region.forward_outputs + given for given in passed.gradients}
        # Where tensor subclasses are unwrapped, the numbers of the graph's inputs are others.
        given = () if region.places else tuple(passed.given)
        return PassedOn(outputs | gradients, tuple(passed.forward_only), given)

    def _prices_of_nodes(self, number: int, as_seen: bool) -> Callable[[fx.Node], NodePrice]:
        """The prices of the nodes of region `number`, made once for all runs of one graph with the same sizes."""
        same = self.base if self.base is not None and self.base.hardware == self.hardware else self
        region = self.regions[number]
        key = id(region.module), tuple(self.sizes_of(number, as_seen=as_seen).items()), as_seen
        if key not in same._node_prices:
            held = [node for node in region.held_nodes if is_scheduled(node)]
            prices = price_nodes(held, self.hardware, timed=self.timed, generated=region.generated)
            if self.sharded is not None:
                prices |= self.sharded.exchange_prices(held)
            same._node_prices[key] = prices.__getitem__
        return same._node_prices[key]

    def _steps(self, region: JointGraph, left: frozenset[int]) -> ParameterSteps:
        """The parameters that are stepped in the backward of a region; before its end only where there is no other."""
        if self.stepping is None:
            return ParameterSteps()
        given = [node for node in region.module.graph.nodes if node.op == "placeholder" and not is_tangent(node)]
        sizes = {number: self.stepping.workspace_bytes(node.meta["val"]) for number, node in enumerate(given)}
        workspaces = {number: nbytes for number, nbytes in sizes.items() if nbytes is not None}
        inside = region.parameter_gradients if len(self.regions) == 1 and not region.fused else {}
        steady = self.stepping.left | left
        return ParameterSteps(
            {at: number for at, number in inside.items() if number in workspaces and number not in steady}, workspaces
        )


@dataclass(eq=False)
class Joined:
    """The regions of a call as one problem: all forwards in order, then the backwards from the last to the first.

    It owns the solutions that were found for it, one for each budget and effort that was asked for.
    """

    problem: RematProblem
    owner: tuple[tuple[int, int], ...]
    """By op the number of its region, and its index in that region's problem."""
    prices: tuple[PricedGraph, ...]
    recompute: bool = True
    """Whether operators may be recomputed."""
    link: Link | None = None
    """The link over which activations may be offloaded to the host; None where they may not be."""
    solvers: tuple[Solver, ...] = ()
    """The user's own solvers, whose schedules compete with those of memopt's."""
    given: tuple[int, ...] = ()
    """The bytes of each tensor that the regions take as input."""
    trained: tuple[int, ...] = ()
    """The bytes of those among them that get a gradient: the parameters that are trained."""
    major: int = 0
    """The major number of the card's compute capability; 0 for other devices."""

    left: frozenset[int] = frozenset()
    """The numbers of the inputs that are stepped at the end of the backward only, since schedules read them late."""
    leaving: Callable[[frozenset[int]], Joined] | None = field(default=None, repr=False, compare=False)
    """Returns the same problem with further inputs stepped at the end of the backward only."""
    on_cards: dict[tuple[object, ...], Account] = field(default_factory=dict, init=False, repr=False)
    """The results of `on_card`, by its arguments."""
    solved: dict[tuple[int, str, float], Solution | None] = field(default_factory=dict, init=False, repr=False)
    """The solutions of `portfolio`, by the bytes that the graph may hold, the effort and its limit in seconds; None
    where no schedule fits."""

    @property
    def steps(self) -> Mapping[int, PricedParameterStep]:
        """The ops that stand for steps of parameters within the backward, by their index; none for several regions."""
        return self.prices[0].steps if len(self.prices) == 1 else {}

    @cached_property
    def portfolio(self) -> Portfolio | SaveAll:
        """The solvers of schedules without offloads."""
        return (Portfolio if self.recompute else SaveAll)(self.problem, self.solvers)

    @cached_property
    def offloads(self) -> OffloadPortfolio:
        """The solvers of schedules with offloads. Where nothing may be recomputed, all ops are marked as such."""
        if isinstance(self.portfolio, Portfolio):
            return OffloadPortfolio(self.problem, self.portfolio)
        once = tuple(replace(op, recomputable=False) for op in self.problem.ops)
        return OffloadPortfolio(replace(self.problem, ops=once))

    @cached_property
    def smallest(self) -> Solution:
        """The solution with the smallest peak found. With offloads, solvers of its own find it: of several schedules
        with that peak, those that have solved for other budgets would find another."""
        return self.portfolio.smallest() if self.link is None else replace(self).offloads.smallest(self.link)

    @property
    def knows_smallest(self) -> bool:
        """Whether the solution with the smallest peak has been asked for before."""
        return "smallest" in vars(self)

    def forget_solvers(self) -> None:
        """Free the solvers, with their tables, and what they found for budgets: both are made again when they are asked
        for. The solution with the smallest peak depends on no budget, and stays."""
        for made in ("portfolio", "offloads"):
            vars(self).pop(made, None)
        self.solved.clear()


def join(prices: Sequence[PricedGraph], passed: Sequence[Passed] = ()) -> Joined:
    """One problem from those of the regions. A value that one region passes to the next is an output of the first, and
    is never recomputed: it lives until the last op of any region that reads it, and as long as `passed` says."""
    ops: list[Op] = []
    owner: list[tuple[int, int]] = []
    starts = [0]
    for priced in prices:
        starts.append(starts[-1] + len(priced.problem.storages))

    def add(region: int, indices: range) -> None:
        for index in indices:
            op = prices[region].problem.ops[index]
            path = prices[region].modules[index]
            name = f"{op.name} of {path}" if path else op.name
            reads, makes = (tuple(starts[region] + s for s in storages) for storages in (op.reads, op.makes))
            ops.append(replace(op, name=name, reads=reads, makes=makes))
            owner.append((region, index))

    for region, priced in enumerate(prices):
        add(region, range(priced.problem.forward_ops))
    # The last region's tangents come between its forward and its backward: nothing runs before they are there.
    forward_ops = len(ops) + _tangents(prices[-1].problem)
    for region, priced in reversed(list(enumerate(prices))):
        add(region, range(priced.problem.forward_ops, len(priced.problem.ops)))
    storages = tuple(storage for priced in prices for storage in priced.problem.storages)
    further = _reads_of_others(prices, passed)
    linked = (
        replace(op, reads=tuple(dict.fromkeys((*op.reads, *(starts[r] + s for r, s in further.get(place, ()))))))
        for op, place in zip(ops, owner, strict=True)
    )
    return Joined(RematProblem(tuple(linked), storages, forward_ops), tuple(owner), tuple(prices))


def _reads_of_others(
    prices: Sequence[PricedGraph], passed: Sequence[Passed]
) -> Mapping[tuple[int, int], list[tuple[int, int]]]:
    """By an op, as `Joined.owner` names it, the outputs of regions that live until then at least: the number of the
    region, and of the storage in its problem."""
    found: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for region, (priced, mine) in enumerate(zip(prices, passed, strict=False)):
        for position, storage in priced.outputs.items():
            last = mine.forward_only[position]
            found[last, prices[last].problem.forward_ops - 1].append((region, storage))
        for number, (maker, position) in mine.given.items():
            if position not in prices[maker].outputs:
                continue
            own = priced.given.get(number)
            readers = [at for at, op in enumerate(priced.problem.ops) if own in op.reads]
            if own is None:  # written to, or a tensor that holds others
                readers = [len(priced.problem.ops) - 1]
            for at in readers:
                found[region, at].append((maker, prices[maker].outputs[position]))
    return found


def _tangents(problem: RematProblem) -> int:
    """The number of ops at the start of the backward that only receive the gradients of the outputs."""
    backward = problem.ops[problem.forward_ops :]
    return next((number for number, op in enumerate(backward) if not is_receipt(op)), len(backward))
