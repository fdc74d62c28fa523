"""Adapters on 4-bit weights of bitsandbytes: the products with these are recomputed, and the plain bits come out."""

from __future__ import annotations

import gc

import pytest
import torch

import memopt
from examples.models.ddp import fingerprint
from memopt.device.op_call import describe
from memopt.device.workspace import estimate_workspace
from tests.end_to_end.hosted import NF4, assert_same, trained
from tests.integrations.training import EXACT

bitsandbytes = pytest.importorskip("bitsandbytes")


@pytest.mark.slow
@pytest.mark.plans_always
def test_losses_and_adapters_are_the_plain_ones_at_half_of_the_activations() -> None:
    options = {**EXACT, "precision": "fp32"}
    model = NF4.make()
    frozen = [fingerprint(one) for one in model.parameters() if not one.requires_grad]
    plan = memopt.plan(model, 1, NF4.batch(), **options)
    held = plan.account.resident_bytes
    budget_bytes = held + (plan.plain.peak_bytes - held) / 2
    del plan
    gc.collect()
    memopt.optimize(model, budget_bytes / 2**30, **options)
    run = trained(NF4, model, 5)
    assert max(run.peaks) <= budget_bytes
    assert memopt.status(model).state is memopt.State.PLANNED
    assert [fingerprint(one) for one in model.parameters() if not one.requires_grad] == frozen
    assert_same(run, trained(NF4, NF4.make(), 5))


@pytest.mark.parametrize("nested", [False, True])
def test_a_product_takes_its_weight_unpacked(nested: bool) -> None:
    """As bitsandbytes' CUDA kernels do for more than a few rows, by their source."""
    functional = bitsandbytes.functional
    weight = torch.randn(384, 256)
    packed, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=nested)
    x = torch.randn(64, 256)
    scales = [state.state2.absmax, state.absmax, state.state2.code, state.offset] if nested else [state.absmax]
    first, *others = scales
    args = (x, packed.view(-1, 1), list(weight.shape), first, 64, "nf4", None, *others)
    op = torch.ops.bitsandbytes.gemm_4bit.default
    call = describe(op, args, {}, op(*args))
    assert 4 * weight.numel() <= estimate_workspace(call, "cuda") <= 1.1 * 4 * weight.numel()
