"""The scale histories of 8-bit layers with delayed scaling: their owner, and how they are saved and loaded."""

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

from passes.ops.fp8_formats import E4M3, Histories, fp8_delayed_scale, histories_of, histories_state, load_histories


def asking(histories: Histories) -> Callable[[float], float]:
    """The scale of a value, as the magnitude that becomes the format's largest number."""
    name = f"{histories.prefix}layer"
    return lambda value: float(fp8_delayed_scale(torch.tensor([value, -1.0]), E4M3, name) * 448)


def test_a_scale_is_of_the_largest_of_the_last_16() -> None:
    histories = Histories()
    ask = asking(histories)
    assert ask(3.0) == pytest.approx(3.0)  # nothing is known yet
    assert ask(8.0) == pytest.approx(3.0)
    assert ask(2.0) == pytest.approx(8.0)
    assert [ask(2.0) for _ in range(15)] == pytest.approx([8.0] * 15)
    assert ask(2.0) == pytest.approx(2.0)


def test_what_is_not_finite_is_not_remembered() -> None:
    histories = Histories()
    ask = asking(histories)
    ask(3.0)
    assert not torch.tensor(ask(float("inf"))).isfinite()
    assert ask(1.0) == pytest.approx(3.0)


def test_each_owner_has_its_own() -> None:
    one, other = Histories(), Histories()
    asking(one)(8.0)
    assert asking(other)(2.0) == pytest.approx(2.0)
    assert asking(one)(2.0) == pytest.approx(8.0)


def test_histories_die_with_their_model() -> None:
    model = nn.Linear(2, 2)
    assert histories_of(model) is histories_of(model)
    ask = asking(histories_of(model))
    assert (ask(8.0), ask(2.0)) == pytest.approx((8.0, 8.0))
    del model
    gc.collect()
    assert (ask(2.0), ask(1.0)) == pytest.approx((2.0, 1.0))  # nobody remembers


def test_saved_and_loaded_into_another_model() -> None:
    one, other = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    assert histories_state(one) == {}
    asking(histories_of(one[0]))(8.0)
    asking(histories_of(other))(5.0)
    load_histories(other, histories_state(one))
    assert asking(histories_of(other[0]))(2.0) == pytest.approx(8.0)
    assert asking(histories_of(other))(2.0) == pytest.approx(2.0)  # loading replaces what was remembered


def test_a_saved_state_does_not_change_with_later_steps() -> None:
    model = nn.Linear(2, 2)
    ask = asking(histories_of(model))
    ask(2.0)
    state = histories_state(model)
    ask(8.0)
    load_histories(model, state)
    assert ask(1.0) == pytest.approx(2.0)


def test_a_state_of_another_model_is_refused() -> None:
    one, other = nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)
    asking(histories_of(one[0]))(8.0)
    with pytest.raises(ValueError, match="'0', which this model has not; build it as it was"):
        load_histories(other, histories_state(one))
