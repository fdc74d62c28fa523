"""Replaces LayerNorm that is written out by `layer_norm`, which saves its input and two numbers for each row."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from passes.graph_pass import Pass
from passes.graphs.propagate import on_stored_values
from passes.graphs.verify import VerifyError
from passes.patterns.logits_path import NoMatch
from passes.patterns.norm_pattern import match_norm, roots
from passes.patterns.written_out import call_before, erase_inner

aten = torch.ops.aten


@dataclass(frozen=True)
class FoundNorm:
    """The square root that a norm divides by, and whether `FuseNorms` can rewrite the norm."""

    name: str
    """The name of the root's node: a `sqrt`, `rsqrt`, `pow` or `std`."""
    reason: str = ""
    """Why it is left alone; empty if it can be rewritten."""

    def __str__(self) -> str:
        return f"{self.name}: {self.reason or 'fused'}"


def find_norms(graph_module: GraphModule) -> tuple[FoundNorm, ...]:
    """Returns what looks like LayerNorm or RMSNorm in an operator graph, in order, as `FuseNorms` finds it."""
    found = []
    for root in roots(graph_module.graph):
        try:
            match = match_norm(graph_module, root)
        except NoMatch as mismatch:
            found.append(FoundNorm(root.name, str(mismatch)))
            continue
        if match is not None:
            found.append(FoundNorm(root.name))
    return tuple(found)


@dataclass(frozen=True)
class FuseNorms(Pass):
    """Replaces (x - mean) / sqrt(variance + eps) · weight + bias, over the last dimensions, by `layer_norm`.

    Weight and bias of another dtype or shape stay separate calls behind it. Norms of which something else reads a part
    are left alone, and so is RMSNorm: `rms_norm` is traced into the same calls (torch 2.13) and would save nothing. See
    `find_norms`. Results differ by rounding.

    Before:
        mean: f32[2, 1] = aten.mean.dim(hidden, [-1], True)
        sub: f32[2, 8] = aten.sub.Tensor(hidden, mean)
        var: f32[2, 1] = aten.var.dim(hidden, [-1], False, True)
        add: f32[2, 1] = aten.add.Tensor(var, 1e-05)
        rsqrt: f32[2, 1] = aten.rsqrt(add)
        mul: f32[2, 8] = aten.mul.Tensor(sub, rsqrt)
    After:
        layer_norm: f32[2, 8] = aten.layer_norm(hidden, [8], None, None, 1e-05)
    """

    norms: frozenset[str] | None = None
    """Names of the roots of the norms to rewrite; None: all that can be."""

    def requires(self, graph_module: GraphModule) -> None:
        super().requires(graph_module)
        if not self.norms:
            return
        reasons = {norm.name: norm.reason for norm in find_norms(graph_module)}
        for name in sorted(self.norms):
            if reason := reasons.get(name, "it is no root that a norm divides by"):
                raise VerifyError(name, reason, "name only norms that find_norms fuses")

    def rewrite(self, graph_module: GraphModule) -> GraphModule:
        with on_stored_values(graph_module.graph):
            for root in list(roots(graph_module.graph)):
                if self.norms is None or root.name in self.norms:
                    _fuse(graph_module, root)
        return graph_module


def _fuse(graph_module: GraphModule, root: Node) -> None:
    try:
        match = match_norm(graph_module, root)
    except NoMatch:
        return
    if match is None:
        return
    arguments: tuple[Any, ...] = (match.value, list(match.sizes), match.weight, match.bias, match.eps)
    fused = call_before(match.result, root, aten.layer_norm.default, *arguments)
    match.result.replace_all_uses_with(fused)
    erase_inner({*match.inner, match.result}, match.value)
