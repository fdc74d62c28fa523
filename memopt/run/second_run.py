"""A second run of a forward that waits for its backward: what the first one has saved is freed until the backward reads
it, so that other forwards have its room."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memopt.compat.autograd import python_nodes
from memopt.compat.saved_tensors import replace_saved
from memopt.compat.tensors import bytes_by_address, special_kind
from memopt.training_state import CallState, generator_states, set_generators


@dataclass(frozen=True, eq=False)
class SecondRun:
    """Runs a forward in one region a second time in its backward, to compute again what was saved and freed. Until it
    is certain that it will run, it does not keep its inputs alive."""

    run: Callable[..., Sequence[Any]]
    """The region as it was emitted, a function of its inputs."""
    inputs: tuple[Any, ...]
    """Numbers, and references to tensors."""
    versions: tuple[int, ...]
    """The versions that these tensors had when the first run began."""
    written: frozenset[int]
    """The numbers of the inputs that the region writes to."""
    before: CallState
    """The random states before the call, and copies of what it writes to."""

    @classmethod
    def of(
        cls, written: frozenset[int], inputs: Sequence[Any], run: Callable[..., Any], before: CallState | None
    ) -> SecondRun | None:
        """The second run for a region whose first run begins now with `inputs`. `run` is the emitted region, `written`
        has the numbers of the inputs that it writes to, and `before` is the state before the call. None where that
        state was not saved, an input is sparse, nested or quantised, or `before` has no copy of an input that is
        written to."""
        if before is None or any(special_kind(one) for one in inputs if isinstance(one, torch.Tensor)):
            return None
        copied = before.values.copies()
        if any(id(inputs[number]) not in copied for number in written):
            return None
        kept = tuple([weakref.ref(one) if isinstance(one, torch.Tensor) else one for one in inputs])
        versions = tuple([one._version if isinstance(one, torch.Tensor) else 0 for one in inputs])
        return cls(run, kept, versions, written, before)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Those inputs that are still alive."""
        return [one for one in self._present if isinstance(one, torch.Tensor)]

    @property
    def _present(self) -> list[Any]:
        return [one() if isinstance(one, weakref.ref) else one for one in self.inputs]

    def free(self, node: Any, device: torch.device, kept: Collection[int]) -> int:
        """Free what the autograd node of the first run has saved, without storages at the addresses `kept`; the second
        run computes it when it is read. Returns the bytes; 0, with nothing freed, where an input is gone or was
        changed."""
        inputs = self._present
        copies = self.before.values.copies()
        gone = any(one is None and isinstance(by, weakref.ref) for one, by in zip(inputs, self.inputs, strict=True))
        if gone or self._changed(inputs) or any(id(inputs[number]) not in copies for number in self.written):
            return 0
        own = bytes_by_address(inputs, device).keys() | set(kept)
        first = {number: copies[id(inputs[number])] for number in self.written}
        return replace_saved(node, own, device, lambda: self._saved(inputs, first, device))

    def _changed(self, inputs: Sequence[Any]) -> bool:
        """Whether any of the inputs that are only read has been written to since the first run began."""
        return any(
            isinstance(one, torch.Tensor) and number not in self.written and one._version != self.versions[number]
            for number, one in enumerate(inputs)
        )

    def _saved(
        self, inputs: Sequence[Any], first: dict[int, torch.Tensor], device: torch.device
    ) -> Sequence[torch.Tensor | None]:
        """What the second run saves, in the order in which the first one has saved it; `first` are the values before
        the first run of the inputs that it writes to."""
        if self._changed(inputs):
            raise RuntimeError(
                "a variable needed for gradient computation has been modified by an inplace operation: a weight or an "
                "input of a forward that is run once more in its backward, since the budget has no room for what "
                "several forwards save; change it after the backward"
            )
        arguments = [
            first[number].to(device, copy=True) if number in first else one for number, one in enumerate(inputs)
        ]
        now = generator_states(device)
        try:
            set_generators(self.before.generators, device)
            with torch.enable_grad(), torch.autocast(device.type, enabled=False):
                outputs = self.run(*arguments)
        finally:
            set_generators(now, device)
        made = {one.grad_fn for one in outputs if isinstance(one, torch.Tensor) and one.grad_fn is not None}
        (node,) = {node for found in made for node in python_nodes(found)}
        return tuple(node.saved_tensors)
