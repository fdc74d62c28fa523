"""Autograd: the backward pass that is running or begins, and the graph that it goes through."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.autograd.graph import GradientEdge
from torch.utils import checkpoint

from memopt.errors import UnplannedGradientError
from passes.compat import private

PRIVATE_NAMES = private("""
    torch._C: _will_engine_execute_node _current_autograd_node _current_graph_task_id
    torch._C._autograd: _get_current_graph_task_keep_graph
    torch.autograd: _get_sequence_nr _engine_run_backward(outputs) Variable._execution_engine.queue_callback
    torch.autograd.graph: Node._sequence_nr ._input_metadata? _engine_run_backward(outputs)
    torch._C._functorch: maybe_current_level is_batchedtensor is_legacy_batchedtensor
    torch.autograd.forward_ad: _current_level
    torch.utils.checkpoint: _StopRecomputationError
""")


class Fate(Enum):
    """The use that the running backward pass makes of the gradient of a leaf."""

    ACCUMULATED = "added to its .grad"
    RETURNED = "returned by torch.autograd.grad"
    DROPPED = "discarded"


def fate_of_gradient(leaf: torch.Tensor) -> Fate:
    """The use that the running backward pass will make of a leaf's gradient. To be called inside a backward pass."""
    return fate_at(torch.autograd.graph.get_gradient_edge(leaf).node)


def fate_at(node: Any) -> Fate:
    """The use that the running backward pass will make of the gradient of `node`, a leaf's autograd node."""
    try:
        return Fate.ACCUMULATED if torch._C._will_engine_execute_node(node) else Fate.DROPPED
    except RuntimeError:  # "A leaf node was passed … but we are currently running autograd.grad()"
        return Fate.RETURNED


def runs_node(node: Any) -> bool:
    """Whether the running backward will run an autograd node; False for None. Not to be called for nodes
    that accumulate gradients into leaves."""
    return node is not None and fate_at(node) is not Fate.DROPPED


def receivers() -> list[tuple[torch.Tensor | None, Fate]]:
    """For each tensor input of the captured region whose backward runs, all at once to save time: the leaf that was
    passed as it, and what autograd does with its gradient; (None, `Fate.RETURNED`) for no leaf."""
    nodes: list[Any] = [node for node, _ in current_node().next_functions]
    leaves = [getattr(node, "variable", None) for node in nodes]
    executes = torch._C._will_engine_execute_node
    try:
        return [
            (leaf, Fate.RETURNED if leaf is None else Fate.ACCUMULATED if executes(node) else Fate.DROPPED)
            for leaf, node in zip(leaves, nodes, strict=True)
        ]
    except RuntimeError:  # autograd.grad() refuses the question for the leaves whose gradients it returns
        return [
            (leaf, Fate.RETURNED if leaf is None else fate_at(node)) for leaf, node in zip(leaves, nodes, strict=True)
        ]


def note_reached(outputs: Sequence[tuple[tuple[Any, int], object]]) -> None:
    """Record in an autograd node's metadata which of its outputs have a gradient in the running backward. `outputs` has
    pairs of an edge (the node and the number of its output) and a gradient or None. Nothing is recorded if the edges
    are of several nodes, or their numbers are not ascending."""
    nodes, numbers = {id(node) for (node, _), _ in outputs}, [number for (_, number), _ in outputs]
    if len(nodes) == 1 and numbers == sorted(set(numbers)):
        (node, _), _ = outputs[0]
        node.metadata[_REACHED] = tuple(gradient is not None for _, gradient in outputs)


def reached_outputs() -> tuple[bool, ...] | None:
    """Whether each output of the autograd node that runs has a gradient, if `note_reached` recorded that; else None."""
    node = current_node()
    return None if node is None else node.metadata.get(_REACHED)


_REACHED = "memopt reached"


current_backward: Callable[[], int] = torch._C._current_graph_task_id
"""Returns a number that identifies the running backward pass, -1 outside of one."""

current_node: Callable[[], Any] = torch._C._current_autograd_node
"""Returns the autograd node that runs now, None outside of a backward pass."""


