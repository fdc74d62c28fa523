"""A captured training call, rewritten and ready to be priced."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import fx

from memopt.capture.between import EagerBytes, Passed
from memopt.capture.data_sizes import DataSizes
from memopt.capture.joint import JointGraph
from memopt.capture.operators import NOTHING, Operators, Rewriting
from memopt.compat.symbols import known_sizes, sizes_up_to
from memopt.device import Hardware
from memopt.device.devices import device_of
from memopt.device.storages import storage_bytes, tensors_of
from memopt.optimizers import Stepping
from memopt.planning.joined import Joined, join, with_meanwhile
from memopt.planning.sharded_call import ShardedCall
from memopt.price.eager_ops import with_eager
from memopt.price.graph_use import GraphUse
from memopt.price.node_prices import price_nodes
from memopt.price.parameter_steps import ParameterSteps
from memopt.price.price import price
from memopt.price.priced_graph import NodePrice, PassedOn, PricedGraph
from memopt.price.scheduled_nodes import is_scheduled
from memopt.solver import Link, Solver
from passes.graphs.node_facts import is_random, is_tangent


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
    _joined: dict[tuple[bool, bool, frozenset[int], bool, int], Joined] = field(
        default_factory=dict, init=False, repr=False
    )
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
    def draws(self) -> bool:
        """Whether any of its operators draws random numbers."""
        return any(map(is_random, (node for region in self.regions for node in region.module.graph.nodes)))

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
        self,
        *,
        accumulating: bool,
        as_seen: bool = False,
        left: frozenset[int] = frozenset(),
        reinplace: bool = True,
        meanwhile: int = 0,
    ) -> Joined:
        """The regions as one problem, which is made once for the same arguments.

        Args:
            accumulating: gradients are added to an existing `.grad`.
            as_seen: data-dependent sizes are those of the batch at hand rather than the largest that are allowed.
            left: the numbers of further parameters that are stepped at the end of the backward only.
            reinplace: results may be written over operands.
            meanwhile: bytes that other code takes between the forward and the backward.
        """
        key = (accumulating, as_seen and self._seen_differs, left, reinplace, meanwhile)
        if key not in self._joined:
            joined = join(self._prices(accumulating, key[1], left, reinplace=reinplace), self.passed)
            self._joined[key] = replace(
                joined,
                problem=with_meanwhile(joined.problem, meanwhile),
                recompute=self.recompute,
                solvers=self.solvers,
                link=self.link,
                given=self._given(key[1]),
                trained=self._given(key[1], trained=True),
                libraries=device_of(self.hardware).library_workspaces(self.hardware),
                left=left,
                leaving=lambda more: self.joined(
                    accumulating=accumulating, as_seen=as_seen, left=left | more, meanwhile=meanwhile
                ),
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

    def with_sizes(self, number: int, *, as_seen: bool = False) -> AbstractContextManager[None]:
        """Context in which the sizes of region `number` are the largest that are allowed, or those of the batch at
        hand."""
        sizes = self.sizes_of(number, as_seen=as_seen)
        return known_sizes(sizes) if as_seen else sizes_up_to(sizes)

    def _given(self, as_seen: bool, *, trained: bool = False) -> tuple[int, ...]:
        """The bytes of each tensor that the regions take as input: parameters, buffers and inputs of the call; only of
        those that get a gradient if `trained`."""
        given: list[int] = []
        for number, region in enumerate(self.regions):
            (results,) = region.module.graph.output_node().args
            assert isinstance(results, (tuple, list))
            gradients = results[region.forward_outputs :]
            with self.with_sizes(number, as_seen=as_seen):
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
            with self.with_sizes(number, as_seen=as_seen):
                use = GraphUse(
                    accumulated=region.parameter_gradients if accumulating and self.sharded is None else (),
                    fused=region.fused_away,
                    least_moved_bytes=self.hardware.least_moved_bytes,
                    block_bytes=device_of(self.hardware).block_bytes,
                    steps=self._steps(region, left),
                    reuses=region.reuses if reinplace else (),
                    released=region.released,
                    passed_on=self._passed_on(number),
                    overwritten=region.overwritten,
                    reductions=self.sharded.reductions(region, accumulating=accumulating) if self.sharded else (),
                    receivers=region.receivers if region.places else None,
                )
                prices = self._prices_of_nodes(number, as_seen)
                priced = price(region.module, region.forward_outputs, prices, use)
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
