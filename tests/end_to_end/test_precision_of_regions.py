"""Forwards that break into regions, in 16 bits: the code between regions gets the dtypes of the plain model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import memopt
from memopt.errors import GIB
from tests.end_to_end.test_values_in_python import seed, wav2vec2
from tests.marks import slow

SIXTEEN_BITS: dict[str, Any] = {"precision": "bf16", "elsewhere_gb": 0}


class Matched(nn.Module):
    """Matches results in code that torch.compile breaks the graph for, by an operator that takes no 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(64, 64), nn.Linear(64, 64)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        projected = self.before(x)
        nearest = self.nearest(projected, places)
        return self.after(projected[nearest]).pow(2).mean() + nn.functional.linear(projected, self.after.weight).mean()

    @torch.compiler.disable
    def nearest(self, projected: Tensor, places: Tensor) -> Tensor:
        self.seen.append(projected.dtype)
        return torch.cdist(projected, places).argmin(0)


class MatchedWithHook(Matched):
    """Has a region that passes cannot rewrite, and that computes in 16 bits under `torch.autocast`."""

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        projected = self.before(x)
        projected.register_hook(lambda gradient: gradient / 2)
        nearest = self.nearest(projected, places)
        return self.after(projected[nearest]).pow(2).mean()


class MappedSpectrum(nn.Module):
    """Has a region that passes cannot rewrite, and that fails under `torch.autocast`: no complex number has 16 bits."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.breaks = breaks
        self.before, self.after = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        projected = torch.vmap(torch.sin)(self.before(x))
        spectrum = torch.complex(projected, projected).abs()
        if self.breaks:
            torch._dynamo.graph_break()
        return self.after(spectrum).pow(2).mean()


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("ahead", [True, False])
def test_a_region_that_fails_under_autocast_keeps_its_dtypes(breaks: bool, ahead: bool) -> None:
    seed(0)
    model, x = MappedSpectrum(breaks), torch.randn(32, 64)
    plain = copy.deepcopy(model)
    memopt.optimize(model, 1.0, example_inputs=x if ahead else None, **SIXTEEN_BITS)
    losses = [one(x) for one in (model, plain)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses) is not breaks  # where it breaks, the second region computes in 16 bits
    assert any("fails under torch.autocast" in note for note in memopt.plan_of(model).notes)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad, rtol=0.02, atol=1e-4)


def matched_with_hook() -> tuple[nn.Module, dict[str, Tensor]]:
    return MatchedWithHook(), matched()[1]


def matched() -> tuple[nn.Module, dict[str, Tensor]]:
    return Matched(), {"x": torch.randn(32, 64), "places": torch.randn(8, 64)}


def informer() -> tuple[nn.Module, dict[str, Tensor]]:
    """Informer, which writes a product into a sum: these have two dtypes under `torch.autocast`, and that fails."""
    config = transformers.InformerConfig(
        prediction_length=16, context_length=32, lags_sequence=[1, 2, 3], scaling="mean", num_time_features=2,
        d_model=64, encoder_ffn_dim=32, decoder_ffn_dim=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_layerdrop=0.0, decoder_layerdrop=0.0,
    )  # fmt: skip
    batch = {
        "past_values": torch.randn(4, 35), "past_time_features": torch.randn(4, 35, 2),
        "past_observed_mask": torch.ones(4, 35), "future_values": torch.randn(4, 16),
        "future_time_features": torch.randn(4, 16, 2),
    }  # fmt: skip
    return transformers.InformerForPrediction(config).train(), batch


@pytest.mark.parametrize("make", [matched, matched_with_hook, slow(wav2vec2), slow(informer)])
@pytest.mark.parametrize("ahead", [True, False])
def test_code_between_regions_gets_the_dtypes_of_the_plain_model(make: Any, ahead: bool) -> None:
    seed(0)
    model, batch = make()
    plain = copy.deepcopy(model)
    memopt.optimize(model, 1.0, example_inputs=batch if ahead else None, **SIXTEEN_BITS)
    losses: list[float] = []
    for one in (model, plain):
        seed(1)
        out = one(**batch)
        loss = out if isinstance(out, Tensor) else out.loss
        loss.backward()
        losses.append(float(loss.detach()))
    assert losses[0] != losses[1]  # it did compute in 16 bits
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
    assert losses[0] != float(torch.tensor(losses[0]).bfloat16())  # the loss itself is in fp32
    assert set(getattr(model, "seen", ())) <= {torch.float32}
    for name, parameter in plain.named_parameters():
        assert (parameter.grad is None) == (model.get_parameter(name).grad is None)


@pytest.mark.slow
def test_a_smallest_budget_of_such_a_model_is_met() -> None:
    seed(0)
    model, batch = matched()
    smallest = memopt.plan(copy.deepcopy(model), 1.0, batch, **SIXTEEN_BITS).smallest_gb()
    memopt.optimize(model, smallest, example_inputs=batch, **SIXTEEN_BITS)
    optimizer = torch.optim.AdamW(model.parameters())
    held = 3 * sum(parameter.nbytes for parameter in model.parameters()) + sum(one.nbytes for one in batch.values())
    for number in range(3):
        with memopt.measure_peak() as peak:
            model(**batch).backward()
        assert number == 0 or held + peak.allocated_bytes <= smallest * GIB  # the first one plans
        optimizer.step()
        optimizer.zero_grad()