def when_backward_ends(function: Callable[[], None]) -> None:
    """Call a function when the running backward pass has ended; not if it fails."""
    anything: Any = torch.autograd.Variable
    anything._execution_engine.queue_callback(function)


def stops_recomputation(error: Exception) -> bool:
    """Whether an exception is the one with which `torch.utils.checkpoint` ends the second run of its function early,
    when everything that the backward reads has been recomputed."""
    return isinstance(error, checkpoint._StopRecomputationError)


def pass_over(node: Any) -> None:
    """Make the running backward pass skip `node`, that of an `autograd.Function`: its inputs get no gradients from it.
    Later backward passes run it."""
    backward = current_backward()

    def run(name: str, *gradients: object) -> Any:
        for one in _RUN_BY_ENGINE:
            delattr(node, one)
        return (
            (None,) * len(node.needs_input_grad) if current_backward() == backward else getattr(node, name)(*gradients)
        )

    for one in _RUN_BY_ENGINE:
        setattr(node, one, partial(run, one))


_RUN_BY_ENGINE = ("apply", "apply_boxed")
"""The methods of an `autograd.Function`'s node of which autograd's engine calls one."""


def keeps_graph() -> bool:
    """Whether the running backward pass was started with `retain_graph=True`."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


@dataclass(frozen=True)
class Retention:
    """How the backward passes of a step keep their autograd graphs in memory. The last backward pass does not count,
    since it frees saved tensors as it reads them."""

    kept: bool = False
    """Whether the graph is kept for another backward (`retain_graph=True`)."""
    derived: tuple[int, ...] = ()
    """How often gradients with a graph of their own (`create_graph=True`) were computed: first those of the forward,
    then those of such gradients, and so on."""
    parameters: frozenset[int] = frozenset()
    """The `id`s of the parameters by which some of these were computed."""

    def __or__(self, other: Retention) -> Retention:
        """The most that either of two steps keeps."""
        derived = (max(pair) for pair in zip_longest(self.derived, other.derived, fillvalue=0))
        return Retention(self.kept or other.kept, tuple(derived), self.parameters | other.parameters)

    def covers(self, other: Retention) -> bool:
        """Whether `other` keeps no more than `self`: neither its flag, nor any of its counts or parameters goes beyond
        those of `self`."""
        return self | other == self

    def further(self, order: int, parameters: frozenset[int] = frozenset()) -> Retention:
        """A copy whose `derived` counts one more computation of gradients with a graph of their own. `order` is 1 for
        gradients of the forward, 2 for gradients of such gradients, and so on, at most 1 above the highest order that
        `self` counts. `parameters` has the `id`s of the parameters by which they are computed."""
        order = min(order, 1 + len(self.derived))
        derived = [*self.derived, *[0] * (order - len(self.derived))]
        derived[order - 1] += 1
        return Retention(self.kept, tuple(derived), self.parameters | parameters)


FREED, KEPT = Retention(), Retention(kept=True)


def retains_graph() -> bool:
    """Whether the running backward pass was started with `retain_graph=True`, and without `create_graph=True`; to be
    called in a hook or a node's backward."""
    return keeps_graph() and not torch.is_grad_enabled()


def in_transform() -> bool:
    """Whether code runs within a transform of torch.func (grad, vmap, jvp, …), or with forward-mode derivatives."""
    return torch._C._functorch.maybe_current_level() is not None or torch.autograd.forward_ad._current_level >= 0


def is_batched(value: object) -> bool:
    """Whether a value is a tensor that stands for a batch of tensors, as within torch.func.vmap."""
    functorch = torch._C._functorch
    return isinstance(value, torch.Tensor) and (
        functorch.is_batchedtensor(value) or functorch.is_legacy_batchedtensor(value)
    )


@contextmanager
def gradients_kept(outputs: Iterable[torch.Tensor]) -> Iterator[None]:
    """A context after which each leaf that `outputs` depend on has the same tensor as `.grad` as before it."""
    leaves = [(leaf, leaf.grad) for leaf in leaves_of(outputs)]
    try:
        yield
    finally:
        for leaf, gradient in leaves:
            leaf.grad = gradient


