"""`TrainStep(verify_every=…)`: right steps go on unchanged, wrong gradients stop with the operator."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from memopt.emit import emit
from tests.checks.test_compare import WIDTH, Batch, Net, batch
from tests.marks import slow

__all__ = ["batch"]


def steps(model: nn.Module, batch: Batch, **options: Any) -> list[torch.Tensor]:
    """The parameters after four steps."""
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW(model.parameters())
    step = memopt.TrainStep(model, optimizer, accumulate=2, **options)
    for _ in range(8):
        step(batch)
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("precision", ["fp32", slow("bf16")])
def test_a_verified_run_is_the_run(batch: Batch, precision: str) -> None:
    torch.manual_seed(0)
    model = Net()
    verified, plain = (
        memopt.optimize(copy.deepcopy(model), 1.0, precision=precision, example_inputs=batch) for _ in range(2)
    )
    for ours, theirs in zip(steps(verified, batch, verify_every=2), steps(plain, batch), strict=True):
        assert torch.equal(ours, theirs)


def test_wrong_gradients_stop_the_run(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward that multiplies by 3 where it must not is told by the operator before which it is right."""
    monkeypatch.setenv("MEMOPT_CACHE", "0")
    true = emit.boxed

    def false(module: torch.fx.GraphModule) -> Any:
        for node in module.graph.nodes:
            if "gelu_backward" in str(node.target):
                with module.graph.inserting_after(node):
                    wrong = module.graph.call_function(torch.ops.aten.mul.Tensor, (node, 3))
                node.replace_all_uses_with(wrong, delete_user_cb=lambda user, wrong=wrong: user is not wrong)
                break  # the last GELU of the forward
        module.recompile()
        return true(module)

    monkeypatch.setattr(emit, "boxed", false)
    torch.manual_seed(0)
    model = memopt.optimize(Net(), 1.0, precision="fp32", allow={"recompute"})
    before = [parameter.detach().clone() for parameter in model.parameters()]
    step = memopt.TrainStep(model, torch.optim.AdamW(model.parameters()), verify_every=10)
    with pytest.raises(
        memopt.GradientMismatchError,
        match=r"gradient of blocks\.2\.0\.\w+ by .*of the \d+ that differ.*test_compare",
    ):
        step(batch)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(map(torch.equal, before, model.parameters()))


def test_a_plain_model_has_nothing_to_verify() -> None:
    model = nn.Linear(WIDTH, WIDTH)
    with pytest.raises(ValueError, match=r"verify_every=5 needs a model that memopt\.optimize has optimised"):
        memopt.TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), verify_every=5)
