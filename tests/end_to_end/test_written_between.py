"""Tensors that are written to between forward and backward: an error as in plain PyTorch, or the plain gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import memopt
from tests.end_to_end.test_values_in_python import EXACT


class Blocks(nn.Module):
    """Residual blocks of which a tight budget recomputes nearly everything."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(3)
        )
        self.register_buffer("scale", torch.ones(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = h + block(h).sin() * self.scale
        return h.pow(2).mean()


def gradients(model: nn.Module, x: torch.Tensor, write: Callable[[nn.Module, torch.Tensor], object]) -> object:
    """The gradients of a step in which `write` is called before the backward, or the error that it raises."""
    model.zero_grad()
    x = x.clone()
    loss = model(x)
    with torch.no_grad():
        write(model, x)
    try:
        loss.backward()
    except RuntimeError as error:
        return "an error" if "modified by an inplace operation" in str(error) else error
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.plans_always
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_write_before_the_backward_is_an_error_or_does_no_harm(share: float) -> None:
    torch.manual_seed(0)
    plain, x = Blocks(), torch.randn(64, 32)
    roomy = memopt.plan(copy.deepcopy(plain), 1, x, **EXACT)
    smallest = roomy.smallest_gb()
    model = memopt.optimize(copy.deepcopy(plain), smallest + share * (roomy.plain_peak_gb - smallest), **EXACT)
    raised = 0
    for name in [*dict(plain.named_parameters()), "scale", "the input"]:

        def write(of: nn.Module, x: torch.Tensor, name: str = name) -> None:
            tensor = x if name == "the input" else of.get_buffer(name) if name == "scale" else of.get_parameter(name)
            tensor.add_(1.0)

        model.load_state_dict(plain.state_dict())
        before = copy.deepcopy(plain)
        theirs, ours = gradients(before, x, write), gradients(model, x, write)
        if ours == "an error":
            raised += 1
        else:
            assert isinstance(theirs, list), f"{name}: plain PyTorch raises"
            assert isinstance(ours, list)
            assert all(map(torch.equal, ours, theirs)), name
    assert raised > 3


class WritesInputs(nn.Module):
    """Writes over a value that the region before a graph break has made, as the router of Switch Transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(32, 256), nn.Linear(256, 256), nn.Linear(256, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).tanh() * 2
        torch._dynamo.graph_break()
        h *= 0.9
        return self.third(self.second(h.sin()).sin()).pow(2).mean()


@pytest.mark.plans_always
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6])
def test_a_value_of_another_region_that_is_written_over_is_not_read_again(share: float) -> None:
    torch.manual_seed(0)
    plain, x = WritesInputs(), torch.randn(4096, 32)
    options = {**EXACT, "optimizer": None}
    roomy = memopt.plan(copy.deepcopy(plain), 1, x, **options)
    smallest = roomy.smallest_gb()
    budget_gb = smallest + share * (roomy.plain_peak_gb - smallest)
    model = memopt.optimize(copy.deepcopy(plain), budget_gb, example_inputs=(x,), **options)
    for trained in (plain, model):
        torch.manual_seed(1)
        trained(x).backward()
    joined = memopt.plan_of(model).joined
    assert joined is not None
    _, second = joined.prices
    (copied,) = [op for op in second.problem.ops[: second.problem.forward_ops] if op.name.startswith("clone")]
    assert not copied.recomputable, "what AOTAutograd copies is not there any more in the backward"
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(ours.grad, theirs.grad) for ours, theirs in pairs)


class Transposed(Blocks):
    """Returns a matrix and a view of it."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        h = self.first(x)
        for block in self.blocks:
            h = h + block(h)
        return h, h.t()


@pytest.mark.plans_always
@pytest.mark.parametrize("number", [0, 1])
def test_outputs_that_share_memory_are_not_written_to_in_silence(number: int) -> None:
    """Autograd does not know here that the gradient of one changes where the other is scaled."""
    model = memopt.optimize(Transposed(), 1.0, **EXACT)
    outputs = model(torch.randn(16, 32))
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        outputs[number].mul_(2)
    sum(output.square().sum() for output in outputs).backward()
