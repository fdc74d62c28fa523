"""Gradients added to `.grad` inside a compiled backward: inductor runs no modules, but it does run operators."""

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
    """The backward that runs in this thread."""

    def __init__(self) -> None:
        self.takes: Sequence[Callable[[Tensor], Tensor | None]] = ()
        self.handed_on: dict[int, Tensor] = {}


_running = _Running()


@torch.library.custom_op("memopt::hand_gradient", mutates_args=())
def hand_gradient(gradient: Tensor, number: int) -> Tensor:
    """Gives a gradient to the module of that number of the running backward; the result is empty, since the memory of
    the gradient is free from then on. What the module passes on is set aside, as a copy for that reason."""
    handed_on = _running.takes[number](gradient)
    if handed_on is not None:
        _running.handed_on[number] = handed_on.clone()
    return gradient.new_empty(0)


@hand_gradient.register_fake
def _(gradient: Tensor, number: int) -> Tensor:
    return gradient.new_empty(0)


class Handing:
    """The modules of a backward graph that take its gradients, replaced by operators. Edits the graph."""

    def __init__(self, backward: fx.GraphModule) -> None:
        self.modules: list[AccumulateGradient] = []
        for node in backward.graph.find_nodes(op="call_module"):
            self._replace(backward, node)
        results = backward.graph.output_node().args[0]
        assert isinstance(results, (tuple, list))
        self.numbers = [_number(result) for result in results]
        """For each result of the backward its module's number; -1 for what goes by none."""
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
        """In this block the backward runs; gives what its modules pass on, by number."""
        before = _running.takes, _running.handed_on
        # Asked now: inside of an operator autograd does not answer.
        takes = [functools.partial(_take, module, *module.receiver()) for module in self.modules]
        _running.takes, _running.handed_on = takes, {}
        try:
            yield _running.handed_on
        finally:
            _running.takes, _running.handed_on = before

    def results(self, computed: Sequence[Tensor | None], handed_on: dict[int, Tensor]) -> list[Tensor | None]:
        """What the backward gives to autograd: nothing for a gradient that was taken."""
        pairs = zip(self.numbers, computed, strict=True)
        return [handed_on.get(number) if number >= 0 else result for number, result in pairs]


def _take(module: AccumulateGradient, parameter: Tensor | None, fate: Fate, gradient: Tensor) -> Tensor | None:
    return module.take(gradient, parameter, fate)


def _number(result: object) -> int:
    if isinstance(result, fx.Node) and result.target is torch.ops.memopt.hand_gradient.default:
        number = result.args[1]
        assert isinstance(number, int)
        return number
    return -1
