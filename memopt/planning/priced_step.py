"""A training call as its traced graphs, and these graphs priced: the problems that schedules are solved for."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

from torch import fx

from memopt.account.account import Account
from memopt.account.sharded import Sharding
from memopt.capture.captured_call import EagerCodeBytes, Passed
from memopt.capture.data_sizes import DataSizes
from memopt.capture.joint import JointGraph
from memopt.capture.operators import NOTHING, Operators, Rewriting
from memopt.capture.tensor_parallel import exchange_seconds, is_exchange
from memopt.compat.symbols import known_sizes, sizes_up_to
from memopt.device import Hardware
from memopt.device.devices import device_of
from memopt.device.storages import made_bytes, storage_bytes, tensors_of
from memopt.lru import LruCache
from memopt.optimizers import Stepping
from memopt.planning.joined import Joined, join, with_meanwhile
from memopt.price.price import is_scheduled, price, price_nodes
from memopt.price.priced_graph import GraphUse, NodePrice, PricedGraph, Reduction, hostable, with_eager
from memopt.solver import Link, Solver
from memopt.units import size
from passes.graphs.node_facts import graph_results, is_random, is_tangent

_SHARES = 8
"""Plans are tried with 1/8, 2/8, … and all of the bytes of frozen parameters that may lie on the host."""
_MOST_PRICED = 32
"""The number of settings by which a traced step stays priced: a few situations, and combinations of proposals."""


@dataclass(frozen=True)
class PriceSettings:
    """The settings for operators' bytes and seconds: the hardware, and what may be recomputed or moved."""

    hardware: Hardware = field(hash=False)
    timed: bool = False
    """Whether operators are timed on this machine where that is possible, rather than estimated."""
    recompute: bool = True
    """Whether operators may be recomputed."""
    link: Link | None = None
    """The link to the host, for activations and for parameters that lie there; None where nothing may be copied."""
    activations: bool = True
    """Whether activations may be offloaded over `link`."""
    frozen: frozenset[int] = frozenset()
    """The `id`s of the parameters that may lie on the host, and are then copied to the device over the link."""
    hosted: frozenset[int] = frozenset()
    """The numbers of the inputs that do lie on the host."""
    solvers: tuple[Solver, ...] = field(default=(), hash=False)
    """The user's own solvers, whose schedules compete with those of memopt's."""
    stepping: Stepping | None = None
    """How the optimizer steps within the backward; None where it steps after it."""
    accumulating: bool = False
    """Whether gradients are added to an existing `.grad`."""
    meanwhile: int = 0
    """Bytes that other code takes between the forward and the backward."""

    def under(self, account: Account) -> PriceSettings:
        """A copy with what follows from an account: whether gradients exist before, and what other code allocates."""
        return replace(self, accumulating=account.gradients_held, meanwhile=account.meanwhile)


