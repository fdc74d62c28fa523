"""How the gradients of a region reach `.grad` in its backward: one by one, in place, as soon as each is computed."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import fx, nn

from memopt.capture.joint import JointGraph
from memopt.compat.autograd import Fate, current_backward, current_node, reached_outputs, receivers
from memopt.compat.ddp import ReducerHooks
from memopt.compat.hooks import backward_hooks, has_hooks, post_accumulate_hooks
from memopt.compat.tracing import mark_boxed
from memopt.device.storages import is_view
from memopt.optimizers.optimizer_in_backward import SteppingHook, stepping_hooks

Receiver: TypeAlias = tuple[torch.Tensor | None, Fate]
"""An input of a region if it is a leaf, else None; and what autograd does with its gradient."""


@dataclass
class Accumulation:
    """How the backwards of a model's regions add gradients to `.grad`, and which parameters are inputs of the region
    whose backward runs."""

    allowed: bool = True
    """Whether gradients may be added to `.grad` one by one. They may not while several forwards wait for their
    backward: autograd then sums their gradients first, and adding them singly would round differently."""
    exchange: ReducerHooks | None = None
    """Exchanges the gradients of the backward to come as soon as each is complete. None where nothing is exchanged
    while the backward runs, as with one rank."""
    failed: Callable[[torch.OutOfMemoryError], torch.OutOfMemoryError] = lambda failure: failure
    """Called when the device has no memory left in a backward; returns the error to raise."""
    region: tuple[int, int] | None = None
    """The number of the running backward pass, and the `id` of the autograd node of a region in it, to which the
    receivers belong; None before the first."""
    receivers: list[Receiver | None] = field(default_factory=list)
    """For each tensor input of that region that is a parameter: the parameter, and what autograd does with its
    gradient. None for other inputs, which this list must not keep alive after the backward."""

    def enter(self, region: tuple[int, int]) -> None:
        """Set `receivers` to the parameters of the region whose backward begins. `region` has the number of the running
        backward pass and the `id` of the region's autograd node."""
        found = receivers()
        self.receivers = [(leaf, fate) if isinstance(leaf, nn.Parameter) else None for leaf, fate in found]
        self.region = region


