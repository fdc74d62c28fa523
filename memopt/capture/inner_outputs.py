"""Inner outputs of a region: those from which other outputs of it are computed.

The captured backward does not compute the gradient of an inner output: the part that comes
through the other outputs goes straight on to the region's inputs. Where the user asks for the gradient of an inner
output, or a hook reads it, memopt computes it separately.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx

from memopt.capture.dynamo_graph import result_values
from memopt.compat.autograd import (
    Addition,
    current_backward,
    edge_of,
    edges_reached,
    gradients_asked,
    has_node,
    runs_node,
)
from memopt.compat.hooks import defer_hooks
from memopt.errors import CaptureError, UnplannedGradientError
from passes.graphs.node_facts import graph_results


class CrossedByDerivative(CaptureError):
    """Raised where eager code needs a derivative through a region that the region's backward cannot give: gradients of
    gradients (`create_graph=True`), or the gradient of an output from which the region computes other outputs. The
    message is how a refusal goes on after the reason for a graph break and "and it"."""


def run_from(
    graph_module: fx.GraphModule, position: int, arguments: Sequence[Any]
) -> tuple[Sequence[Any], torch.Tensor]:
    """Run a region's graph on `arguments`, with an autograd leaf in place of the result at `position`. Returns all
    results, and that leaf, by which the results computed from it can be differentiated.

    If the graph writes to that result in place (`is_written`), the second value is the result itself, not a leaf; then
    the tensors in `arguments` must require gradients as in the plain model."""
    if is_written(graph_module, position):
        outputs = graph_module(*arguments)
        return outputs, outputs[position]
    run = _RunFrom(graph_module, position)
    outputs = run.run(*arguments)
    return outputs, run.leaf


def is_written(graph_module: fx.GraphModule, position: int) -> bool:
    """Whether a region's graph writes in place to the memory of its result at `position`. If so, other results may be
    computed from values that this memory had before the write, and have no part in this result's gradient."""
    return result_values(graph_module)[position]._version > 0


class _RunFrom(fx.Interpreter):
    leaf: torch.Tensor

    def __init__(self, graph_module: fx.GraphModule, position: int) -> None:
        super().__init__(graph_module)
        self._at = graph_results(graph_module.graph)[position]

    def run_node(self, node: fx.Node) -> Any:
        value = super().run_node(node)
        if node is not self._at:
            return value
        self.leaf = value.detach().requires_grad_()
        return self.leaf.view_as(self.leaf)  # a view of the leaf, since the graph may not write to a leaf in place


