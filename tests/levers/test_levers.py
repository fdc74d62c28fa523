from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import memopt
from memopt.levers import LEVERS, levers_named
from memopt.levers.all import check_allow, recompute_note

MEND = (
    "nothing is recomputed, since allow leaves out 'recompute'; to keep the default levers, give "
    "allow=memopt.DEFAULT_LEVERS | {'low_bit_optimizer'}"
)


def test_every_lever_has_its_record() -> None:
    for name, lever in memopt.LEVERS.items():
        assert lever.name == name
        assert lever.what.endswith(".")
        assert lever.price
        assert lever.exactness in ("bitwise", "rounding", "approximate")
        assert lever.tried_by


def test_the_defaults() -> None:
    assert {name for name, lever in LEVERS.items() if lever.default} == memopt.DEFAULT_LEVERS
    assert all(LEVERS[name].exactness != "approximate" for name in memopt.DEFAULT_LEVERS)
    assert not [name for name in memopt.DEFAULT_LEVERS if LEVERS[name].optimizer]
    assert "plain" not in memopt.DEFAULT_LEVERS


def test_precision_is_named_by_an_option_of_its_own() -> None:
    assert LEVERS["precision"].option == "precision"
    for named in ("precision", LEVERS["precision"]):
        with pytest.raises(ValueError, match="'precision' is decided by the option precision, not by allow"):
            check_allow([named])


def test_nothing_can_be_changed() -> None:
    levers: Any = LEVERS
    with pytest.raises(TypeError):
        levers["mine"] = levers["fp8"]
    with pytest.raises(FrozenInstanceError):
        levers["fp8"].default = True


def test_names_are_checked() -> None:
    assert check_allow(memopt.DEFAULT_LEVERS | {"fp8"}) == levers_named(memopt.DEFAULT_LEVERS | {"fp8"})
    assert check_allow([]) == ()
    with pytest.raises(ValueError, match=r"unknown lever 'fp4'; known are bf16_parameters, .*, reinplace"):
        check_allow(memopt.DEFAULT_LEVERS | {"fp4"})
    with pytest.raises(TypeError, match=r"such as memopt\.DEFAULT_LEVERS \| \{'fp8'\}, not 'fp8'"):
        check_allow("fp8")


def test_the_note_names_the_mend() -> None:
    assert recompute_note({"low_bit_optimizer"}) == (MEND,)
    assert recompute_note({"reinplace"})[0].endswith("give allow=memopt.DEFAULT_LEVERS")
    assert recompute_note({"recompute"}) == recompute_note(memopt.DEFAULT_LEVERS) == ()


def test_plans_and_refusals_say_that_recomputation_is_left_out() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))).train()
    batch = torch.zeros(512, 8), torch.zeros(512, 8)
    options: Any = {"loss_fn": mse_loss, "precision": "fp32", "effort": "fast"}
    roomy = memopt.plan(model, 1, batch, allow={"low_bit_optimizer"}, **options)
    assert MEND in roomy.notes
    assert f"note: {MEND.split(';')[0]}" in str(roomy)
    assert MEND in roomy.at(2).notes
    small = 0.5 * roomy.smallest_gb()
    for refused in (
        lambda: roomy.at(small),
        lambda: memopt.plan(model, small, batch, allow={"low_bit_optimizer"}, **options),
    ):
        with pytest.raises(memopt.BudgetError) as error:
            refused()
        assert MEND in str(error.value)
        assert str(error.value).count("nothing is recomputed") == 1
    assert not [note for note in memopt.plan(model, 1, batch, **options).notes if "recomputed" in note]
