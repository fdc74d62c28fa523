"""Adds gradients to `.grad` inside a compiled backward: inductor compiles no module calls, so an operator makes
them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, fx

from memopt.compat.autograd import Fate
from memopt.emit.gradients import AccumulateGradient


class _Running(threading.local):
    """The modules and results of the backward that runs in this thread."""

    def __init__(self) -> None:
        self.takers: Sequence[Callable[[Tensor], Tensor | None]] = ()
        self.returned: dict[int, Tensor] = {}


_running = _Running()


@torch.library.custom_op("memopt::hand_gradient", mutates_args=())
def hand_gradient(gradient: Tensor, number: int) -> Tensor:
    """Pass a gradient to the module of that number in the running backward. The result is empty, so that the gradient's
    memory is free afterwards; a gradient that the module returns is therefore kept as a clone."""
    returned = _running.takers[number](gradient)
    if returned is not None:
        _running.returned[number] = returned.clone()
    return gradient.new_empty(0)


@hand_gradient.register_fake
def _(gradient: Tensor, number: int) -> Tensor:
    return gradient.new_empty(0)


class Handing:
    """Replaces the modules of a backward graph that take gradients by calls of `hand_gradient`. Edits the graph."""

    def __init__(self, backward: fx.GraphModule) -> None:
        self.modules: list[AccumulateGradient] = []
        for node in backward.graph.find_nodes(op="call_module"):
            self._replace(backward, node)
        results = backward.graph.output_node().args[0]
        assert isinstance(results, (tuple, list))
        self.numbers = [_number(result) for result in results]
        """For each result of the backward the number of its module; -1 for a result without one."""
        backward.delete_all_unused_submodules()
        backward.recompile()

    def _replace(self, backward: fx.GraphModule, node: fx.Node) -> None:
        (gradient,) = node.all_input_nodes
        with backward.graph.inserting_after(node):
            handed = backward.graph.call_function(
                torch.ops.memopt.hand_gradient.default, (gradient, len(self.modules)), name=node.name
            )
        handed.meta.update(node.meta, val=gradient.meta["val"].new_empty(0))
        node.replace_all_uses_with(handed)
        backward.graph.erase_node(node)
        module = backward.get_submodule(str(node.target))
        assert isinstance(module, AccumulateGradient)
        self.modules.append(module)

    @contextmanager
    def active(self) -> Iterator[dict[int, Tensor]]:
        """A block in which the backward runs; yields module number → gradient that the module returned."""
        before = _running.takers, _running.returned
        # Asked here, because autograd does not know its current node inside an operator.
        takers = [functools.partial(_take, module, *module.receiver()) for module in self.modules]
        _running.takers, _running.returned = takers, {}
        try:
            yield _running.returned
        finally:
            _running.takers, _running.returned = before

    def results(self, computed: Sequence[Tensor | None], returned: dict[int, Tensor]) -> list[Tensor | None]:
        """The results for autograd of a backward that returned `computed`: None for a gradient that a module took."""
        pairs = zip(self.numbers, computed, strict=True)
        return [returned.get(number) if number >= 0 else result for number, result in pairs]


def _take(module: AccumulateGradient, parameter: Tensor | None, fate: Fate, gradient: Tensor) -> Tensor | None:
    return module.take(gradient, parameter, fate)


def _number(result: object) -> int:
    """The number of the module that a result was passed to; -1 for a result without one."""
    if isinstance(result, fx.Node) and result.target is torch.ops.memopt.hand_gradient.default:
        number = result.args[1]
        assert isinstance(number, int)
        return number
    return -1
