"""Random kernels run in the order of the graph in the code that inductor writes.

From torch 2.13 on, inductor keeps that order itself where `fallback_random` is set, but not after an operator whose
results nobody reads (the last dropout of a branch that the loss does not reach), nor for one that saves the generator's
state for the backward. Later draws then get other numbers than in eager mode.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch._ops import OpOverload

from passes.compat import private

PRIVATE_NAMES = (
    *private("torch._inductor.config", "_pre_fusion_custom_pass"),
    *private("torch._inductor.custom_graph_pass", "CustomSchedulerPass", since=(2, 13), needed=False),
    *private("torch._inductor.custom_graph_pass", "CustomGraphPass"),
    *private("torch._inductor.dependencies", "WeakDep", call="name, mutating, is_fake="),
    *private("torch._inductor.scheduler", "NodeUser", call="node, is_weak="),
    *private(
        "torch._inductor.scheduler",
        "Scheduler.topological_sort_schedule",
        "Scheduler.compute_ancestors",
        "BaseSchedulerNode.add_fake_dep",
    ),
    *private("torch._inductor.graph", "GraphLowering.operations", needed=False),
)

__all__ = ["keep_random_order", "order_of_random_kernels"]


def order_of_random_kernels() -> Any:
    """Return the scheduler pass that inductor's setting `_pre_fusion_custom_pass` gets: `keep_random_order`, after the
    pass that the user has set there, if any."""
    from torch._inductor import config as untyped
    from torch._inductor import custom_graph_pass

    config: Any = untyped
    users = config._pre_fusion_custom_pass
    if users is not None:
        return lambda nodes: keep_random_order(users(nodes))
    base: Any = getattr(custom_graph_pass, "CustomSchedulerPass", custom_graph_pass.CustomGraphPass)

    class RandomOrder(base):  # type: ignore[misc]
        """A pass with a name for the keys of inductor's caches."""

        def __call__(self, nodes: list[Any]) -> list[Any]:
            return keep_random_order(nodes)

        def uuid(self) -> str:
            return "memopt: random kernels in the order of the graph"

    return RandomOrder()


def keep_random_order(nodes: list[Any]) -> list[Any]:
    """Make each random kernel depend on the one before it in the graph. Returns the scheduler's nodes in an order in
    which every node comes after those that it depends on.

    A kernel that only redraws from a saved state leaves the generator as it was, and may run at any time."""
    from torch._inductor.dependencies import WeakDep
    from torch._inductor.scheduler import NodeUser
    from torch._inductor.virtualized import V

    places = {id(operation): place for place, operation in enumerate(V.graph.operations)}
    random = sorted((node for node in nodes if _draws(node.node)), key=lambda node: places[id(node.node)])
    if len(random) < 2:
        return nodes
    for before, after in pairwise(random):
        buffer = before.get_outputs()[0]
        after.add_fake_dep(WeakDep(buffer.get_name(), after.get_name(), is_fake=True))
        buffer.users.append(NodeUser(after, is_weak=True))
    scheduler: Any = random[0].scheduler
    scheduler.nodes = scheduler.topological_sort_schedule(nodes)
    scheduler.compute_ancestors()
    sorted_nodes: list[Any] = scheduler.nodes
    return sorted_nodes


def _draws(kernel: Any) -> bool:
    """True if a node of inductor's graph draws from the generator."""
    operator = getattr(kernel, "op_overload", None)
    if operator is torch.ops.higher_order.run_and_save_rng_state:
        return True
    return isinstance(operator, OpOverload) and torch.Tag.nondeterministic_seeded in operator.tags
