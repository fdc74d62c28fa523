"""The `DistributedDataParallel` around a model: what it holds beside a step, and when its gradients are exchanged."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from memopt.compat.ddp import (
    ReducerHooks,
    active_wrapper,
    check_wrapper,
    clones_outputs,
    defers_exchange,
    is_bucket_view,
    reducer_hooks,
    takes_uneven_inputs,
)
from memopt.compat.subclasses import is_sharded
from memopt.planning.terms import Buckets
from memopt.run.ranks import Ranks


class DataParallel:
    """The wrapper around a model, if there is one: given, or found when its forward calls the model."""

    def __init__(self, model: nn.Module, wrapper: DistributedDataParallel | None = None) -> None:
        self.model = model
        self._wrapper: weakref.ref[DistributedDataParallel] | None = None
        self._ranks: Ranks | None = None
        if wrapper is not None:
            self._take(wrapper)

    def look(self) -> None:
        """Notice the wrapper whose forward is running. Raises `ValueError` where it cannot be planned for."""
        found = active_wrapper()
        if found is not None and found is not self.wrapper and any(part is self.model for part in found.modules()):
            self._take(found)

    @property
    def wrapper(self) -> DistributedDataParallel | None:
        """The wrapper; None without one, and once it is freed."""
        return self._wrapper() if self._wrapper is not None else None

    @property
    def exchange(self) -> ReducerHooks | None:
        """Exchanges each gradient of the forward that begins now as soon as it is complete; None where nothing is
        exchanged, or only after the backward."""
        wrapper = active_wrapper()
        if wrapper is None or wrapper is not self.wrapper or not _exchanges(wrapper):
            return None
        hooks = reducer_hooks(wrapper)
        hooks.take_over()
        return hooks

    def together(self, terms: Callable[[], Mapping[str, str]], *, ahead: bool = False) -> AbstractContextManager[None]:
        """A block around a forward that begins now, or around its planning `ahead`, after which all ranks go on or none
        does. Before the first one, ranks with other terms are told so.

        Only forwards whose backward exchanges gradients are in step on all ranks; the block does nothing around others.
        """
        wrapper = self.wrapper
        if wrapper is None or (not ahead and (wrapper is not active_wrapper() or not _exchanges(wrapper))):
            return nullcontext()
        if takes_uneven_inputs(wrapper):
            return nullcontext()
        if self._ranks is None:
            self._ranks = Ranks(distributed.get_process_group_ranks(wrapper.process_group))
            self._ranks.check_terms(terms())
        return self._ranks.together()

    def buckets(self, *, gradients_held: bool | None = None) -> Buckets | None:
        """The wrapper's buckets in the forward that begins now; None without a wrapper. `gradients_held`: with
        gradients outside of the buckets from its start, or without; None: as they are now."""
        wrapper = self.wrapper
        if wrapper is None:
            return None
        hooks = reducer_hooks(wrapper)
        buckets = Buckets(hooks.nbytes, hooks.views, clone_outputs=clones_outputs(wrapper))
        held = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        if not hooks.views or gradients_held or not all(map(is_bucket_view, held)):
            return buckets
        return replace(buckets, hold_gradients=bool(held) or _exchanges(wrapper))

    def bucket_memory(self) -> tuple[int, frozenset[int]]:
        """The bytes of the wrapper's buckets, and the addresses of those that are known; none without a wrapper."""
        wrapper = self.wrapper
        if wrapper is None:
            return 0, frozenset()
        hooks = reducer_hooks(wrapper)
        return hooks.nbytes, hooks.addresses

    def note_buckets(self) -> None:
        """In a backward: note at its end where the wrapper's buckets lie that gradients are views of."""
        wrapper = self.wrapper
        if wrapper is not None:
            reducer_hooks(wrapper).note_at_end()

    def _take(self, wrapper: DistributedDataParallel) -> None:
        check_wrapper(wrapper)
        if any(map(is_sharded, self.model.parameters())):
            raise ValueError(
                f"{type(self.model).__name__} is split by parallelize_module and in DistributedDataParallel, which "
                "memopt does not plan together; use one of the two"
            )
        self._ranks = None
        self._wrapper = weakref.ref(wrapper)


def _exchanges(wrapper: DistributedDataParallel) -> bool:
    """Whether the backward of the wrapper's next forward exchanges gradients while it runs."""
    return wrapper.require_backward_grad_sync and not defers_exchange(wrapper)
