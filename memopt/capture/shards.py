"""Models whose parameters tensor parallelism has split over ranks, and regions that read these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from memopt.compat.fsdp import is_fully_sharded
from memopt.compat.host import is_on_host
from memopt.compat.tensors import is_sharded
from memopt.errors import CaptureError

_DRAWS = ("dropout", "bernoulli", "rand", "multinomial", "normal", "uniform")
"""Parts of the names of functions that draw random numbers."""


def is_tensor_parallel(model: nn.Module) -> bool:
    """Whether parameters of the model are split over ranks, or repeated on them, otherwise than by `fully_shard`."""
    return any(map(is_sharded, model.parameters())) and not is_fully_sharded(model)


def check_shards(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether a recorded region reads parameters that are spread over ranks (`DTensor`).

    Raises `CaptureError` where its other inputs or its outputs are, and where it draws random numbers for such a value
    on a GPU: torch gives each rank other numbers there than the captured graph would.
    """
    spread = [value for value in inputs if isinstance(value, torch.Tensor) and is_sharded(value)]
    if not all(isinstance(value, nn.Parameter) for value in spread):
        raise CaptureError("an input or a buffer of the model is a DTensor; give it what lies on this rank (to_local)")
    (results,) = graph_module.graph.output_node().args
    values = [node.meta.get("example_value") for node in results if isinstance(node, fx.Node)]  # type: ignore[union-attr]
    if any(isinstance(value, torch.Tensor) and is_sharded(value) for value in values):
        raise CaptureError(
            "the model returns a DTensor, as under loss_parallel or with use_local_output=False; have it return what "
            "lies on this rank (to_local, or full_tensor)"
        )
    drawing = next((node for node in graph_module.graph.nodes if _draws_shards(node)), None)
    if drawing is not None:
        raise CaptureError(
            f"{drawing.name} draws random numbers for a DTensor, which torch does otherwise on a GPU than in a graph; "
            "have dropout run on what lies on this rank (use_local_output=True)"
        )
    return bool(spread)


def _draws_shards(node: fx.Node) -> bool:
    """Whether a call draws random numbers for a value that is spread over ranks on a GPU."""
    value = node.meta.get("example_value")
    if node.op == "placeholder" or not isinstance(value, torch.Tensor) or not is_sharded(value):
        return False
    name = str(getattr(node.target, "__name__", node.target))
    return not is_on_host(value) and any(word in name for word in _DRAWS)
