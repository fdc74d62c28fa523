"""Replaces GELU and SiLU that are written out by one operator, which saves only its input for the backward."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from passes.graph_pass import Pass
from passes.graphs.propagate import on_stored_values
from passes.graphs.verify import VerifyError
from passes.patterns.activation_pattern import bounded_calls, match_activation
from passes.patterns.logits_path import NoMatch
from passes.patterns.written_out import call_before, erase_inner

aten = torch.ops.aten

_OPERATORS: Mapping[str, tuple[Any, Mapping[str, str]]] = {
    "gelu": (aten.gelu.default, {}),
    "gelu_tanh": (aten.gelu.default, {"approximate": "tanh"}),
    "silu": (aten.silu.default, {}),
}


@dataclass(frozen=True)
class FoundActivation:
    """A tanh, erf or sigmoid in a formula like GELU's, and whether `FuseActivations` can rewrite that."""

    name: str
    """The name of its node."""
    kind: str = ""
    """"gelu", "gelu_tanh" (its approximation) or "silu"; empty where it is left alone."""
    reason: str = ""
    """Why it is left alone; empty if it can be rewritten."""

    def __str__(self) -> str:
        return f"{self.name}: {self.reason or f'fused into {self.kind}'}"


def find_activations(graph_module: GraphModule) -> tuple[FoundActivation, ...]:
    """Returns the formulas like GELU or SiLU in an operator graph, in order, as `FuseActivations` finds them."""
    found = []
    for bounded in bounded_calls(graph_module.graph):
        try:
            match = match_activation(graph_module, bounded)
        except NoMatch as mismatch:
            found.append(FoundActivation(bounded.name, reason=str(mismatch)))
            continue
        if match is not None:
            found.append(FoundActivation(bounded.name, match.kind))
    return tuple(found)


@dataclass(frozen=True)
class FuseActivations(Pass):
    """Replaces GELU (with erf or its tanh approximation) and SiLU that are written out by `gelu` and `silu`.

    They are recognised by the function that they compute, in any order of operations. Formulas with other constants, or
    of which something else reads a part, are left alone: see `find_activations`. Results differ by rounding.

    Before:
        mul: f32[2, 8] = aten.mul.Tensor(hidden, 0.5)
        div: f32[2, 8] = aten.div.Tensor(hidden, 1.4142135623730951)
        erf: f32[2, 8] = aten.erf(div)
        add: f32[2, 8] = aten.add.Tensor(erf, 1.0)
        mul_1: f32[2, 8] = aten.mul.Tensor(mul, add)
    After:
        gelu: f32[2, 8] = aten.gelu(hidden)
    """

    activations: frozenset[str] | None = None
    """Names of the calls of tanh, erf and sigmoid whose formulas are rewritten; None: all that can be."""

    def requires(self, graph_module: GraphModule) -> None:
        super().requires(graph_module)
        if not self.activations:
            return
        reasons = {activation.name: activation.reason for activation in find_activations(graph_module)}
        for name in sorted(self.activations):
            if reason := reasons.get(name, "it is in no formula like GELU's"):
                raise VerifyError(name, reason, "name only activations that find_activations fuses")

    def rewrite(self, graph_module: GraphModule) -> GraphModule:
        with on_stored_values(graph_module.graph):
            for bounded in list(bounded_calls(graph_module.graph)):
                if self.activations is None or bounded.name in self.activations:
                    _fuse(graph_module, bounded)
        return graph_module


def _fuse(graph_module: GraphModule, bounded: Node) -> None:
    try:
        match = match_activation(graph_module, bounded)
    except NoMatch:
        return
    if match is None:
        return
    target, options = _OPERATORS[match.kind]
    fused = call_before(min(match.results), match.inner[-1], target, match.value, **options)
    for result in match.results:
        result.replace_all_uses_with(fused)
    erase_inner({*match.inner, *match.results}, match.value)
