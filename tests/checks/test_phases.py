from __future__ import annotations

import gc

import pytest
import torch

from memopt.checks.check import _Phase, _PhaseMeter

CPU = torch.device("cpu")
KB = 1024


def test_each_phase_has_its_own_peak_and_begins_with_what_was_left() -> None:
    with _PhaseMeter(CPU) as meter:
        kept = torch.empty(10 * KB, dtype=torch.uint8)
        torch.empty(70 * KB, dtype=torch.uint8)
        meter.end_phase()
        torch.empty(5 * KB, dtype=torch.uint8)
        meter.end_phase()
        del kept
        meter.end_phase()
        torch.empty(90 * KB, dtype=torch.uint8)
    assert meter.phases == (_Phase(80 * KB, 10 * KB), _Phase(15 * KB, 10 * KB), _Phase(10 * KB, 0))


def test_what_was_there_may_be_freed() -> None:
    gc.collect()
    there = torch.empty(20 * KB, dtype=torch.uint8)
    with _PhaseMeter(CPU) as meter:
        del there
        meter.end_phase()
        torch.empty(30 * KB, dtype=torch.uint8)
        meter.end_phase()
    assert meter.phases == (_Phase(0, -20 * KB), _Phase(10 * KB, -20 * KB))


def test_saved_activations_are_left_by_the_forward_and_freed_by_the_backward() -> None:
    weight = torch.ones(64, 64, requires_grad=True)
    x = torch.ones(256, 64)
    with _PhaseMeter(CPU) as meter:
        loss = (x @ weight).exp().sum()
        meter.end_phase()
        loss.backward()  # type: ignore[no-untyped-call]
        meter.end_phase()
    forward, backward = meter.phases
    assert forward.left_bytes == 256 * 64 * 4 + 4, "the result of exp, and the loss"
    assert backward.left_bytes == 64 * 64 * 4 + 4, "the gradient, and the loss"


def test_a_block_without_phases_has_none_and_a_failed_one_can_be_followed() -> None:
    with _PhaseMeter(CPU) as meter:
        torch.empty(10)
    assert meter.phases == ()
    with pytest.raises(ZeroDivisionError), _PhaseMeter(CPU):
        raise ZeroDivisionError
    with _PhaseMeter(CPU) as meter:
        meter.end_phase()
    assert meter.phases == (_Phase(0, 0),)
