"""Models whose parameters are distributed over ranks: which of them can be planned, and their ranks' agreement."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import distributed, nn

from memopt.capture.dynamo_graph import is_tensor_parallel
from memopt.compat import settled_gloo
from memopt.compat.fsdp import is_fully_sharded, is_sharded_otherwise, sharding_in_words
from memopt.compat.modules import modules_of, parameters_in
from memopt.compat.resharding import ALL
from memopt.compat.subclasses import is_sharded, ranks_of
from memopt.errors import RankError
from memopt.run.ranks import Ranks
from memopt.run.tensor_parallel import check_placements, placements_in_words


class Sharded:
    """The ranks over which `fully_shard` or `parallelize_module` has spread a model's parameters; none where they have
    not.

    Every forward exchanges parameters or activations, which all ranks have to do together. So each of them plans first,
    by itself, and the forward begins when all of them can take it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._ranks: Ranks | None = None
        self._open = self._settled = self._begun = False
        """Whether a forward is under way, whether the ranks have agreed that all of them can run it, and whether it has
        begun."""

    @property
    def there(self) -> bool:
        """Whether the model is sharded: now, or at an earlier call, since parameters are unsharded within a forward."""
        if self._ranks is not None or not (distributed.is_available() and distributed.is_initialized()):
            return self._ranks is not None
        return any(map(is_sharded, parameters_in(modules_of(self.model))))

    @contextmanager
    def together(self, terms: Callable[[], Mapping[str, str]]) -> Iterator[None]:
        """A block around a forward, or around planning ahead of it, that raises on all ranks if it raises on one of
        them before `begin` is called. The first block checks that all ranks have the same `terms`."""
        if self._ranks is None:
            self._ranks = Ranks(next(ranks_of(value) for value in self.model.parameters() if is_sharded(value)))
            sharding = f"{sharding_in_words(self.model)}{placements_in_words(self.model)}"
            self._ranks.check_terms({**terms(), "the sharding": sharding})
            settled_gloo.settle(self.model)
        self._open, self._settled, self._begun = True, False, False
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            if self._settled:  # other ranks learn of it by the end of this process, if they have gone on
                raise
            failure = error
        finally:
            self._open = False
        if not self._settled:
            self._ranks.settle(failure)

    def agree(self, offer: Callable[[int], int]) -> None:
        """Wait until all ranks can begin the forward and have chosen the same number: `offer(most)` is what this rank
        chooses where `most` is the largest that all ranks can, and is called until no rank chooses less. Raises the
        error of the first rank that cannot begin."""
        offered = offer(ALL)
        if not self._open or self._ranks is None:
            return
        while True:
            self._settled = True  # where this raises, it does on all ranks
            least, most = self._ranks.settle(None, offered)
            if least == most:
                return
            self._settled = False
            offered = offer(least)

    def begin(self, exchanges: int = 0) -> None:
        """Note that the forward begins, once all ranks can begin it. Raises the error of the first one that cannot, and
        `RankError` on all ranks where they would run other collectives (`Emitted.exchanges`)."""
        if not self._open or self._ranks is None:
            return
        if self._begun:
            raise RankError(
                f"the forward of {type(self.model).__name__} takes another way than when it was planned, and cannot be "
                "begun again: other ranks have gone on with it"
            )
        if not self._settled:
            self._settled = True  # where this raises, it does on all ranks
            least, most = self._ranks.settle(None, exchanges)
            if least != most:
                raise RankError(
                    f"the ranks would exchange values in other orders in the step of {type(self.model).__name__}, and "
                    "all of them stop; give all ranks batches of the same shapes"
                )
        self._begun = True


def check_sharding(model: nn.Module) -> None:
    """Raise `ValueError` for a model that is sharded otherwise than by `fully_shard` alone, or by `parallelize_module`
    alone over a mesh of one dimension."""
    name = type(model).__name__
    # It takes a second to import; whoever shards by it has done so.
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and any(isinstance(module, fsdp.FullyShardedDataParallel) for module in model.modules()):
        raise ValueError(
            f"{name} is sharded by FullyShardedDataParallel, which memopt does not plan; shard it by "
            "torch.distributed.fsdp.fully_shard, and then call memopt.optimize"
        )
    if is_fully_sharded(model) and is_sharded_otherwise(model):
        raise ValueError(
            f"{name} is sharded by fully_shard and split by parallelize_module (tensor parallelism), which memopt does "
            "not plan together; use one of the two"
        )
    if is_tensor_parallel(model):
        check_placements(model)
