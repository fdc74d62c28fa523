"""Outputs of a region from which other outputs of it are computed. Its captured backward does not stop at them: a
gradient that is asked for there, or changed by a hook, would silently lack what comes through the others."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import fx

from memopt.compat.autograd import edge_of, edges_reached, gradients_asked, has_node, hook_table
from memopt.errors import UnplannedGradientError


def feeding(graph_module: fx.GraphModule) -> dict[int, frozenset[int]]:
    """For the results of a region's graph from which others are computed with a gradient, by position: the positions of
    these others."""
    (results,) = graph_module.graph.output_node().args
    at = {position: node for position, node in enumerate(results) if isinstance(node, fx.Node) and _requires_grad(node)}  # type: ignore[arg-type]
    outputs = set(at.values())
    passed: dict[fx.Node, set[fx.Node]] = {}
    """By node the outputs among the values that it is computed from, itself among them."""
    for node in graph_module.graph.nodes:
        if _requires_grad(node):
            passed[node] = ({node} & outputs).union(*(passed.get(one, ()) for one in node.all_input_nodes))
            if _writes(node) and isinstance(written := node.args[0], fx.Node):
                passed[written] = passed.get(written, set()) | passed[node]
    found = {
        position: frozenset(other for other, node in at.items() if output in passed[node] and other != position)
        for position, output in at.items()
    }
    return {position: others for position, others in found.items() if others}


def _requires_grad(node: fx.Node) -> bool:
    """Whether a node's value requires a gradient, or may have parts that do."""
    value = node.meta.get("example_value")
    return value.requires_grad if isinstance(value, torch.Tensor) else isinstance(value, (tuple, list))


def _writes(node: fx.Node) -> bool:
    """Whether a call writes to its first argument, by the name of what it calls."""
    name = str(getattr(node.target, "__name__", node.target))
    return node.op.startswith("call_") and bool(node.args) and (name.endswith("_") or name in ("setitem", "iadd"))


_Edge: TypeAlias = tuple[weakref.ref[Any], int]
"""An autograd node, and the number of its output."""


class InnerOutputs:
    """The outputs of a forward that waits for its backward from which others of its outputs are computed."""

    def __init__(
        self,
        outputs: Sequence[Any],
        feeds: Mapping[int, frozenset[int]],
        error: Callable[[str], Exception] = UnplannedGradientError,
    ) -> None:
        """`outputs` as the caller has them, and `feeds` as `feeding` gives them. `error` makes what is raised."""
        edges = {
            at: (weakref.ref(output.grad_fn), output.output_nr) for at, output in enumerate(outputs) if has_node(output)
        }
        self._inner = [
            _Inner(outputs[at], edges[at], [edges[other] for other in others if other in edges], error)
            for at, others in feeds.items()
            if at in edges
        ]
        gradients_asked(self)

    def before_backward(self, starts: Sequence[Any], inputs: Sequence[Any]) -> None:
        """Raise where the gradients of `inputs` are asked for, an inner output is among them, and the backward from
        `starts` comes to others that are computed from it."""
        edges = set(map(edge_of, inputs))
        for inner in self._inner:
            if (inner.node(), inner.number) in edges:
                fed = {(node(), number) for node, number in inner.fed}
                if fed & edges_reached(starts, {node for node, _ in fed}):
                    raise inner.refusal("the gradient by")

    def reached(self, node: Any, gradients: Iterable[object]) -> None:
        """Raise where somebody waits for the gradient of an inner output, and the backward has come with these
        gradients to a node of others that are computed from it."""
        given = {number for number, gradient in enumerate(gradients) if gradient is not None}
        for inner in self._inner:
            if inner.is_awaited() and any(to() is node and number in given for to, number in inner.fed):
                raise inner.refusal()


class _Inner:
    """An inner output: its edge in the autograd graph, those of the outputs that are computed from it (`fed`), and what
    tells whether somebody waits for its gradient."""

    def __init__(
        self, output: torch.Tensor, edge: _Edge, fed: Sequence[_Edge], error: Callable[[str], Exception]
    ) -> None:
        self.output, self.shape, self.error = weakref.ref(output), tuple(output.shape), error
        (self.node, self.number), self.fed = edge, fed
        self.hooks = hook_table(output, partial(_before_others, weakref.ref(self)))

    def is_awaited(self) -> bool:
        """Whether anything but code of torch, which changes no gradient, waits for the gradient."""
        output = self.output()
        retained = output is not None and output.retains_grad
        return retained or (len(self.hooks) > 1 and not all(map(_is_known, self.hooks.values())))

    def refusal(self, what: str = "a hook, or retain_grad(), waits for the gradient of") -> Exception:
        return self.error(
            f"{what} an output of shape {self.shape}, from which the model computes other outputs that this backward "
            "comes to: the captured backward does not have it. Return that output alone and compute the others from it "
            "outside of the model, have a loss_fn of (model, batch) take the derivative and give it to optimize, or "
            "call memopt.remove(model)"
        )


def _before_others(inner: weakref.ref[_Inner], gradient: torch.Tensor | None) -> None:
    """Raise where autograd is about to call the hooks of an output, but has no gradient for it: it has come to its node
    by other outputs alone."""
    found = inner()
    if gradient is None and found is not None and found.is_awaited():
        raise found.refusal()


def _is_known(hook: Any) -> bool:
    """Whether a hook is torch's own or memopt's."""
    module = getattr(getattr(hook, "func", hook), "__module__", None) or ""
    return module.partition(".")[0] in ("torch", "memopt")
