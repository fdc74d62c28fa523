"""What autograd's engine tells about the backward pass that runs."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch

__all__ = ["Fate", "current_backward", "current_leaf", "fate_of_gradient", "keeps_graph"]


class Fate(Enum):
    """What the backward pass that runs does with the gradient of a leaf."""

    ACCUMULATED = "added to its .grad"
    RETURNED = "returned by torch.autograd.grad"
    DROPPED = "wanted by nobody"


def fate_of_gradient(leaf: torch.Tensor) -> Fate:
    """In a backward pass: what it will do with the leaf's gradient."""
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    try:
        return Fate.ACCUMULATED if torch._C._will_engine_execute_node(node) else Fate.DROPPED
    except RuntimeError:  # "A leaf node was passed … but we are currently running autograd.grad()"
        return Fate.RETURNED


def current_leaf(position: int) -> torch.Tensor | None:
    """In the backward of a captured region: the leaf that was tensor input `position` of that call, if it was one."""
    edges: Any = torch._C._current_autograd_node().next_functions
    return getattr(edges[position][0], "variable", None)


def current_backward() -> int:
    """A number for the backward pass that runs."""
    return torch._C._current_graph_task_id()


def keeps_graph() -> bool:
    """In a backward pass: whether it was started with `retain_graph=True`."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())
