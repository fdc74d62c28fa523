"""Backwards that authors write in a `torch.autograd.Function`, where Dynamo traces them a second time.

A backward that asks for strides is traced again with its gradients made contiguous, by a function of torch that
fails for outputs which are no tensors and so have no gradient.

torch._dynamo takes more than a second to import, so functions import it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from passes.compat import private

PRIVATE_NAMES = (
    *private(
        "torch._dynamo._trace_wrapped_higher_order_op",
        "autograd_function_backward_rewritten",
        since=(2, 13),
        needed=False,
    ),
)

_NAME = "autograd_function_backward_rewritten"


@contextmanager
def outputs_without_gradients() -> Iterator[None]:
    """Context in which Dynamo traces a backward again whatever the outputs are that it gets no gradients for."""
    from torch._dynamo import _trace_wrapped_higher_order_op as owner

    own = getattr(owner, _NAME, None)
    if own is None:
        yield
        return
    setattr(owner, _NAME, _with_contiguous_gradients)
    try:
        yield
    finally:
        setattr(owner, _NAME, own)


def _with_contiguous_gradients(backward: Callable[..., Any]) -> Callable[..., Any]:
    """The backward of a function, whose gradients are made contiguous before it gets them."""

    def contiguous(context: Any, *gradients: Any) -> Any:
        return backward(context, *[None if gradient is None else gradient.contiguous() for gradient in gradients])

    return contiguous
