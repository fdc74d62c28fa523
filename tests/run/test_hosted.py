"""Frozen parameters that are stored on the host."""

from __future__ import annotations

import torch
from torch import nn

from memopt.planning.options import check_options
from memopt.run.entry import Entry
from memopt.run.hosted import _Home, _homes, device_to_move_to


def test_the_bytes_of_the_device_are_counted_where_the_first_parameter_is_on_the_host() -> None:
    model = nn.Linear(4, 4)
    entry = Entry(model, 1)
    assert entry.device.type == "cpu"
    shell = torch.empty(4, 4, device="meta")
    _homes[model.weight] = _Home(model.weight.data, shell)
    assert entry.device == shell.device
    del _homes[model.weight]


def test_inputs_on_the_host_or_without_values_move_no_model() -> None:
    options = check_options(1.0, allow={"recompute", "offload_parameters"})
    call = (torch.empty(2), torch.empty(2, device="meta")), {}
    assert device_to_move_to(nn.Linear(2, 2), options, call) is None
