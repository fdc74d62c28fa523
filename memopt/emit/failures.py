"""Tells of a backward for which the device had no memory left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memopt.compat.tracing import mark_boxed
from memopt.emit.gradients import Accumulation


def telling(backward: Callable[[list[Any]], Any], accumulation: Accumulation) -> Callable[[list[Any]], Any]:
    """A compiled backward that calls `accumulation.failed` where an allocation fails in it, and raises what that
    returns."""

    def run(arguments: list[Any]) -> Any:
        try:
            return backward(arguments)
        except torch.OutOfMemoryError as failure:
            raise accumulation.failed(failure) from None

    return mark_boxed(run)
