"""Gradients added to `.grad` inside the backward graph, as soon as each is there."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Mapping

import torch
from torch import fx, nn

from memopt.pricing.storages import is_view
from memopt.torch_compat import will_accumulate


class Leaves:
    """The parameters that a region was last called with, by the number of its input."""

    def __init__(self) -> None:
        self._parameters: dict[int, weakref.ref[torch.Tensor]] = {}
        self.only_forward = True
        """False while several forwards wait for their backward: autograd then sums their gradients first, and adding
        them one by one would round differently."""

    def set(self, number: int, parameter: torch.Tensor) -> None:
        self._parameters[number] = weakref.ref(parameter)

    def get(self, number: int) -> torch.Tensor | None:
        reference = self._parameters.get(number)
        return reference() if reference is not None else None


class AccumulateGradient(nn.Module):
    """Adds a gradient to its parameter's `.grad` and gives None, where autograd would do only that with it; else passes
    it on: the first gradient, gradients that hooks look at, `torch.autograd.grad`, `create_graph`."""

    def __init__(self, leaves: Leaves, number: int) -> None:
        super().__init__()
        self.leaves, self.number = leaves, number

    def forward(self, gradient: torch.Tensor) -> torch.Tensor | None:
        parameter = self.leaves.get(self.number)
        if parameter is None or not self.leaves.only_forward or not _only_added(parameter, gradient):
            return gradient
        assert parameter.grad is not None
        parameter.grad.add_(gradient)
        return None


def is_hooked(parameter: torch.Tensor) -> bool:
    """Whether a hook waits for the parameter's gradient."""
    return bool(parameter._backward_hooks) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def _only_added(parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
    held = parameter.grad
    return (
        held is not None
        and held.layout == gradient.layout == torch.strided
        and held.dtype == gradient.dtype
        and not held.requires_grad
        and not torch.is_grad_enabled()
        and not is_hooked(parameter)
        and will_accumulate(parameter)
    )


def accumulate_in_place(backward: fx.GraphModule, inputs: Mapping[int, int], leaves: Leaves) -> None:
    """Put an `AccumulateGradient` behind each gradient of a parameter, right where it is computed. Edits the graph.

    `inputs` maps positions of the backward's results to the number of the input whose gradient it is.
    """
    graph = backward.graph
    output = graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    for position, number in inputs.items():
        gradient = results[position]
        if not isinstance(gradient, fx.Node) or gradient.op == "placeholder" or len(gradient.users) > 1:
            continue
        name = f"accumulate_gradient_{number}"
        backward.add_submodule(name, AccumulateGradient(leaves, number))
        with graph.inserting_after(_raise_views(gradient)):
            node = graph.call_module(name, (gradient,))
        node.meta = dict(gradient.meta)
        results[position] = node
    output.args = (tuple(results),)


def _raise_views(gradient: fx.Node) -> fx.Node:
    """Move the views that lead to a gradient right behind the memory that they view; returns the gradient."""
    chain = [gradient]
    while chain[-1].op == "call_function" and len(chain[-1].all_input_nodes) == 1 and _is_chained(chain[-1]):
        chain.append(chain[-1].all_input_nodes[0])
    last = chain.pop()
    for node in reversed(chain):
        last.append(node)
        last = node
    return gradient


def _is_chained(node: fx.Node) -> bool:
    return is_view(node) or node.target is operator.getitem
