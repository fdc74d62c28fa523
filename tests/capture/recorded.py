"""Records regions of models for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from torch import fx, nn

from memopt.capture.dynamo import CallStopped, compile_call, training_call
from memopt.capture.region import RecordedRegion
from memopt.compat.dynamo import keep_nodes


def recorded(model: nn.Module, *inputs: Any, differentiate_all: bool = False, symbols: bool = False) -> RecordedRegion:
    """The region of a call of the model that is captured as one graph, with `symbols` for sizes that change."""
    found: list[RecordedRegion] = []

    def backend(graph_module: fx.GraphModule, given: Sequence[Any]) -> Callable[..., Any]:
        found.append(RecordedRegion.record(graph_module, given, differentiate_all=differentiate_all))
        keep_nodes(graph_module)
        raise CallStopped  # the region may return less than the call does

    with suppress(CallStopped):
        compile_call(training_call(model, None), backend, whole=True, symbols=symbols)(*inputs)
    return found[0]
