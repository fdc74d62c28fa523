"""Calls of operators with an `out=` that is not contiguous, as TRL's heads make them, which Dynamo breaks graphs at.

torch._dynamo takes more than a second to import, so functions import it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from passes.compat import private

PRIVATE_NAMES = (
    *private(
        "torch._dynamo.variables.torch", "TorchInGraphFunctionVariable.call_function", call="self, tx, args, kwargs"
    ),
    *private("torch._dynamo.variables.base", "VariableTracker.is_tensor", "VariableTracker.as_proxy", call="self"),
    *private("torch._dynamo.variables.base", "VariableTracker.call_method", call="self, tx, name, args, kwargs"),
)


@contextmanager
def strided_outs_captured() -> Iterator[None]:
    """Context in which Dynamo traces `op(…, out=part)`, with a part of a tensor that is not contiguous, as
    `part.copy_(op(…))`, which writes the same numbers.

    Where eager mode would resize or refuse, for a part of another shape or dtype or for gradients, it is left to
    Dynamo, which breaks the graph.
    """
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    owner: Any = TorchInGraphFunctionVariable
    own = owner.call_function

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        part = kwargs.get("out")
        if not _is_strided(part):
            return own(self, tx, args, kwargs)
        result = own(self, tx, args, {name: value for name, value in kwargs.items() if name != "out"})
        if not _fits(result, part):
            return own(self, tx, args, kwargs)
        return part.call_method(tx, "copy_", [result], {})

    owner.call_function = call_function
    try:
        yield
    finally:
        owner.call_function = own


def _is_strided(part: Any) -> bool:
    """Whether Dynamo has this as a tensor that is not contiguous."""
    return part is not None and part.is_tensor() and not _value(part).is_contiguous()


def _fits(result: Any, part: Any) -> bool:
    """Whether the result can be copied to the part as `out=` would write it there."""
    if not result.is_tensor():
        return False
    made, into = _value(result), _value(part)
    if made.dtype != into.dtype or made.device != into.device or made.shape != into.shape:
        return False
    return not (torch.is_grad_enabled() and (made.requires_grad or into.requires_grad))


def _value(tensor: Any) -> torch.Tensor:
    """The fake tensor of one of Dynamo's tensors."""
    value: torch.Tensor = tensor.as_proxy().node.meta["example_value"]
    return value
