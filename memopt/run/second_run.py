"""A second run of a forward that waits for its backward: what the first one has saved is freed until the backward reads
it, so that other forwards have its room."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from memopt.compat.autograd import python_nodes
from memopt.compat.saved_tensors import replace_saved, saved_by
from memopt.compat.tensors import bytes_by_address, special_kind
from memopt.run.weak_inputs import WeakInputs
from memopt.training_state import CallState, generator_states, set_generators


@dataclass(frozen=True, eq=False)
class SecondRun:
    """Runs a forward in one region a second time in its backward, to compute again what was saved and freed. The
    caller's tensors among its inputs are kept alive only once something was freed."""

    run: Callable[..., Sequence[Any]]
    """The region as it was emitted, a function of its inputs."""
    inputs: WeakInputs
    written: frozenset[int]
    """The numbers of the inputs that the region writes to."""
    before: CallState
    """The random states before the call, and copies of what it writes to."""
    tensors: list[torch.Tensor] = field(default_factory=list)
    """The inputs, once what the first run has saved is freed."""

    @classmethod
    def of(
        cls,
        written: frozenset[int],
        inputs: Sequence[Any],
        weak: WeakInputs,
        run: Callable[..., Any],
        before: CallState | None,
    ) -> SecondRun | None:
        """The second run of a region whose first run begins now with `inputs`; `weak` are the same, as weak references.
        `run` is the region's emitted function, `written` has the numbers of the inputs that it writes to, and `before`
        is the state before the call. None where `before` is None or lacks a copy of an input that is written to, or
        where an input is sparse, nested or quantised."""
        if before is None or any(special_kind(one) for one in inputs if isinstance(one, torch.Tensor)):
            return None
        copied = before.values.copies()
        if any(id(inputs[number]) not in copied for number in written):
            return None
        return cls(run, weak, written, before)

    def free(self, node: Any, device: torch.device, kept: Collection[int]) -> int:
        """Free the tensors that the autograd node of the first run has saved, except at the addresses `kept`; reading
        one of them makes the second run. Returns the bytes freed: 0, with nothing freed, where an input is gone or was
        changed."""
        inputs = self.inputs.present(partial(saved_by, node))
        copies = self.before.values.copies()
        changed = self.inputs.are_gone(inputs) or self.inputs.have_changed(inputs, but=self.written)
        if changed or any(id(inputs[number]) not in copies for number in self.written):
            return 0
        own = bytes_by_address(inputs, device).keys() | set(kept)
        first = {number: copies[id(inputs[number])] for number in self.written}
        self.tensors.extend(one for one in inputs if isinstance(one, torch.Tensor))
        return replace_saved(node, own, device, lambda: self._saved(inputs, first, device))

    def _saved(
        self, inputs: Sequence[Any], first: dict[int, torch.Tensor], device: torch.device
    ) -> Sequence[torch.Tensor | None]:
        """What the second run saves, in the order in which the first one has saved it; `first` are the values before
        the first run of the inputs that it writes to."""
        if self.inputs.have_changed(inputs, but=self.written):
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
