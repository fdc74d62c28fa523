"""Models that `parallelize_module` has split over ranks (tensor and sequence parallelism): what of them is planned.

Their parameters are `DTensor`s. Dynamo captures the forward as one graph, and AOTAutograd takes it apart into what lies
on this rank and functional collectives, which a plan runs once, in the order of the graph.
"""

from __future__ import annotations

import hashlib
from typing import Any

from torch import nn

from memopt.capture.dynamo_graph import is_tensor_parallel
from memopt.compat.subclasses import is_sharded, mesh_dimensions, ranks_of
from memopt.errors import CaptureError
from memopt.levers import DEFAULT_LEVERS
from memopt.levers.plain import PLAIN
from memopt.planning.terms import ModelTerms


def placements_in_words(model: nn.Module) -> str:
    """A text that is equal on two ranks if they have split the model alike; empty for other models."""
    if not is_tensor_parallel(model):
        return ""
    split: list[tuple[str, Any]] = [(name, value) for name, value in model.named_parameters() if is_sharded(value)]
    facts = [(name, str(value.placements), tuple(value.shape)) for name, value in split]
    return f"{len(split)} split parameters ({hashlib.sha256(repr(facts).encode()).hexdigest()[:8]})"


def check_placements(model: nn.Module) -> None:
    """Raise `ValueError` for a split model whose ranks are not one group, or that has no values."""
    name = type(model).__name__
    split = [value for value in model.parameters() if is_sharded(value)]
    if any(mesh_dimensions(value) > 1 for value in split):
        raise ValueError(
            f"{name} is split over a device mesh of several dimensions, of which memopt plans one; give "
            "parallelize_module a mesh of one dimension, such as mesh['tp']"
        )
    if len({tuple(ranks_of(value)) for value in split}) > 1:
        raise ValueError(f"{name} has parameters that are split over different ranks; use one device mesh for all")
    if any(value.is_meta for value in split):
        raise ValueError(
            f"{name} is split and on 'meta', where memopt does not plan it; give it values (to_empty), or plan the "
            "whole model with mesh={'tp': …}"
        )


def check_terms(model: nn.Module, terms: ModelTerms) -> None:
    """Raise `ValueError` for options that are not for a split model."""
    if not is_tensor_parallel(model):
        return
    options, name = terms.options, f"{type(model).__name__} is split by parallelize_module (tensor parallelism), and"
    if terms.fuses:
        raise ValueError(f"{name} is planned for plain operators only; give backend='aten'")
    if terms.rewriting.autocast is not None:
        raise ValueError(f"{name} is planned in fp32 only; give precision='fp32'")
    if further := sorted(options.allow - DEFAULT_LEVERS - {PLAIN.name}):
        raise ValueError(f"{name} {further[0]!r} is not for it; leave it out of allow")
    if options.passes:
        raise ValueError(f"{name} its graphs are not rewritten; leave out passes")
    if options.outputs == "all":
        raise ValueError(f"{name} only its loss is differentiated; leave out outputs='all'")
    if options.dynamic is not None:
        raise ValueError(f"{name} is captured by itself for each size; leave out dynamic")
    if options.forwards > 1:
        raise ValueError(f"{name} is planned for one forward before each backward; leave out forwards")


def check_unbroken(model: nn.Module, reason: str) -> None:
    """Raise `CaptureError` for a split model whose forward is not one graph, for this reason: code between graphs would
    have to run for its plan, and exchange values with ranks that do not plan."""
    if is_tensor_parallel(model):
        raise CaptureError(
            f"the forward of {type(model).__name__}, which is split by parallelize_module, is not one graph, as a plan "
            f"for it needs: {reason}; change the model there, or add 'plain' to allow to run it unplanned"
        )
