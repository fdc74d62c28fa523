"""The bytes that one card of a cluster holds under FSDP2: shards of all parameters and states, and gathered groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from memopt.account.account import Account, in_blocks
from memopt.account.optimizer_account import optimizer_account
from memopt.device.cluster import Cluster
from memopt.device.hardware import Hardware
from passes.graphs.node_facts import block_of

REDUCED = torch.float32
"""The dtype in which gradients are summed over the cards."""


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that FSDP2 gathers and reduces together: those of one block, or all outside of blocks."""

    name: str
    """The path of the block; "" for the group of all parameters outside of blocks, which belongs to the root."""
    numbers: frozenset[int]
    """The `id`s of its parameters."""
    gathered_bytes: int
    """Bytes of its whole parameters in the dtype of the computation, padded to equal shards."""
    reduced_bytes: int
    """Bytes of the gradients that are reduced, whole and padded, in the dtype of the reduction."""
    shard_bytes: int
    """Bytes of one card's share of the gradients, in the dtype of the parameters."""


@dataclass(frozen=True)
class Sharding:
    """The parameters of a model as FSDP2 spreads them over the `dp_shard` cards of a cluster, one group for each block.

    With tensor parallelism, they have the shapes of one card's part already."""

    cluster: Cluster
    dtype: torch.dtype
    """The dtype of the computation."""
    parameters: tuple[torch.Tensor, ...]
    groups: tuple[ParameterGroup, ...]
    """In the order of the model's modules, the root's first."""

    @classmethod
    def of(cls, model: nn.Module, cluster: Cluster, dtype: torch.dtype) -> Sharding:
        """The sharding of a model's parameters over the cards of `cluster`, one group for each block; the step computes
        in `dtype`. A parameter with several names belongs to the group of the first."""
        members: dict[str, list[torch.Tensor]] = {"": []}
        for name, parameter in model.named_parameters():
            members.setdefault(block_of(name), []).append(parameter)
        cards = cluster.mesh.dp_shard
        groups = tuple(_group(name, parameters, cards, dtype) for name, parameters in members.items() if parameters)
        return cls(cluster, dtype, tuple(model.parameters()), groups)

    def over(self, cluster: Cluster) -> Sharding:
        """The same sharding on another cluster with the same number of "tp" cards."""
        members = ((group.name, [one for one in self.parameters if id(one) in group.numbers]) for group in self.groups)
        cards = cluster.mesh.dp_shard
        groups = tuple(_group(name, parameters, cards, self.dtype) for name, parameters in members)
        return replace(self, cluster=cluster, groups=groups)

    @property
    def blocks(self) -> tuple[ParameterGroup, ...]:
        """The groups of the blocks: all but the root's, each gathered before every use of its block."""
        return tuple(group for group in self.groups if group.name)

    @cached_property
    def gathered_bytes(self) -> int:
        """The most bytes gathered at once: the root's, one block's, and the next block's, which is prefetched."""
        root = sum(group.gathered_bytes for group in self.groups if not group.name)
        return root + 2 * self._largest_bytes

    @property
    def _largest_bytes(self) -> int:
        return max((group.gathered_bytes for group in self.blocks), default=0)

    def kept_bytes(self, count: int) -> int:
        """The bytes beyond `gathered_bytes` that it takes to keep the last `count` blocks gathered until their
        backward. These then exist at once, beside one buffer into which another block is gathered."""
        kept = sum(group.gathered_bytes for group in self.blocks[len(self.blocks) - count :])
        return max(0, kept - self._largest_bytes)

    @cached_property
    def exchange_bytes(self) -> int:
        """The bytes of the buffer from which a block's gradients are reduced, for the block that needs the most."""
        return max((group.reduced_bytes for group in self.blocks), default=0)

    def shards(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors on "meta" with the shapes of the first card's shards of the parameters, which are the largest."""
        return [_shard(parameter, self.cluster.mesh.dp_shard) for parameter in parameters]

    def account(
        self, account: Account, optimizer: Any, card: Hardware, trains: Callable[[torch.Tensor], bool]
    ) -> Account:
        """The account of one card, from `account`, that of the whole step: shards in place of whole parameters,
        gradients and optimizer state, and rows for gathered parameters and for the buffers of exchanges. `trains` says
        which parameters get a gradient."""
        trained = self.shards(one for one in self.parameters if one.requires_grad and trains(one))
        state = optimizer_account(optimizer, trained, card.device_type)
        return replace(
            account,
            parameters=in_blocks((shard.nbytes for shard in self.shards(self.parameters)), card),
            gradients=in_blocks((shard.nbytes for shard in trained), card),
            optimizer_state=state.state_bytes,
            optimizer_temporaries=state.step_temporary_bytes,
            state_blocks=state.state_blocks,
            gathered=self.gathered_bytes,
            exchange=self.exchange_bytes,
        )


def _group(name: str, parameters: Sequence[torch.Tensor], cards: int, dtype: torch.dtype) -> ParameterGroup:
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    shards = {id(parameter): _shard(parameter, cards) for parameter in parameters}
    return ParameterGroup(
        name,
        frozenset(shards),
        sum(
            cards * shard.numel() * (dtype if shard.dtype.is_floating_point else shard.dtype).itemsize
            for shard in shards.values()
        ),
        sum(cards * shards[id(parameter)].numel() * REDUCED.itemsize for parameter in trained),
        sum(shards[id(parameter)].nbytes for parameter in trained),
    )


def _shard(parameter: torch.Tensor, cards: int) -> torch.Tensor:
    """The first card's share of a parameter, without memory: FSDP2 cuts the first dimension into equal parts."""
    shape = list(parameter.shape) or [1]
    shape[0] = math.ceil(shape[0] / cards)
    return torch.empty(shape, dtype=parameter.dtype, device="meta", requires_grad=parameter.requires_grad)
