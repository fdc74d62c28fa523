"""Gradients of outputs that the plan does not differentiate: by a second run of the plain forward, beside the plan."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from memopt.capture.region import RecordedRegion
from memopt.errors import UnplannedGradientError
from memopt.training_state import CallState, generator_states, set_generators


class Exceeded(Protocol):
    """A forward whose backward has not run yet."""

    def replayed(self) -> None:
        """Called once a second forward has run beside the plan of its backward."""


class Replay:
    """The second forward of one call, from the state in which the first one began.

    `before` is that state; `prevented` says why the gradients of a second forward would not do, if so; `noted` is
    called once they were needed.
    """

    def __init__(
        self,
        region: RecordedRegion,
        inputs: Sequence[Any],
        forward: Exceeded,
        before: CallState | None,
        prevented: str,
        noted: Callable[[], None],
    ) -> None:
        self.region, self.forward, self.noted = region, forward, noted
        self.inputs: Sequence[Any] | None = inputs
        leaves = [value for value in inputs if isinstance(value, torch.Tensor) and value.requires_grad]
        self._versions = [value._version if isinstance(value, torch.Tensor) else 0 for value in inputs]
        copies = before.values.copies() if before else {}
        self._copies = {number: copies[id(value)] for number, value in enumerate(inputs) if id(value) in copies}
        unknown = any(number not in self._copies for number in region.written)
        self.prevented = prevented or ("the forward writes to a large buffer or an input" if unknown else "")
        self.leaves: Sequence[torch.Tensor] = () if self.prevented else leaves
        self.device = leaves[0].device
        self.generators = generator_states(self.device)
        kind = self.device.type
        self.autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def release(self) -> None:
        """Free what the second forward needs."""
        self.inputs, self.leaves, self._copies = None, (), {}

    def gradients(self, of: Mapping[int, torch.Tensor]) -> Sequence[torch.Tensor | None]:
        """The gradients of `leaves` for these gradients of outputs, by position.

        Raises `UnplannedGradientError` where no second forward gives them.
        """
        shape = tuple(next(iter(of.values())).shape)
        what = f"a gradient flows into an output of shape {shape}, but the plan differentiates only the loss"
        mend = "optimise with outputs='all' to plan for the gradients of all outputs"
        if prevented := self.prevented or self._changed():
            raise UnplannedGradientError(f"{what}, and {prevented}; {mend}")
        found = self._second_forward(of)
        self.noted()
        self.forward.replayed()
        warnings.warn(
            f"{what}; that gradient is computed by a second run of the plain forward, beside the budget, and from the "
            f"next call on all outputs are planned for; {mend} from the first call on",
            stacklevel=2,
        )
        return found

    def _changed(self) -> str:
        """Says so if the first backward is over, or the inputs are not as they were."""
        if self.inputs is None:
            return "its forward was differentiated before without retain_graph=True"
        read = (number for number in range(len(self.inputs)) if number not in self._copies)
        tensors = ((number, self.inputs[number]) for number in read)
        same = (not isinstance(one, torch.Tensor) or one._version == self._versions[number] for number, one in tensors)
        return "" if all(same) else "the weights or inputs have changed since its forward"

    def _second_forward(self, of: Mapping[int, torch.Tensor]) -> Sequence[torch.Tensor | None]:
        assert self.inputs is not None
        assert self.region.plain is not None
        leaves: list[torch.Tensor] = []
        arguments = list(self.inputs)
        for number, value in enumerate(arguments):
            if isinstance(value, torch.Tensor) and value.requires_grad:
                arguments[number] = value.detach().requires_grad_()
                leaves.append(arguments[number])
            elif (kept := self._copies.get(number)) is not None:
                arguments[number] = kept.clone()
        now, (enabled, dtype) = generator_states(self.device), self.autocast
        try:
            set_generators(self.generators, self.device)
            with torch.enable_grad(), torch.autocast(self.device.type, dtype, enabled=enabled, cache_enabled=False):
                outputs = self.region.plain(*arguments)
        finally:
            set_generators(now, self.device)
        results = [outputs[position] for position in of]
        given = [gradient.to(result.dtype) for gradient, result in zip(of.values(), results, strict=True)]
        return torch.autograd.grad(results, leaves, given, allow_unused=True)
