"""The place of the 8-bit levers among the lever sets, and what they require."""

from __future__ import annotations

import pytest
import torch

from memopt.capture.operators import Rewriting
from memopt.device import hardware
from memopt.levers import DEFAULT_LEVERS, LEVERS, lever_sets, levers_named, precision_rewriting
from memopt.rewrite.narrow import DecideFp8, quantizing

H100, CPU = hardware("h100"), hardware("cpu")
BASE = Rewriting((), autocast=torch.bfloat16)
NAMES = {"fp8", "fp8_delayed", "fp8_block", "mxfp8", "fp8_activations"}


def test_none_is_used_unless_named() -> None:
    assert LEVERS.keys() >= NAMES
    assert not DEFAULT_LEVERS & NAMES


def test_first_of_all_where_it_is_faster_and_last_where_it_is_not() -> None:
    names = ("fused_ops", "fused_attention", "chunked_loss")
    allow = levers_named({*names, "fp8", "fp8_activations"})
    quick = lever_sets(BASE, allow, H100)
    assert [levers.levers for levers in quick][:3] == [(), ("fp8",), ("fp8", names[0])]
    assert [levers.next_is_faster for levers in quick] == [True] + [False] * (len(quick) - 1)
    assert quick[-1].levers == ("fp8", *names, "fp8_activations")
    slow = lever_sets(BASE, allow, CPU)
    assert [levers.levers for levers in slow][-2:] == [(*names, "fp8"), (*names, "fp8", "fp8_activations")]
    assert not any(levers.next_is_faster for levers in slow)


def test_the_deciders_of_each_lever_set() -> None:
    *_, fp8, top = lever_sets(BASE, levers_named({"fp8", "fp8_activations"}), CPU, histories="3/")
    assert fp8.deciders == (DecideFp8(CPU, histories="3/"),)
    assert (fp8.needed, fp8.joint) == ("fp8", None)
    assert top.joint is quantizing


@pytest.mark.parametrize("lever", sorted(NAMES))
def test_a_step_in_fp32_is_refused(lever: str) -> None:
    with pytest.raises(ValueError, match=f"'{lever}' in allow needs a step in 16 bits.*precision='bf16'"):
        lever_sets(Rewriting(), levers_named({lever}), CPU)


def test_two_ways_to_scale_are_refused() -> None:
    with pytest.raises(ValueError, match="'fp8' and 'fp8_block', which scale the same layers; name one"):
        lever_sets(BASE, levers_named({"fp8", "fp8_block"}), CPU)


def test_the_users_rules_are_known() -> None:
    base = precision_rewriting({"default": "bf16", "q_proj": "bf16"}, CPU)
    (_, levers) = lever_sets(base, levers_named({"fp8"}), CPU)
    decide = levers.deciders[-1]
    assert isinstance(decide, DecideFp8)
    assert decide.rules.dtypes == (("q_proj", torch.bfloat16),)
