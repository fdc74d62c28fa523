"""Gradients added to `.grad` inside the backward graph, as soon as each is there."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import fx, nn

from memopt.compat.autograd import Fate, backward_hooks, current_leaf, fate_of_gradient, post_accumulate_hooks
from memopt.device.storages import is_view
from memopt.optimizers.optimizer_in_backward import SteppingHook, stepping_hooks


@dataclass
class Accumulation:
    """Whether gradients may be added to `.grad` one by one. Not while several forwards wait for their backward:
    autograd then sums their gradients first, and adding them singly would round differently."""

    allowed: bool = True


class AccumulateGradient(nn.Module):
    """Adds a gradient to its parameter's `.grad` and gives None, where autograd would do only that with it; gives None
    too where nobody waits for it (`backward(inputs=…)` of others); else passes it on: the first gradient, one that a
    hook looks at, `torch.autograd.grad`.

    The parameter is input `position` (among tensors) of the very call whose backward runs: one region serves many
    calls, with other parameters each.
    """

    def __init__(self, accumulation: Accumulation, position: int) -> None:
        super().__init__()
        self.accumulation, self.position = accumulation, position

    def forward(self, gradient: torch.Tensor) -> torch.Tensor | None:
        return self.take(gradient, *self.receiver())

    def receiver(self) -> tuple[torch.Tensor | None, Fate]:
        """In the backward: the parameter, and what becomes of its gradient."""
        parameter = current_leaf(self.position)
        return parameter, Fate.RETURNED if parameter is None else fate_of_gradient(parameter)

    def take(self, gradient: torch.Tensor, parameter: torch.Tensor | None, fate: Fate) -> torch.Tensor | None:
        """None, or what is passed on."""
        if fate is Fate.DROPPED:
            return None
        if (
            parameter is not None
            and fate is Fate.ACCUMULATED
            and self.accumulation.allowed
            and _only_added(parameter, gradient)
        ):
            assert parameter.grad is not None
            parameter.grad.add_(gradient)
            return None
        return gradient


def is_hooked(parameter: torch.Tensor, *, stepped: bool = False) -> bool:
    """Whether a hook waits for the parameter's gradient; `stepped`: another one than that which steps it."""
    late = len(post_accumulate_hooks(parameter))
    if stepped and len(stepping_hooks(parameter)) == 1:
        late -= 1
    return bool(backward_hooks(parameter)) or late > 0


class StepParameter(AccumulateGradient):
    """Steps its parameter by the gradient and gives None, where autograd would do only that with it: hand it to the
    hook of an `OptimizerInBackward`. Does as `AccumulateGradient` says else, so that autograd itself steps by what is
    passed on.
    """

    def take(self, gradient: torch.Tensor, parameter: torch.Tensor | None, fate: Fate) -> torch.Tensor | None:
        if (
            parameter is not None
            and fate is Fate.ACCUMULATED
            and self.accumulation.allowed
            and (hook := _only_steps(parameter, gradient)) is not None
        ):
            parameter.grad = gradient
            hook(parameter)
            return None
        return super().take(gradient, parameter, fate)


def _only_steps(parameter: torch.Tensor, gradient: torch.Tensor) -> SteppingHook | None:
    """The hook that steps the parameter, if there is nothing else to do with this gradient, the first and whole one."""
    hooks = stepping_hooks(parameter)
    whole = (
        parameter.grad is None
        and gradient.layout == torch.strided
        and gradient.dtype == parameter.dtype
        and gradient.shape == parameter.shape
    )
    return hooks[0] if whole and len(hooks) == 1 and not is_hooked(parameter, stepped=True) else None


def _only_added(parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
    held = parameter.grad
    return (
        held is not None
        and held.layout == gradient.layout == torch.strided
        and held.dtype == gradient.dtype
        and not held.requires_grad
        and not is_hooked(parameter)
    )


def accumulate_in_place(
    backward: fx.GraphModule,
    inputs: Mapping[int, int],
    accumulation: Accumulation,
    steps: Mapping[int, Collection[str]] | None = None,
) -> None:
    """Put an `AccumulateGradient` behind each gradient of a parameter, right where it is computed. Edits the graph.

    `inputs` maps positions of the backward's results to the position, among tensors, of the input whose gradient it is.
    For the positions in `steps` it is a `StepParameter`, behind all the nodes too that are named there: those that read
    the parameter, which has its new value from then on.
    """
    graph = backward.graph
    output = graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    steps = steps or {}
    gradients = {position: _raised(results[position]) for position in inputs}
    # Those of later results first: of two behind the same node the earlier result's comes first.
    for position, number in sorted(inputs.items(), reverse=True):
        gradient = gradients[position]
        kind, name = (StepParameter, "step") if position in steps else (AccumulateGradient, "accumulate_gradient")
        backward.add_submodule(f"{name}_{number}", kind(accumulation, number))
        with graph.inserting_after(_last(graph, gradient, steps.get(position, ()))):
            node = graph.call_module(f"{name}_{number}", (gradient,))
        node.meta = dict(gradient.meta)
        results[position] = node
    output.args = (tuple(results),)


def _last(graph: fx.Graph, gradient: fx.Node, names: Collection[str]) -> fx.Node:
    """The last of the gradient and the named nodes; with one that returns several values, the last of these."""
    if not names:
        return gradient
    last = next(node for node in reversed(graph.nodes) if node is gradient or node.name in names)
    while last.next.target is operator.getitem and last.next.args[0] in (last, last.args[0] if last.args else None):
        last = last.next
    return last


def _raised(gradient: object) -> fx.Node:
    assert isinstance(gradient, fx.Node)
    return _raise_views(gradient)


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
