"""What eager code between captured regions holds, found on fakes: no region plans it, the budget must hold it too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from memopt.compat.dispatch import TorchDispatchMode
from memopt.compat.pytree import tree_leaves


class Between(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts, while it is active, the bytes alive of storages that operators make, but not inside `planned()`."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # Dynamo captures nothing while other modes are active

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._alive: dict[StorageWeakRef, int] = {}
        self._known: set[StorageWeakRef] = set()
        self._planned = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count(args, made=False)
        self.count(result, made=not self._planned)
        return result

    @contextmanager
    def planned(self) -> Iterator[None]:
        """In this block runs what a plan accounts for."""
        self._planned += 1
        try:
            yield
        finally:
            self._planned -= 1

    def count(self, tensors: Any, *, made: bool) -> None:
        """Take note of storages: those just `made` count as long as they live, those that were there do not."""
        for tensor in tree_leaves(tensors):
            if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
                continue
            storage = tensor.untyped_storage()
            reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            if reference not in self._known:
                self._known.add(reference)
                if made:
                    self._alive[reference] = storage.nbytes()
        self._alive = {each: size for each, size in self._alive.items() if not each.expired()}  # type: ignore[no-untyped-call]
        self.peak_bytes = max(self.peak_bytes, sum(self._alive.values()))


def stand_in(region: fx.GraphModule, between: Between, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Run a region on fakes as one opaque function, whose memory is the plan's affair, forward and backward."""
    run: Any = _StandIn.apply
    return run(region, between, *arguments)


class _StandIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, region: fx.GraphModule, between: Between, *arguments: Any) -> Any:
        ctx.set_materialize_grads(False)
        ctx.between = between
        # Gradients of leaves end here: autograd would copy them into `.grad`, since Python holds them too.
        with between.planned():
            ctx.likes = [
                (torch.empty_like(each, device="meta"), each.device)
                if isinstance(each, torch.Tensor) and each.requires_grad and not each.is_leaf
                else None
                for each in arguments
            ]
            outputs = region.forward(*arguments)
            # Detached: autograd would take an output that is an input for one that was written over.
            return tuple(each.detach() if isinstance(each, torch.Tensor) else each for each in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        with ctx.between.planned():
            made = (like and torch.empty_like(like[0], device=like[1]) for like in ctx.likes)
            return None, None, *made
