"""Which levers are used together, and in which order their deciders run."""

from __future__ import annotations

import torch

from memopt.capture.operators import Decision, OperatorGraph, Rewriting
from memopt.rewrite import OPERATOR_LEVERS, lever_sets
from memopt.rewrite.attention import fuse_attention
from memopt.rewrite.fused_ops import fuse_ops
from memopt.rewrite.loss import ChunkLosses
from passes import Pipeline


def precision(graph: OperatorGraph) -> Decision:
    return Decision(Pipeline((), label="precision"))


BASE = Rewriting((precision,), autocast=torch.bfloat16, planned_for="cuda", replaces_autocast=True)


def test_the_cheapest_first_and_each_with_those_before() -> None:
    sets = lever_sets(BASE, OPERATOR_LEVERS)
    names = ("fused_ops", "fused_attention", "chunked_loss")
    assert [lever_set.levers for lever_set in sets] == [(), names[:1], names[:2], names, names]
    assert [lever_set.rewriting.needed for lever_set in sets] == ["", *names, names[-1]]


def test_what_is_fused_is_asked_before_precision_and_the_loss_after() -> None:
    top = lever_sets(BASE, OPERATOR_LEVERS)[-1].rewriting
    assert top.deciders == (fuse_ops, fuse_attention, precision, ChunkLosses(weight_in_backward=True))


def test_all_else_of_the_rewriting_stays() -> None:
    for lever_set in lever_sets(BASE, OPERATOR_LEVERS):
        assert (lever_set.rewriting.autocast, lever_set.rewriting.planned_for) == (torch.bfloat16, "cuda")
        assert lever_set.rewriting.replaces_autocast


def test_only_what_is_allowed() -> None:
    assert [lever_set.levers for lever_set in lever_sets(BASE, {"recompute"})] == [()]
    (_, only) = lever_sets(BASE, {"recompute", "fused_attention"})
    assert (only.levers, only.rewriting.deciders) == (("fused_attention",), (fuse_attention, precision))