@dataclass(frozen=True, eq=False)
class TracedStep:
    """The joint graphs of one training call, in the order of their forwards, under one set of levers."""

    model_name: str
    regions: tuple[JointGraph, ...]
    notes: tuple[str, ...] = ()
    data_sizes: DataSizes = field(default_factory=DataSizes)
    """The changing and data-dependent sizes of a call that is one region."""
    rewriting: Rewriting = NOTHING
    """The rewriting by which the operator graphs of the regions were changed."""
    run_sizes: tuple[DataSizes, ...] = ()
    """The changing sizes of each region of a call in several; empty for one region, whose sizes are `data_sizes`."""
    eager: tuple[EagerCodeBytes, ...] = ()
    """The bytes of eager code around each region of a call in several, as `eager_of_runs` returns them; else empty."""
    passed: tuple[Passed, ...] = ()
    """The results of each region of a call in several that do not stay to the end of the step; else empty."""
    sharded: Sharding | None = None
    """How the parameters are spread over a cluster; None for one card."""
    kept: tuple[tuple[str, int], ...] = ()
    """Under FSDP2, the path and the bytes of each block that stays gathered from its forward to its backward."""
    _priced: LruCache[PriceSettings, PricedStep] = field(
        default_factory=lambda: LruCache(_MOST_PRICED), init=False, repr=False
    )
    _node_prices: dict[object, Callable[[fx.Node], NodePrice]] = field(default_factory=dict, init=False, repr=False)
    """The prices of nodes, by the device, their graph and the sizes that they are for."""

    def price(self, settings: PriceSettings) -> PricedStep:
        """The step in bytes and seconds by these settings; cached for the latest settings."""
        if settings not in self._priced:
            self._priced[settings] = PricedStep.of(self, settings)
        return self._priced[settings]

    def forget_solvers(self) -> None:
        """Free the solvers of all problems that were made from this step, as `Joined.forget_solvers` does."""
        for _, priced in self._priced.items():
            for problem in (priced.seen, priced.plain, *priced._leaving.values()):
                problem.forget_solvers()

    @property
    def tangent_bytes(self) -> int:
        """The bytes of the gradients with which the backward begins; 0 if the loss is within the last region."""
        number = len(self.regions) - 1
        if not self.regions[number].ends_before_loss:
            return 0
        given = self.regions[number].module.graph.find_nodes(op="placeholder")
        with self.with_sizes(number):
            return sum(made_bytes(node, tensor) for node in given if is_tangent(node) for tensor in tensors_of(node))

    @property
    def draws(self) -> bool:
        """Whether any operator draws random numbers, as dropout does."""
        return any(map(is_random, (node for region in self.regions for node in region.module.graph.nodes)))

    @property
    def rewriting_of_regions(self) -> Rewriting:
        """The step's rewriting for single regions, which raises no error for one with nothing to rewrite."""
        return replace(self.rewriting, needed="")

    @property
    def all_notes(self) -> tuple[str, ...]:
        """The plan's notes about the capture, the passes of each region, and data-dependent sizes."""
        regions = (note for region in self.regions if region.operators for note in region.operators.notes)
        return self.notes + tuple(dict.fromkeys(regions)) + self.data_sizes.notes()

    @property
    def operators(self) -> tuple[Operators, ...]:
        """The operator graphs, before and after each pass, of the regions whose operator graphs were rewritten."""
        return tuple(region.operators for region in self.regions if region.operators and region.operators.stages)

    def sizes_of(self, number: int, *, as_seen: bool = False) -> Mapping[str, int]:
        """The symbolic sizes of region `number`: the largest planned for, or with `as_seen` the current ones."""
        sizes = self.run_sizes[number] if self.run_sizes else self.data_sizes
        return sizes.seen if as_seen else sizes.allowed

    def with_sizes(self, number: int, *, as_seen: bool = False) -> AbstractContextManager[None]:
        """Context in which the symbolic sizes of region `number` are those of `sizes_of`."""
        sizes = self.sizes_of(number, as_seen=as_seen)
        return known_sizes(sizes) if as_seen else sizes_up_to(sizes)

    def decisions(self, number: int, card: Hardware) -> frozenset[fx.Node]:
        """The nodes of region `number` that are never recomputed because they make a discrete choice, as `topk` does,
        that rounding could change. Empty for plain operators on a CPU, which give the same bits each time; compiled
        kernels and those of a GPU may not."""
        region = self.regions[number]
        return region.decisions if region.fused or not device_of(card).is_host else frozenset()

    def node_prices(self, number: int, settings: PriceSettings, *, as_seen: bool) -> Callable[[fx.Node], NodePrice]:
        """The prices of the nodes of region `number`, for sizes as in `sizes_of`; equal regions share them."""
        region = self.regions[number]
        of_device = PriceSettings(settings.hardware, settings.timed)
        key = of_device, id(region.module), tuple(self.sizes_of(number, as_seen=as_seen).items()), as_seen
        if key not in self._node_prices:
            held = [node for node in region.held_nodes if is_scheduled(node)]
            prices = price_nodes(held, settings.hardware, timed=settings.timed, generated=region.generated)
            if self.sharded is not None:
                prices |= exchange_prices(self.sharded, held)
            self._node_prices[key] = prices.__getitem__
        return self._node_prices[key]