class AccumulateGradient(nn.Module):
    """Adds a gradient to its parameter's `.grad` and returns None, where autograd would do no more than that. Also
    returns None where autograd would drop the gradient (`backward(inputs=…)` of other tensors), and where `reached`, if
    given, returns False. Otherwise returns the gradient for autograd to use: the first one (while `.grad` is None), one
    that a hook reads, one for `torch.autograd.grad`, or any that `accumulation` does not allow to be added here. Under
    DDP the first one is made `.grad` here if possible, to be exchanged early. With `steps`, the hook of an
    `OptimizerInBackward` is called with the gradient here, where autograd would do only that.

    The parameter is looked up in each backward, since one region serves calls with different parameters: it is number
    `position` among the call's tensor inputs. With `own_memory`, no other result of the backward shares memory with the
    gradient."""

    def __init__(
        self,
        accumulation: Accumulation,
        position: int,
        *,
        steps: bool = False,
        own_memory: bool = False,
        reached: Callable[[], bool] | None = None,
    ) -> None:
        super().__init__()
        self.accumulation, self.position, self.steps = accumulation, position, steps
        self.own_memory, self.reached = own_memory, reached

    def __call__(self, gradient: torch.Tensor, receiver: Receiver | None = None) -> torch.Tensor | None:
        """None where the gradient is dropped, added to `.grad` or used for a step; else the gradient. `receiver` is
        what `receiver()` returns, where that was asked before.

        It overrides `__call__`, not `forward`: these modules have no hooks, and `Module.__call__` doubles the time."""
        if receiver is None and self.reached is None:
            known = (current_backward(), id(current_node())) == self.accumulation.region
            receiver = self.accumulation.receivers[self.position] if known else None
        parameter, fate = receiver or self.receiver()
        if fate is Fate.DROPPED:
            return None
        exchange = self.accumulation.exchange
        if parameter is None or fate is not Fate.ACCUMULATED or not self.accumulation.allowed:
            return gradient
        if self.steps and (hook := _only_steps(parameter, gradient)) is not None:
            parameter.grad = gradient
            hook(parameter)
            return None
        if parameter.grad is None:
            return None if exchange is not None and self._exchange_first(exchange, parameter, gradient) else gradient
        if not _only_added(parameter, gradient):
            return gradient
        parameter.grad.add_(gradient)
        if exchange is not None and exchange.takes(parameter):
            exchange.ready(parameter)
        return None

    def receiver(self) -> Receiver:
        """The leaf tensor whose gradient the running backward computes, and what autograd does with that gradient.
        (None, `RETURNED`) where the region's input is not a leaf. (None, `DROPPED`) where `reached` returns False: the
        backward passes through no output that the gradient comes from."""
        if self.reached is not None and not self.reached():
            return None, Fate.DROPPED
        accumulation = self.accumulation
        if (region := (current_backward(), id(current_node()))) != accumulation.region:
            accumulation.enter(region)
        return accumulation.receivers[self.position] or receivers()[self.position]

    def _exchange_first(self, exchange: ReducerHooks, parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
        """Make a first gradient the parameter's `.grad` and exchange it, where autograd and DDP would do only that with
        it. Returns whether this was done."""
        if (
            not (exchange.views or self.own_memory)
            or not exchange.takes(parameter)
            or is_hooked(parameter)
            or not _can_be_grad(parameter, gradient)
            or gradient.stride() != parameter.stride()
        ):
            return False
        parameter.grad = gradient
        exchange.ready(parameter)
        if not self.own_memory and parameter.grad.data_ptr() == gradient.data_ptr():  # in no bucket: it may be written
            parameter.grad = gradient.clone()
        return True


def _can_be_grad(parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Whether the parameter has no `.grad` and autograd would make it of this gradient: without a copy, if the strides
    are the parameter's."""
    return (
        parameter.grad is None
        and gradient.layout == torch.strided
        and gradient.dtype == parameter.dtype
        and gradient.shape == parameter.shape
    )


def is_hooked(parameter: torch.Tensor, *, stepped: bool = False) -> bool:
    """Whether the parameter has a hook that reads its gradient. With `stepped`, a hook that steps the optimizer for
    this parameter does not count, if it is the only one of that kind."""
    if not has_hooks(parameter):
        return False
    late = len(post_accumulate_hooks(parameter))
    if stepped and len(stepping_hooks(parameter)) == 1:
        late -= 1
    return bool(backward_hooks(parameter)) or late > 0


def _only_steps(parameter: torch.Tensor, gradient: torch.Tensor) -> SteppingHook | None:
    """The parameter's only hook, which steps it in the backward, where calling that is all that autograd would do with
    `gradient`: there is no gradient yet, this one has the parameter's dtype and shape, and no other hook reads it.
    Else None."""
    hooks = stepping_hooks(parameter)
    alone = len(hooks) == 1 and not is_hooked(parameter, stepped=True)
    return hooks[0] if alone and _can_be_grad(parameter, gradient) else None


def _only_added(parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Whether autograd would do nothing with the gradient but add it to the parameter's `.grad`."""
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
    own_memory: Collection[int] = (),
    reached: Mapping[int, Callable[[], bool]] | None = None,
) -> None:
    """Insert an `AccumulateGradient` call for each parameter gradient, right after it is computed. Edits the graph.

    All arguments give gradients by their position among the backward's results.

    Args:
        inputs: position of a gradient → position of its parameter among the region's tensor inputs.
        steps: for each gradient whose call also steps the parameter, the names of the nodes after which the call must
            come, since they read the parameter's old value.
        own_memory: the gradients that share memory with no other result.
        reached: functions that return False where the running backward drops the gradient."""
    graph = backward.graph
    output = graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    steps = steps or {}
    gradients = {position: _with_raised_views(results[position]) for position in inputs}
    # Later results are inserted first, so that calls after the same node are in the order of the results.
    for position, number in sorted(inputs.items(), reverse=True):
        gradient = gradients[position]
        name = "step" if position in steps else "accumulate_gradient"
        module = AccumulateGradient(
            accumulation,
            number,
            steps=position in steps,
            own_memory=position in own_memory,
            reached=(reached or {}).get(position),
        )
        backward.add_submodule(f"{name}_{number}", module)
        with graph.inserting_after(_insertion_point(graph, gradient, steps.get(position, ()))):
            node = graph.call_module(f"{name}_{number}", (gradient,))
        node.meta = dict(gradient.meta)
        results[position] = node
    output.args = (tuple(results),)


def _insertion_point(graph: fx.Graph, gradient: fx.Node, names: Collection[str]) -> fx.Node:
    """The last in graph order of the gradient and the named nodes; if that has several results, the last `getitem` of
    them."""
    if not names:
        return gradient
    last = next(node for node in reversed(graph.nodes) if node is gradient or node.name in names)
    while last.next.target is operator.getitem and last.next.args[0] in (last, last.args[0] if last.args else None):
        last = last.next
    return last


def _with_raised_views(gradient: object) -> fx.Node:
    """A gradient as a node. The views and `getitem`s that lead to it are moved to right after the node that makes their
    storage."""
    assert isinstance(gradient, fx.Node)
    chain = [gradient]
    while len(chain[-1].all_input_nodes) == 1 and (is_view(chain[-1]) or chain[-1].target is operator.getitem):
        chain.append(chain[-1].all_input_nodes[0])
    last = chain.pop()
    for node in reversed(chain):
        last.append(node)
        last = node
    return gradient


def is_reached(tangents: Collection[int], number: int) -> bool:
    """Whether the running backward passes through any of the region's outputs `tangents`. These are positions among the
    `number` outputs that can have a gradient. Also True where the region returns views of its inputs, since autograd's
    graph does not show it then."""
    reached = reached_outputs()
    return reached is None or len(reached) != number or any(reached[tangent] for tangent in tangents)


def withholding(backward: Callable[[list[Any]], Any], joint: JointGraph) -> Callable[[list[Any]], Any]:
    """A function that runs the compiled `backward`, and returns its results. A gradient is replaced by None if the
    running backward passes through none of the outputs that the gradient comes from."""
    partial = joint.partial_gradients
    if not partial:
        return backward

    def run(arguments: list[Any]) -> Any:
        unreached = [at for at, tangents in partial.items() if not is_reached(tangents, joint.tangents)]
        results = backward(arguments)
        return [None if at in unreached else result for at, result in enumerate(results)] if unreached else results

    return mark_boxed(run)


def telling(backward: Callable[[list[Any]], Any], accumulation: Accumulation) -> Callable[[list[Any]], Any]:
    """A function that runs the compiled `backward`, and raises `accumulation.failed(error)` if an allocation fails."""

    def run(arguments: list[Any]) -> Any:
        try:
            return backward(arguments)
        except torch.OutOfMemoryError as failure:
            raise accumulation.failed(failure) from None

    return mark_boxed(run)
