"""Which backend lowers what: the one place that decides it."""

from __future__ import annotations

import torch
from torch import fx

from memopt.compat import data_symbols_of
from memopt.emit.aten import ATEN
from memopt.emit.inductor import INDUCTOR
from memopt.emit.lowering import Lowering

BACKENDS = ("auto", "aten", "inductor")


def lowering_for(backend: str, device: torch.device) -> Lowering:
    """What the user's `backend` means on a device: "auto" is inductor on CUDA, plain operators elsewhere."""
    if backend == "auto":
        backend = "inductor" if device.type == "cuda" else "aten"
    return INDUCTOR if backend == "inductor" else ATEN


def lowering_of_region(graph_module: fx.GraphModule, wanted: Lowering) -> Lowering:
    """What lowers a region that Dynamo captured. Sizes that depend on data are guarded by calls that only plain graphs
    can hold."""
    values = (node.meta.get("example_value") for node in graph_module.graph.nodes)
    return ATEN if any(map(data_symbols_of, values)) else wanted