@dataclass(frozen=True, eq=False)
class PricedStep:
    """A traced step as problems of the solver in bytes and seconds, under one `PriceSettings`."""

    traced: TracedStep
    settings: PriceSettings
    problem: Joined
    """All regions as the one problem that is solved, at the largest sizes that are allowed."""
    seen: Joined
    """The same problem at the sizes of the batch at hand."""
    plain: Joined
    """As `seen`, with no result written over an operand."""
    _leaving: dict[frozenset[int], Joined] = field(default_factory=dict, repr=False)
    """`problem` with further parameters stepped at the end of the backward only, by their numbers."""

    @classmethod
    def of(cls, traced: TracedStep, settings: PriceSettings) -> PricedStep:
        """The traced step as problems of the solver, priced by these settings."""
        made: dict[frozenset[int], Joined] = {}

        def leaving(left: frozenset[int]) -> Joined:
            if left not in made:
                found = _problem(traced, settings, left=left)
                made[left] = replace(found, leaving=lambda more: leaving(left | more))
            return made[left]

        problem = seen = plain = leaving(frozenset())
        if any(sizes.seen != sizes.allowed for sizes in (traced.data_sizes, *traced.run_sizes)):
            seen = plain = _problem(traced, settings, as_seen=True)
        if any(region.reuses for region in traced.regions):
            plain = _problem(traced, settings, as_seen=seen is not problem, reinplace=False)
        return cls(traced, settings, problem, seen, plain, made)

    @cached_property
    def hostable(self) -> dict[int, int]:
        """The bytes of each input that may lie on the host, by input number, in the order in which they are first read:
        the frozen parameters of a call that is one region of plain operators; empty for other calls."""
        traced, (region, *others) = self.traced, self.traced.regions
        of_region = getattr(region.trace, "region", None)
        if not self.settings.frozen or of_region is None or others or traced.eager or traced.sharded or region.places:
            return {}
        if region.fused or of_region.depends_on_data:
            return {}
        found = {number for number, one in region.frozen_ids.items() if one in self.settings.frozen}
        return hostable(region.module.graph, found - region.overwritten, self.settings.hardware.least_moved_bytes)

    @property
    def host_room_bytes(self) -> float:
        """The most bytes of the host's memory that the step may take."""
        link = self.settings.link
        return math.inf if link is None or link.host_bytes is None else link.host_bytes

    def host_choices(self) -> list[tuple[int, ...]]:
        """Sets of inputs (frozen parameters) to put on the host, as input numbers, from few to all that the host has
        room for. Each is spread evenly over the step, so that compute hides as many of the copies as possible: in the
        order of the bits of places read backwards (van der Corput, 1935)."""
        numbers, total = list(self.hostable), sum(self.hostable.values())
        bits = max(1, (len(numbers) - 1).bit_length())
        places = sorted(range(len(numbers)), key=lambda place: int(f"{place:0{bits}b}"[::-1], 2))
        order = [numbers[place] for place in places]
        sums = list(accumulate(self.hostable[number] for number in order))
        most = (min(total * part // _SHARES, self.host_room_bytes) for part in range(1, _SHARES + 1))
        counts = {sum(nbytes <= room for nbytes in sums) for room in most}
        return [tuple(order[:count]) for count in sorted(counts) if count]

    def host_notes(self) -> tuple[str, ...]:
        """A note for the plan where host memory has no room for all frozen parameters that may lie there; else none."""
        total, room = sum(self.hostable.values()), self.host_room_bytes
        return (
            f"the host has room for {size(int(min(total, room)))} of the {size(total)} of frozen parameters that may "
            "lie there: give host_gb if it has more",
        ) * (total > room)

    def notes_on_stacks(self) -> tuple[str, ...]:
        """A note for the plan where parameters on the host are stacks of matrices, as of experts; else none."""
        (region, *_) = self.traced.regions
        inputs = enumerate(region.module.graph.find_nodes(op="placeholder"))
        three = (node for number, node in inputs if number in self.settings.hosted and node.meta["val"].dim() == 3)
        count = sum(not any("conv" in str(user.target) for user in node.users) for node in three)
        return (
            f"{count} of the parameters on the host are stacks of matrices, as of experts: each is copied to the "
            "device as a whole, even if a batch reaches few of the experts",
        ) * (count > 0)

    def under(self, account: Account) -> PricedStep:
        """The same step, priced for another account."""
        return self.traced.price(self.settings.under(account))

    def priced_for(self, **changes: Any) -> PricedStep:
        """The same step, priced by its settings with some fields changed; `changes` are fields of `PriceSettings`."""
        return self.traced.price(replace(self.settings, **changes))

    def stepping_as(self, steps: Sequence[Sequence[int]]) -> PricedStep:
        """The same step where only the parameters in `steps` (for each region, input numbers) are stepped by the
        optimizer as soon as their gradients are complete, and all others at the end of their region's backward."""
        if self.settings.stepping is None:
            return self
        inside = {number for numbers_of_region in steps for number in numbers_of_region}
        numbers = {number for region in self.traced.regions for number in region.parameter_inputs}
        return self.priced_for(stepping=self.settings.stepping.leaving(numbers - inside))


def _problem(
    traced: TracedStep,
    settings: PriceSettings,
    *,
    as_seen: bool = False,
    left: frozenset[int] = frozenset(),
    reinplace: bool = True,
) -> Joined:
    """The regions of a step as one problem. `left`: numbers of parameters that are stepped at the end of the backward
    only; `reinplace`: results may be written over operands."""
    prices = partial(_priced_region, traced, settings, as_seen=as_seen, left=left, reinplace=reinplace)
    joined = join([prices(number) for number in range(len(traced.regions))], traced.passed)
    given, trained = _inputs(traced, as_seen=as_seen)
    return replace(
        joined,
        problem=with_meanwhile(joined.problem, settings.meanwhile),
        recompute=settings.recompute,
        solvers=settings.solvers,
        link=settings.link if settings.activations or settings.hosted else None,
        given=given,
        trained=trained,
        libraries=device_of(settings.hardware).library_workspaces(settings.hardware),
        left=left,
    )


def _priced_region(
    traced: TracedStep, settings: PriceSettings, number: int, *, as_seen: bool, left: frozenset[int], reinplace: bool
) -> PricedGraph:
    region, sharded = traced.regions[number], traced.sharded
    least_moved = 0 if as_seen else settings.hardware.least_moved_bytes
    with traced.with_sizes(number, as_seen=as_seen):
        use = GraphUse(
            accumulated=region.parameter_gradients if settings.accumulating and sharded is None else (),
            fused=region.fused_away,
            least_moved_bytes=least_moved if settings.activations else sys.maxsize,
            hosted=settings.hosted,
            block_bytes=device_of(settings.hardware).block_bytes,
            reuses=region.reuses if reinplace else (),
            released=region.released,
            overwritten=region.overwritten,
            decisions=traced.decisions(number, settings.hardware),
            reductions=reductions_of(sharded, region, accumulating=settings.accumulating) if sharded else (),
            receivers=region.receivers if region.places else None,
            **_steps(traced, settings.stepping, region, left),
            **_exchanged(traced, number),
        )
        priced = price(
            region.module, region.forward_outputs, traced.node_prices(number, settings, as_seen=as_seen), use
        )
    return with_eager(priced, number, traced.eager) if traced.eager else priced


def _inputs(traced: TracedStep, *, as_seen: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The bytes of all tensors that the regions take as input, and of those that get a gradient."""
    given: list[int] = []
    trained: list[int] = []
    for number, region in enumerate(traced.regions):
        gradients = graph_results(region.module.graph)[region.forward_outputs :]
        inputs = [node for node in region.module.graph.find_nodes(op="placeholder") if not is_tangent(node)]
        receivers = [inputs[taker] for position, taker in region.receivers.items() if gradients[position] is not None]
        with traced.with_sizes(number, as_seen=as_seen):
            for nodes, found in ((inputs, given), (receivers, trained)):
                found += (storage_bytes(tensor) for node in nodes for tensor in tensors_of(node))
    return tuple(given), tuple(trained)


def _exchanged(traced: TracedStep, number: int) -> dict[str, Any]:
    """The exchanges of a region with other code, as fields of `GraphUse`; none for the only region."""
    if not traced.passed:
        return {}
    region, passed = traced.regions[number], traced.passed[number]
    (results,) = region.trace.region.graph_module.graph.output_node().args
    outputs = passed.outputs if len(results) == region.forward_outputs else frozenset()
    gradients = {region.forward_outputs + given for given in passed.gradients}
    # Where tensor subclasses are unwrapped, the numbers of the graph's inputs are others.
    given = () if region.places else tuple(passed.given)
    return {"passed_on": outputs | gradients, "forward_only": tuple(passed.forward_only), "given": given}


def _steps(traced: TracedStep, stepping: Stepping | None, region: JointGraph, left: frozenset[int]) -> dict[str, Any]:
    """The parameters stepped in a region's backward, as fields of `GraphUse`: before its end if it is the only one, not
    fused, not `left`."""
    if stepping is None:
        return {}
    given = [node for node in region.module.graph.find_nodes(op="placeholder") if not is_tangent(node)]
    sizes = {number: stepping.workspace_bytes(node.meta["val"]) for number, node in enumerate(given)}
    workspaces = {number: nbytes for number, nbytes in sizes.items() if nbytes is not None}
    inside = region.parameter_gradients if len(traced.regions) == 1 and not region.fused else {}
    steady = stepping.left | left
    stepped = {at: number for at, number in inside.items() if number in workspaces and number not in steady}
    return {"stepped": stepped, "step_workspaces": workspaces}


def reductions_of(sharding: Sharding, region: JointGraph, *, accumulating: bool) -> tuple[Reduction, ...]:
    """The reduce-scatters of the gradients that the only graph of a call makes, one for each group of parameters.
    `accumulating`: shards of gradients exist already, and are added to.

    The account counts one buffer, as large as the largest block needs. A reduction's own bytes are those beyond it: 0
    for a block, and for the root module's parameters the bytes by which their buffer is larger."""
    given = {number: region.trace.region.parameter_ids.get(number) for number in region.inputs_with_gradients}
    found = []
    for group in sharding.groups:
        positions = frozenset(region.forward_outputs + at for at, one in given.items() if one in group.numbers)
        beyond = 0 if group.name else max(0, group.reduced_bytes - sharding.exchange_bytes)
        if positions:
            made = 0 if accumulating else group.shard_bytes
            found.append(Reduction(f"reduce_{group.name or 'root'}", positions, beyond, made))
    return tuple(found)


def exchange_prices(sharding: Sharding, nodes: Iterable[fx.Node]) -> dict[fx.Node, NodePrice]:
    """The prices of the exchanges of tensor parallelism among these nodes: seconds on the links between cards."""
    ring = sharding.cluster.tp
    return {node: NodePrice(exchange_seconds(node, ring), 0) for node in nodes if is_exchange(node)}
