"""Adapters of PEFT on a Llama, with a plain base and a quantised one: the base stays as it was to the bit, the adapter
trains as without memopt and is loaded by PEFT alone, and memory is as planned."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from examples.models.ddp import fingerprint
from examples.models.families import DECODER, causal_batch, library
from memopt.compat.tensors import with_memory
from tests.elsewhere import counted
from tests.integrations.training import EXACT, Run, assert_same

pytest.importorskip("peft")

from peft import LoraConfig, PeftModel, get_peft_model

__all__ = ["counted"]
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("counted")]
llama = library(
    "Llama", "LlamaForCausalLM", "ForCausalLM", intermediate_size=704, **{**DECODER, "hidden_size": 256}
)  # fmt: skip
BATCH = causal_batch("usual")


def base(kind: str) -> Any:
    """A Llama whose blocks are quantised for "int8"."""
    model = llama()
    if kind == "int8":
        quantization = pytest.importorskip("torchao.quantization")
        for layer in model.model.layers:
            quantization.quantize_(layer, quantization.Int8WeightOnlyConfig())
    return model


def adapted(kind: str) -> Any:
    model = base(kind)
    torch.manual_seed(1)
    projections = ["q_proj", "v_proj", "down_proj"]
    config = LoraConfig(target_modules=projections, lora_dropout=0.1, use_dora=kind == "dora", task_type="CAUSAL_LM")
    return get_peft_model(model, config).train()


def bits(model: nn.Module) -> list[str]:
    """Hashes of the tensors of the frozen parameters."""
    return [
        fingerprint(inner) for inner in with_memory(value for value in model.parameters() if not value.requires_grad)
    ]


def trained(model: nn.Module, budget_gb: float | None) -> Run:
    run = Run()
    optimizer = torch.optim.AdamW((value for value in model.parameters() if value.requires_grad), lr=1e-2)
    if budget_gb is not None:
        memopt.optimize(model, budget_gb, optimizer=optimizer, precision="fp32", **EXACT)
    for seed in range(3):
        torch.manual_seed(seed)
        with run.measured():
            loss = model(**BATCH).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        run.losses.append(loss.item())
    run.weights = {}
    return run


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "int8", "dora"])
def test_the_base_stays_and_the_adapter_is_loaded_by_peft(kind: str, tmp_path: Path) -> None:
    plain = trained(adapted(kind), None)
    model = adapted(kind)
    frozen = bits(model)
    planned = memopt.plan(model, 1, BATCH, precision="fp32", **EXACT)
    budget_gb = 0.9 * planned.predicted_peak_gb
    del planned
    run = trained(model, budget_gb)
    plan = memopt.plan_of(model)
    assert plan.account.parameters == sum(tensor.nbytes for tensor in with_memory(model.parameters()))
    assert max(run.peaks_gb[1:]) <= budget_gb
    assert_same(run, plain)
    assert max(run.peaks_gb[1:]) >= 0.97 * plan.predicted_peak_gb
    assert bits(model) == frozen

    model.save_pretrained(tmp_path)
    memopt.remove(model)
    loaded = PeftModel.from_pretrained(base(kind), tmp_path).eval()
    gc.collect()
    with torch.no_grad():
        assert torch.equal(loaded(**BATCH).logits, model.eval()(**BATCH).logits)
