"""A captured call on a cluster: which inputs of its graph belong to which group of sharded parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import fx

from memopt.account.sharded import ParameterGroup, Sharding
from memopt.capture.exchanges import exchange_seconds, is_exchange
from memopt.capture.joint import JointGraph
from memopt.price.priced_graph import NodePrice
from memopt.price.reductions import Reduction


@dataclass(frozen=True)
class ShardedCall:
    """The sharding of a model's parameters, and the inputs of a call's only graph that are in each group."""

    sharding: Sharding
    inputs: tuple[frozenset[int], ...]
    """For each group of the sharding, the numbers of its parameters among the inputs of the graph."""

    @classmethod
    def of(cls, sharding: Sharding, parameter_ids: Mapping[int, int]) -> ShardedCall:
        """The groups of a region's inputs; `parameter_ids` maps the number of an input to the `id` of a parameter."""

        def numbers(group: ParameterGroup) -> frozenset[int]:
            return frozenset(number for number, given in parameter_ids.items() if given in group.numbers)

        return cls(sharding, tuple(map(numbers, sharding.groups)))

    def reductions(self, region: JointGraph, *, accumulating: bool) -> tuple[Reduction, ...]:
        """The reductions of the gradients that a graph makes. A block's buffer is in the account for the whole step,
        since the next block's backward runs meanwhile; the root's comes last and takes more."""
        trained = region.inputs_with_gradients
        buffer_bytes = self.sharding.exchange_bytes
        return tuple(
            Reduction(
                f"reduce_{group.name or 'root'}",
                frozenset(region.forward_outputs + number for number in numbers & trained),
                0 if group.name else max(0, group.reduced_bytes - buffer_bytes),
                0 if accumulating else group.shard_bytes,
            )
            for group, numbers in zip(self.sharding.groups, self.inputs, strict=True)
            if numbers & trained
        )

    def exchange_prices(self, nodes: Iterable[fx.Node]) -> dict[fx.Node, NodePrice]:
        """The prices of the nodes that stand for exchanges within layers: these wait for the links between cards."""
        ring = self.sharding.cluster.tp
        return {node: NodePrice(exchange_seconds(node, ring), 0) for node in nodes if is_exchange(node)}
