from __future__ import annotations

import copy

import torch
from torch import nn

from memopt.compat.modules import compiled_call, plain_call, reset_compiled_call, set_compiled_call


def test_a_call_that_stands_in() -> None:
    model = nn.Linear(2, 2)
    before = dict(vars(model))
    assert compiled_call(model) is None

    def stand_in(x: torch.Tensor) -> str:
        return "stood in"

    set_compiled_call(model, stand_in)
    assert compiled_call(model) is stand_in
    assert model(torch.zeros(2)) == "stood in"
    assert compiled_call(copy.deepcopy(model)) is None
    assert torch.equal(plain_call(model)(torch.zeros(2)), model.bias)

    reset_compiled_call(model)
    assert vars(model) == before
    assert torch.equal(model(torch.zeros(2)), model.bias)
    reset_compiled_call(model)  # a second time changes nothing


def test_the_plain_call_runs_hooks() -> None:
    model, seen = nn.Identity(), []
    model.register_forward_hook(lambda module, args, output: seen.append(output))
    plain_call(model)(3)
    assert seen == [3]


def test_the_call_that_compile_made() -> None:
    model = nn.Identity()
    model.compile(backend="eager")
    assert compiled_call(model) is not None
