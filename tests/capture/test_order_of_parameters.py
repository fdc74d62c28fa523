"""The parameters of a run come in the order of the region's inputs, so that a capture with one more input in front of
them is known as one of the same parameters."""

from __future__ import annotations

import torch
from torch import nn

from memopt.capture.region import parameter_ids


def test_parameters_are_numbered_in_the_order_of_the_inputs() -> None:
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
    for before in range(12):  # {7, 8} as a set gives 8 first
        assert list(parameter_ids([0] * before + parameters)) == [before, before + 1, before + 2]