def leaves_of(outputs: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The leaves that require gradients and that the outputs depend on, each once."""
    for node in _nodes_of(outputs):
        if isinstance(leaf := getattr(node, "variable", None), torch.Tensor):
            yield leaf


def not_on_the_way_to(ends: Iterable[torch.Tensor], tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors among `tensors` whose autograd node a backward from `ends` does not run; leaves are left out."""
    passed = set(_nodes_of(ends))
    return [tensor for tensor in tensors if tensor.grad_fn is not None and tensor.grad_fn not in passed]


next_node_number: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
"""The number of the autograd node that this thread makes next; they are numbered in order."""


def depends_on_earlier(outputs: Iterable[torch.Tensor], number: int) -> bool:
    """Whether tensors depend on an operator that ran before `next_node_number` returned `number`."""
    return any(node._sequence_nr() < number for node in _nodes_of(outputs))


def nodes_since(nodes: Iterable[Any], number: int) -> list[Any]:
    """The autograd nodes `nodes`, and those behind them made since `next_node_number` returned `number`, in the order
    in which they were made; without nodes of leaves, and those that are reached only through older ones."""
    found = _reached_from(set(nodes), lambda node: not hasattr(node, "variable") and node._sequence_nr() >= number)
    return sorted(found, key=lambda node: node._sequence_nr())


def nodes_with(mark: str, value: object, tensors: Iterable[torch.Tensor]) -> list[Any]:
    """The autograd nodes with `value` in the collection `node.metadata[mark]` that tensors among `tensors` depend on.
    Tensor subclasses are skipped."""
    plain = [one for one in tensors if type(one) is torch.Tensor and one.requires_grad]
    return [node for node in _nodes_of(plain) if value in node.metadata.get(mark, ())]


def _nodes_of(outputs: Iterable[torch.Tensor]) -> Iterator[Any]:
    """The autograd nodes that tensors depend on, each once; those of leaves among them."""
    return _reached_from({output.grad_fn for output in outputs if output.grad_fn is not None})


def _reached_from(nodes: set[Any], among: Callable[[Any], bool] = lambda node: True) -> Iterator[Any]:
    left = list(nodes)
    while left:
        yield (node := left.pop())
        found = {further for further, _ in node.next_functions if further is not None and among(further)} - nodes
        nodes |= found
        left += found


def graph_until(roots: Iterable[Any], is_end: Callable[[Any], bool]) -> tuple[list[Any], list[Any]]:
    """The autograd nodes that a backward from `roots` (tensors or edges) runs before the ends, in its order, and the
    ends: the first node on each path for which `is_end` is true. Nodes of leaves are in neither list."""
    left: list[Any] = [root.grad_fn if isinstance(root, torch.Tensor) else root.node for root in roots]
    seen: set[Any] = {None}
    nodes, ends = list[Any](), list[Any]()
    while left:
        if (node := left.pop()) in seen or hasattr(node, "variable"):
            continue
        seen.add(node)
        if is_end(node):
            ends.append(node)
        else:
            nodes.append(node)
            left += [further for further, _ in node.next_functions]
    return sorted(nodes, key=lambda node: node._sequence_nr(), reverse=True), ends


def passes_by(roots: Iterable[Any], mark: str, value: object) -> bool:
    """Whether a backward from `roots` (tensors or edges) reaches a node with `value` in `node.metadata[mark]`."""
    return bool(graph_until(roots, lambda node: value in node.metadata.get(mark, ()))[1])


def received_bytes(node: Any, number: int) -> int:
    """The bytes of the gradient that an autograd node receives for its output `number`; 0 if not known in advance."""
    try:
        metadata = node._input_metadata[number]
        return math.prod(map(int, metadata.shape)) * int(metadata.dtype.itemsize)
    except (AttributeError, IndexError, RuntimeError, TypeError):
        return 0


def backward_starts(listener: Callable[[Sequence[Any]], None] | None) -> None:
    """From now on, call `listener` with the tensors, or edges, at which each backward of the process starts. It
    replaces the listener set before; None removes it."""
    _listeners[:] = [] if listener is None else [listener]
    _tell()


def gradients_asked(watcher: Watcher) -> None:
    """From now on, call `watcher.before_backward` before each backward of the process, and `after_backward` after each
    one with `create_graph=True`. The `Addition`s that the former returns complete the gradients of that backward. Ends
    with the life of `watcher`, or by `gradients_done`."""
    _watchers.add(watcher)
    _tell()


def gradients_done(watcher: Watcher) -> None:
    """Stop calling `watcher`."""
    _watchers.discard(watcher)


class Addition(NamedTuple):
    """The additions of a `Watcher` to a gradient that a backward is asked for: further gradients, and the function that
    makes the whole gradient from them and from what autograd finds alone."""

    edges: Sequence[Any]
    """Edges (an autograd node and the number of its output) whose gradients the backward is to return as well."""
    total: Callable[[torch.Tensor | None, Sequence[torch.Tensor | None], bool], torch.Tensor | None]
    """Returns the whole gradient, given the one that autograd finds alone (or None), the gradients of `edges`, and
    whether the result needs an autograd graph (`create_graph=True`)."""


class Watcher(Protocol):
    def before_backward(
        self, starts: Sequence[Any], inputs: Sequence[Any], order: int, *, frees: bool
    ) -> Mapping[int, Addition]:
        """Called when a backward starts from `starts`, tensors or edges, that is to compute the gradients of `inputs`.
        Returns the additions to these gradients, by position. `order` is 0 unless the gradients get an autograd graph
        (`create_graph=True`), else 1 more than the highest order of the gradients from which `starts` were computed.
        `frees` says that the backward frees its graph."""

    def after_backward(self, gradients: Sequence[torch.Tensor | None] | None) -> None:
        """Called after a backward whose gradients have a graph of their own. `gradients` has those that the backward
        returns, and is None where it has added them to `.grad`."""


def _tell() -> None:
    """Replace torch's function that starts a backward if there is a listener or a watcher, else restore it."""
    if not _listeners and not _watchers:
        for module, telling, own in _told:
            if module._engine_run_backward is telling:
                module._engine_run_backward = own
        _told.clear()
    elif not _told:
        modules: tuple[Any, ...] = torch.autograd, torch.autograd.graph
        for module in modules:
            own = module._engine_run_backward
            module._engine_run_backward = telling = _telling(own)
            _told.append((module, telling, own))


def _telling(own: Callable[..., Any]) -> Callable[..., Any]:
    def run_backward(  # the arguments of autograd's engine
        outputs: Sequence[Any], grad_tensors: Any, keep_graph: bool, create_graph: bool, inputs: tuple[Any, ...] = (),
        allow_unreachable: bool = False, accumulate_grad: bool = False,
    ) -> Any:  # fmt: skip
        for listener in tuple(_listeners):
            listener(outputs)
        additions: dict[int, Addition] = {}
        order = 0
        if create_graph and _watchers:  # 1 more than the highest order of the gradients that `outputs` came from
            nodes, _ = graph_until(outputs, lambda node: False)
            order = 1 + max([int(node.metadata.get(_ORDER, 0)) for node in nodes], default=0)
        for watcher in tuple(_watchers):
            additions.update(watcher.before_backward(outputs, inputs, order, frees=not keep_graph))
        run = partial(own, outputs, grad_tensors, keep_graph, create_graph, accumulate_grad=accumulate_grad)
        try:
            if additions and accumulate_grad:
                raise UnplannedGradientError(
                    "backward(inputs=…) names an output from which the model computes other outputs: the captured "
                    "backward does not give that gradient; ask for it with torch.autograd.grad(loss, output)"
                )
            if additions:
                found = _with_additions(run, additions, inputs, create_graph, allow_unreachable)
            else:
                found = run(inputs, allow_unreachable=allow_unreachable)
            for gradient in (found or ()) if order else ():
                if has_node(gradient):
                    gradient.grad_fn.metadata[_ORDER] = order
            for watcher in tuple(_watchers) if order else ():
                watcher.after_backward(found)
            return found
        except Exception:  # such as a refusal, after which the caller may go on
            with suppress(RuntimeError):  # within torch.vmap no other backward begins
                forget_stopped_backward(own)
            raise
        finally:
            _tell()  # puts torch's own back if no listener or watcher is left

    return run_backward


def forget_stopped_backward(run_backward: Callable[..., Any] | None = None) -> None:
    """Free what autograd's engine keeps of a backward pass that an exception has ended: the nodes that it was about to
    run, with all that they refer to. By itself the engine frees them when the next backward pass begins in this thread.
    `run_backward` is torch's own function that starts a backward pass, to be given where another has replaced it."""
    with torch.enable_grad():
        end = torch.from_numpy(np.zeros(())).requires_grad_().neg()  # on the host, whatever the default device is
        run = run_backward or torch.autograd.graph._engine_run_backward
        run((end,), (torch.ones_like(end),), False, False, (), allow_unreachable=True, accumulate_grad=True)


_ORDER = "memopt order"
"""The key in a node's metadata of the order of its gradient, if that has a graph of its own."""


def _with_additions(
    run: Callable[..., tuple[Any, ...]],
    additions: Mapping[int, Addition],
    inputs: tuple[Any, ...],
    create_graph: bool,
    unreachable: bool,
) -> tuple[Any, ...]:
    """The gradients of `inputs` with the additions, by their positions; `run` returns those of a tuple of edges or
    tensors. Without `unreachable`, an input that was not used is an error."""
    edges = [GradientEdge(*edge) for addition in additions.values() for edge in addition.edges]
    found = list(run((*inputs, *edges), allow_unreachable=True))
    beside = iter(found[len(inputs) :])
    for number, addition in additions.items():
        found[number] = addition.total(found[number], [next(beside) for _ in addition.edges], create_graph)
    if not unreachable and any(one is None for one in found[: len(inputs)]):
        raise RuntimeError("a tensor whose gradient is asked for was not used; allow_unused=True gives None for it")
    return tuple(found[: len(inputs)])


_listeners: list[Callable[[Sequence[Any]], None]] = []
_watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()
_told: list[tuple[Any, Callable[..., Any], Callable[..., Any]]] = []
"""For each module in which torch's function is replaced: the module, the function there now, and torch's own."""


def has_node(value: Any) -> bool:
    """Whether a value is a tensor that was computed with gradients: it has an autograd node, and is no leaf."""
    return isinstance(value, torch.Tensor) and value.grad_fn is not None


def is_differentiable(value: Any) -> bool:
    """Whether a value is a tensor that a gradient can be computed for. False for a view that was made under
    `no_grad` of a tensor that requires a gradient: it has `requires_grad` set, but no edge in the autograd graph."""
    if not isinstance(value, torch.Tensor) or not value.requires_grad or value.grad_fn is not None:
        return has_node(value)
    with torch.enable_grad():
        node: Any = value.view_as(value).grad_fn
    return node is not None and node.next_functions[0][0] is not None


def edge_of(end: Any) -> tuple[Any, int]:
    """The edge of the autograd graph of `end` (a tensor or an edge), as its node and the number of the output."""
    edge = torch.autograd.graph.get_gradient_edge(end) if isinstance(end, torch.Tensor) else end
    return edge.node, edge.output_nr


def edges_reached(starts: Iterable[Any], ends: Collection[Any]) -> set[tuple[Any, int]]:
    """The edges of the autograd graph (a node and the number of its output) that a backward from `starts` (tensors or
    edges) goes through. It stops at the nodes in `ends`."""
    nodes, _ = graph_until(starts, lambda node: node in ends)
    return {*map(edge_of, starts), *(edge for node in nodes for edge in node.next_functions)}


def python_nodes(node: Any) -> Iterator[Any]:
    """The nodes of `autograd.Function`s, such as those of regions, at `node`: itself if it is one, else those among its
    next nodes, since an in-place operator on a region's output puts a node (`CopyBackwards`) in front."""
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        yield node
    else:
        for further, _ in node.next_functions:
            if isinstance(further, torch.autograd.function.BackwardCFunction):
                yield further
