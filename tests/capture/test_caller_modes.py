"""Modes of the code around a region, in which it is traced: autocast, and the kernels of attention."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import memopt
from examples.models.families import normals
from memopt.capture.caller_modes import CallerModes
from tests.end_to_end.pieces import check, step, tight


class Cast(nn.Module):
    """A perceptron with an unplanned line in its middle, whose forward runs in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Tanh())
        self.after = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))

    @torch.autocast("cpu", dtype=torch.bfloat16)
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.before(x)
        torch._dynamo.graph_break()
        loss: Tensor = self.after(hidden.square()).float().square().mean()
        return loss


def test_regions_are_traced_under_the_autocast_around_them() -> None:
    torch.manual_seed(0)
    model, batch = Cast().train(), (normals(512, 64),)
    check(model, lambda model: step(model, batch), tight(model, batch), batch)


def test_the_state_is_restored() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        inside = CallerModes.now()
    with inside.restored():
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
        assert not torch.is_autocast_cache_enabled()
        with CallerModes((), cached=True).restored():
            assert not torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_autocast_cache_enabled()


def test_a_block_that_switches_autocast_off_is_restored() -> None:
    with torch.autocast("cpu", enabled=False):
        inside = CallerModes.now()
    assert inside != CallerModes.now()
    with inside.restored():
        assert CallerModes.now() == inside


class Blocks(nn.Module):
    """A layer that is used three times, each in an autocast block of its own: in a block around them, even one that
    switches autocast off, the three share the cast of the weight, so that its gradients are summed in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                x = self.layer(x)
            x = x.float().tanh()
        return x.square().mean()


class Checkpointed(nn.Module):
    """A layer that is used three times in one autocast block, which only code under a checkpoint opens."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def thrice(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for _ in range(3):
                x = self.layer(x).float().tanh()
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.thrice, x, use_reentrant=False)
        return x.square().mean()


@pytest.mark.plans_always
@pytest.mark.parametrize("make", [Blocks, Checkpointed])
def test_gradients_are_summed_in_the_dtype_of_the_plain_model(make: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = make(), normals(8, 12, 32)
    plain = copy.deepcopy(model)
    memopt.optimize(model, 1, example_inputs=(x,), precision="fp32", allow={"recompute"}, optimizer="sgd")

    def gradients(one: nn.Module, around: AbstractContextManager[object]) -> list[Tensor | None]:
        one.zero_grad()
        with around:
            loss = one(x)
        loss.backward()
        return [parameter.grad for parameter in one.parameters()]

    for number, off in enumerate((False, True, False)):
        ours, theirs = (
            gradients(one, torch.autocast("cpu", enabled=False) if off else nullcontext()) for one in (model, plain)
        )
        for own, expected in zip(ours, theirs, strict=True):
            torch.testing.assert_close(own, expected, rtol=0, atol=0, msg=f"step {number}")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*self.layer(x).chunk(3, -1), is_causal=True).square().mean()


@pytest.mark.plans_always
def test_the_kernel_of_attention_is_the_one_that_the_caller_allows() -> None:
    """Also where a plan was made ahead, and where steps differ in it: Dynamo has no guard on it."""
    torch.manual_seed(0)
    model, x = Attention(), normals(2, 4, 64, 32)
    plain = copy.deepcopy(model)
    memopt.optimize(model, 1, example_inputs=(x,), precision="fp32", allow={"recompute"}, optimizer="sgd")
    kernels = ([SDPBackend.MATH], [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
    found = []
    for allowed in (*kernels, *kernels):
        for one in (model, plain):
            one.zero_grad()
            with sdpa_kernel(allowed):
                loss = one(x)
            loss.backward()
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        assert all(torch.equal(own.grad, expected.grad) for own, expected in pairs)
        found.append(plain.layer.weight.grad)
    assert not torch.equal(*found[:2])
