"""The ranks that train one model together, and what `DistributedDataParallel` around it holds and exchanges."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from memopt.compat.ddp import (
    ReducerHooks,
    active_wrapper,
    check_wrapper,
    clones_outputs,
    defers_exchange,
    reducer_hooks,
    takes_uneven_inputs,
)
from memopt.compat.tensors import is_sharded, is_view
from memopt.errors import BudgetError, RankError
from memopt.planning.terms import Buckets


class Ranks:
    """The ranks that train one model, by number. They communicate in a process group of their own, through the host's
    memory.

    Every rank makes this object and calls its methods at the same points: at forwards that all ranks have to run
    together, because these or their backward exchange parameters, activations or gradients."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = list(numbers)
        self._group: Any = None
        if len(self.numbers) > 1:
            self._group = distributed.new_group(self.numbers, backend="gloo", use_local_synchronization=True)

    def check_terms(self, terms: Mapping[str, str]) -> None:
        """Raise `ValueError`, with the same message on all ranks, where ranks differ in `terms`: options, code or
        versions."""
        found = self.gathered(dict(terms))
        different = [
            f"{name} is {_by_rank(self.numbers, [str(given.get(name, 'unknown')) for given in found])}"
            for name in found[0]
            if any(given.get(name) != found[0][name] for given in found)
        ]
        if different:
            raise ValueError(
                f"the ranks would not train alike: {'; '.join(different)}; start all of them with the same code, "
                "versions and arguments"
            )

    @contextmanager
    def together(self) -> Iterator[None]:
        """A context that fails on all ranks if it fails on one: that rank raises its own error, the others a
        `BudgetError` or a `RankError` with its message."""
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        self.settle(failure)

    def settle(self, failure: Exception | None, offered: int = 0) -> tuple[int, int]:
        """The smallest and the largest of the numbers `offered` by the ranks, the same on all ranks. Where any rank
        passes a `failure`, all raise: that rank its own error, the others one with the message of the first such
        rank. A `BudgetError` names the budget that works for all of them."""
        failed, least, most = self._over_all(failed=failure is not None, offered=offered)
        if not failed:
            return least, most
        told = self.gathered(None if failure is None else _told(failure))
        named = max((one.smallest_bytes for one in told if isinstance(one, BudgetError)), default=0)
        told = [one.adding(smallest_bytes=named) if isinstance(one, BudgetError) else one for one in told]
        number, first = next((number, one) for number, one in zip(self.numbers, told, strict=True) if one is not None)
        if failure is None:
            raise _error(first, number)
        if isinstance(failure, BudgetError) and (None in told or failure.smallest_bytes < named):
            stop = (_STOP.format(distributed.get_rank()),) if None in told else ()
            refused = failure.adding(*stop, smallest_bytes=named)
            raise refused.with_traceback(failure.__traceback__) from failure.__cause__
        raise failure

    def _over_all(self, *, failed: bool, offered: int) -> tuple[bool, int, int]:
        """Whether any rank has failed, and the smallest and the largest number offered."""
        if self._group is None:
            return failed, offered, offered
        largest = torch.tensor([int(failed), -offered, offered])
        with _all_there():
            distributed.all_reduce(largest, distributed.ReduceOp.MAX, group=self._group)
        any_failed, least, most = largest.tolist()
        return bool(any_failed), -least, most

    def gathered(self, value: Any) -> list[Any]:
        """The `value` of every rank, in the order of rank numbers, on all ranks."""
        found: list[Any] = [value] * len(self.numbers)
        if self._group is not None:
            with _all_there():
                distributed.all_gather_object(found, value, group=self._group)
        return found


@contextmanager
def _all_there() -> Iterator[None]:
    """A context in which ranks wait for each other. Raises `RankError` where one of them does not answer."""
    try:
        yield
    except RuntimeError as lost:
        reason = str(lost).splitlines()[0]
        raise RankError(
            f"a rank of this training has ended or does not answer: {reason}; look for an error in the output of the "
            "other ranks"
        ) from lost


_STOP = "this is the error on rank {}, and all ranks stop"


def _told(error: Exception) -> BudgetError | str:
    """An error as it is sent to other ranks: of other types than `BudgetError`, which may not pickle, the text."""
    return error if isinstance(error, BudgetError) else f"{type(error).__name__}: {error}"


