"""Which levers are used together, and in which order their deciders run."""

from __future__ import annotations

import torch

from memopt.capture.operators import Decision, OperatorGraph, Rewriting
from memopt.device import hardware
from memopt.levers import lever_sets, levers_named
from memopt.levers.chunked_loss import _ChunkLosses
from memopt.levers.fused_ops import fuse_attention, fuse_ops
from passes import Pipeline


def precision(graph: OperatorGraph) -> Decision:
    return Decision(Pipeline((), label="precision"))


CARD = hardware("cpu")
OPERATOR_LEVERS = levers_named({"chunked_loss", "fused_attention", "fused_ops"})
BASE = Rewriting((precision,), autocast=torch.bfloat16, planned_for="cuda", replaces_autocast=True)


def test_the_cheapest_first_and_each_with_those_before() -> None:
    sets = lever_sets(BASE, OPERATOR_LEVERS, CARD)
    names = ("fused_ops", "fused_attention", "chunked_loss")
    assert [lever_set.levers for lever_set in sets] == [(), names[:1], names[:2], names, names]
    assert [lever_set.needed for lever_set in sets] == ["", *names, names[-1]]


def test_what_is_fused_is_asked_before_precision_and_the_loss_after() -> None:
    top = lever_sets(BASE, OPERATOR_LEVERS, CARD)[-1]
    assert top.deciders == (fuse_ops, fuse_attention, precision, _ChunkLosses(weight_in_backward=True))


def test_all_else_of_the_rewriting_stays() -> None:
    for lever_set in lever_sets(BASE, OPERATOR_LEVERS, CARD):
        assert (lever_set.autocast, lever_set.planned_for) == (torch.bfloat16, "cuda")
        assert lever_set.replaces_autocast


def test_only_what_is_allowed() -> None:
    assert [lever_set.levers for lever_set in lever_sets(BASE, levers_named({"recompute"}), CARD)] == [()]
    (_, only) = lever_sets(BASE, levers_named({"recompute", "fused_attention"}), CARD)
    assert (only.levers, only.deciders) == (("fused_attention",), (fuse_attention, precision))
