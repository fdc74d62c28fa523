"""The terms on which a rank trains: what must be equal on all ranks for them to run by one plan."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from memopt.planning.job_key import own_digest, sources_of
from memopt.planning.options import Options
from memopt.units import size


def terms_of(model: nn.Module, options: Options, loss_fn: Callable[..., Any] | None) -> Mapping[str, str]:
    """Name → value in words, for messages; code by the beginning of its hash."""
    shapes = [(name, tuple(value.shape), value.dtype, value.requires_grad) for name, value in model.named_parameters()]
    return {
        "the budget": size(options.budget_bytes),
        "precision": repr(options.precision),
        "allow": ", ".join(sorted(options.allow)),
        "backend": options.backend,
        "outputs": options.outputs,
        "memopt": f"code {own_digest()[:8]}",
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "the model": f"{type(model).__name__} ({_digest(shapes)})",
        "the model's code": _digest(sources_of(model, loss_fn)),
    }


def _digest(value: object) -> str:
    """The beginning of the hash of a value's text."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:8]