def _error(told: BudgetError | str, number: int) -> Exception:
    """The error that this rank raises for `told`, the error of the rank with this number."""
    if isinstance(told, BudgetError):
        return told.adding(_STOP.format(number))
    return RankError(f"rank {number} cannot train this step, and all ranks stop: {told}")


def _by_rank(numbers: list[int], texts: list[str]) -> str:
    """Each text once, with the ranks that have it: the first four, and how many more."""
    owners: dict[str, list[int]] = {}
    for number, text in zip(numbers, texts, strict=True):
        owners.setdefault(text, []).append(number)
    few = {text: ", ".join(map(str, own[:4])) for text, own in owners.items()}
    few |= {text: f"{few[text]} and {len(own) - 4} more" for text, own in owners.items() if len(own) > 4}
    return ", ".join(f"{text} on rank{'s' * (len(own) > 1)} {few[text]}" for text, own in owners.items())


class DataParallel:
    """The `DistributedDataParallel` wrapper of a model, if there is one: given, or found when its forward calls the
    model."""

    def __init__(self, model: nn.Module, wrapper: DistributedDataParallel | None = None) -> None:
        self.model = model
        self._wrapper: weakref.ref[DistributedDataParallel] | None = None
        self._ranks: Ranks | None = None
        if wrapper is not None:
            self._take(wrapper)

    def look(self) -> None:
        """Store the DDP wrapper whose forward is running, if it contains this model. Raises `ValueError` where the
        wrapper cannot be planned."""
        found = active_wrapper()
        if found is not None and found is not self.wrapper and any(part is self.model for part in found.modules()):
            self._take(found)

    @property
    def wrapper(self) -> DistributedDataParallel | None:
        """The wrapper; None if there is none or it was freed."""
        return self._wrapper() if self._wrapper is not None else None

    @property
    def exchange(self) -> ReducerHooks | None:
        """The hooks by which each gradient of the forward that begins now is exchanged as soon as it is complete; None
        where nothing is exchanged, or only after the backward."""
        wrapper = active_wrapper()
        if wrapper is None or wrapper is not self.wrapper or not _exchanges(wrapper):
            return None
        hooks = reducer_hooks(wrapper)
        hooks.take_over()
        return hooks

    def together(self, terms: Callable[[], Mapping[str, str]], *, ahead: bool = False) -> AbstractContextManager[None]:
        """A context for a forward that begins now, or with `ahead` for planning it earlier, that succeeds on all ranks
        or fails on all. The first such context raises `ValueError` on all ranks where their `terms` differ.

        Only forwards whose backward exchanges gradients are synchronous on all ranks; for others the context does
        nothing."""
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
        """The wrapper's gradient buckets as the forward that begins now will use them; None without a wrapper.
        `gradients_held`: whether gradients outside of the buckets exist at its start; None to find out."""
        wrapper = self.wrapper
        if wrapper is None:
            return None
        hooks = reducer_hooks(wrapper)
        buckets = Buckets(hooks.nbytes, hooks.views, clone_outputs=clones_outputs(wrapper))
        held = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        if not hooks.views or gradients_held or not all(map(is_view, held)):
            return buckets
        return replace(buckets, hold_gradients=bool(held) or _exchanges(wrapper))

    def bucket_memory(self) -> tuple[int, frozenset[int]]:
        """The bytes of the wrapper's buckets, and the addresses of those buckets that gradients were found to be views
        of; 0 and empty without a wrapper."""
        wrapper = self.wrapper
        if wrapper is None:
            return 0, frozenset()
        hooks = reducer_hooks(wrapper)
        return hooks.nbytes, hooks.addresses

    def note_buckets(self) -> None:
        """Have the addresses of the wrapper's buckets recorded when the running backward ends: of those that gradients
        are views of by then. Does nothing without a wrapper."""
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
        self._ranks, self._wrapper = None, weakref.ref(wrapper)


def _exchanges(wrapper: DistributedDataParallel) -> bool:
    """Whether the backward of the wrapper's next forward exchanges gradients while it runs."""
    return wrapper.require_backward_grad_sync and not defers_exchange(wrapper)