class TensorKind(NamedTuple):
    """The shape, dtype and device of a tensor."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class InnerOutputs:
    """The inner outputs (from which the region computes other outputs) of a forward that waits for its backward.

    To autograd, the outputs of a region do not depend on each other. The hooks of an inner output are therefore called
    when a backward reaches the outputs' autograd nodes, once it is known for which outputs gradients arrive."""

    def __init__(self, outputs: Sequence[Any], feeds: Mapping[int, frozenset[int]], source: Any = None) -> None:
        """`outputs` are those that the caller gets, `feeds` is the result of `feeding`; `source`, a
        `memopt.run.replay.Replay`, computes gradients. A dry run has none: `CrossedByDerivative` is raised there."""
        self.source = source
        self._ends = {
            at: (weakref.ref(output.grad_fn), output.output_nr) for at, output in enumerate(outputs) if has_node(output)
        }
        self._inner = {
            at: _Inner(outputs[at], others & self._ends.keys()) for at, others in feeds.items() if at in self._ends
        }
        self._asked: set[int] = set()
        """The positions of the inner outputs whose gradients the latest backward was asked for as it began."""
        self._backward = -1
        self._given: dict[int, torch.Tensor] = {}
        """The gradients that have arrived in the backward `_backward`, by the positions of the outputs."""
        self._past: set[int] = set()
        """The `id`s of the nodes that this backward has reached."""
        gradients_asked(self)

    def before_backward(
        self, starts: Sequence[Any], inputs: Sequence[Any], order: int, *, frees: bool
    ) -> Mapping[int, Addition]:
        """Called when a backward begins from `starts`, tensors or edges, that has to compute the gradients of `inputs`.
        For each inner output among `inputs`, the dict returned has, by its index in `inputs`, the part of its gradient
        that comes through other outputs, which autograd is to add. `order` and `frees` (see `Watcher`) are not used."""
        additions = {}
        self._asked.clear()
        for inner in self._inner.values():
            inner.hooks.at_once = False
        for number, edge in enumerate(map(edge_of, inputs)):
            position = next((at for at, (node, nr) in self._ends.items() if (node(), nr) == edge), None)
            if position in self._inner:
                inner = self._inner[position]
                fed = {(self._ends[other][0](), self._ends[other][1]): other for other in inner.fed}
                reached = edges_reached(starts, {node for node, _ in fed}) & fed.keys()
                if reached:
                    additions[number] = self._addition(position, {fed[edge]: edge for edge in reached})
                self._asked.add(position)
                inner.hooks.at_once = not reached
        return additions

    def after_backward(self, gradients: Sequence[torch.Tensor | None] | None) -> None:
        """Does nothing: there is nothing to do after a backward."""

    def _addition(self, position: int, reached: Mapping[int, Any]) -> Addition:
        inner, source = self._inner[position], copy.copy(self.source)  # the backward may release its own

        def total(
            own: torch.Tensor | None, found: Sequence[torch.Tensor | None], create_graph: bool
        ) -> torch.Tensor | None:
            given = {other: one for other, one in zip(reached, found, strict=True) if one is not None}
            if not given:
                return inner.changed_by_hooks(own)
            if create_graph:
                return inner.take(_known(source).derivative_by(position, given, own), own)
            return inner.take(_known(source).gradient_by(position, inner.kind, given, own), own).clone()

        return Addition(list(reached.values()), total)

    def arrived(self, node: Any, gradients: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        """Called when a backward reaches `node`, the autograd node of outputs, with their gradients; returns the
        gradients with which it continues. Calls the hooks of each inner output whose gradient is then complete."""
        others = self._inner.keys() - self._asked
        awaited = {position: self._inner[position] for position in others if self._inner[position].is_awaited}
        if not awaited:
            return tuple(gradients)
        if self._backward != current_backward():
            self._backward, self._given, self._past = current_backward(), {}, set()
        numbers = {at: number for at, (of, number) in self._ends.items() if of() is node}
        self._given.update({at: gradients[nr] for at, nr in numbers.items() if gradients[nr] is not None})
        self._past.add(id(node))
        changed = list(gradients)
        for position, inner in awaited.items():
            nodes = [self._ends[at][0]() for at in (position, *inner.fed)]
            if node in nodes and not self._are_to_come(nodes):
                own = self._given.get(position)
                given = {at: self._given[at] for at in inner.fed if at in self._given}
                if given:
                    source = _known(self.source)
                    taken = weakref.ref(inner.take(source.gradient_by(position, inner.kind, given, own), own))
                    if (kept := taken()) is not None:
                        kept.view(kept.shape)  # computes it now, as its inputs are freed after the backward
                elif position in numbers:
                    changed[numbers[position]] = inner.changed_by_hooks(own)
                elif own is not None:
                    inner.take(own, own)
        if not self._are_to_come([of() for of, _ in self._ends.values()]):
            self._given.clear()
        return tuple(changed)

    def _are_to_come(self, nodes: Iterable[Any]) -> bool:
        """Whether the backward comes to any of these nodes after the present one."""
        return any(id(node) not in self._past and runs_node(node) for node in nodes)


def _known(source: Any) -> Any:
    if source is None:
        raise CrossedByDerivative("takes a derivative through that break")
    return source


class _Inner:
    """An output from which others are computed: the positions of these (`fed`), and what waits for its gradient."""

    def __init__(self, output: torch.Tensor, fed: Collection[int]) -> None:
        self.output, self.fed = weakref.ref(output), fed
        self.kind = TensorKind(output.shape, output.dtype, output.device)
        self.hooks = defer_hooks(output, partial(_note_retained, weakref.ref(self)))
        self.before: torch.Tensor | None = None
        """The output's `.grad`, of `retain_grad()`, before autograd last added the output's own gradient to it."""

    @property
    def retaining(self) -> torch.Tensor | None:
        """The output, if it is alive and `retain_grad()` was called on it; else None."""
        output = self.output()
        return output if output is not None and output.retains_grad else None

    @property
    def is_awaited(self) -> bool:
        """Whether a hook or `retain_grad()` waits for the gradient."""
        return len(self.hooks) > 1 or self.retaining is not None  # the first one is memopt's own

    def take(self, gradient: torch.Tensor, own: torch.Tensor | None) -> torch.Tensor:
        """Call the hooks with the gradient, keep it where `retain_grad()` asks for it, and return it. `own` is the part
        of it that comes from the caller's use of this output, not through others that the model computes from it; None
        for no such part.

        Raises `UnplannedGradientError` where a hook changes the gradient, as the backward has gone on without it."""
        for hook in self.hooks.own:
            version, result = gradient._version, hook(gradient)
            if not (result is None or result is gradient) or gradient._version != version:
                raise UnplannedGradientError(
                    f"a hook changes the gradient of an output of shape {tuple(self.kind.shape)}, from which the model "
                    "computes other outputs: their captured backward has already run with the gradient as it was "
                    "before the hook. Return that output alone and compute the others from it outside of the model, or "
                    "call memopt.remove(model)"
                )
        self._retain(gradient, arrived=own is not None)
        return gradient

    def changed_by_hooks(self, own: torch.Tensor | None) -> torch.Tensor | None:
        """The gradient `own` after all hooks, each of which may replace it, as in autograd; None if `own` is None."""
        if own is None or not self.hooks.own:
            return own
        for hook in self.hooks.own:
            result = hook(own)
            own = own if result is None else result
        self._retain(own, arrived=True)
        return own

    def _retain(self, gradient: torch.Tensor, *, arrived: bool) -> None:
        """Add the gradient to the `.grad` of the output where `retain_grad()` was called on it. If a part of it has
        `arrived` at the output, autograd has added that part already, and the whole takes its place."""
        if (output := self.retaining) is not None:
            before = self.before if arrived else output.grad
            output.grad = gradient.clone() if before is None else before + gradient
            self.before = None


def _note_retained(inner: weakref.ref[_Inner], gradient: torch.Tensor | None) -> None:
    """Note the `.grad` that an inner output has before autograd adds the gradient that arrives at the output itself."""
    if (found := inner()) is not None:
        found.before = None if found.retaining is None else found.retaining.grad
