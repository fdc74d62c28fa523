"""Models that are built on the host and trained on the card: their frozen parameters never lie there together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import memopt
from memopt.errors import GIB
from memopt.planning.options import check_options
from memopt.run.hosted import device_to_move_to, move_to, on_device, with_inputs_there

ALLOW = memopt.DEFAULT_LEVERS | {"offload_parameters"}


def built_on_host() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    config = GPT2Config(n_embd=512, n_layer=4, n_head=8, vocab_size=8000, use_cache=False)
    model = GPT2LMHeadModel(config).train().requires_grad_(False)
    for block in model.transformer.h:
        block.mlp.c_fc.bias.requires_grad_(True)
    tokens = torch.zeros(1, 256, dtype=torch.long, device="cuda")
    return model, {"input_ids": tokens, "labels": tokens}


def devices(model: nn.Module) -> set[str]:
    return {parameter.device.type for parameter in model.parameters()}


def train(model: Any, batch: Any, steps: int = 2) -> None:
    optimizer = torch.optim.AdamW(one for one in model.parameters() if one.requires_grad)
    for _ in range(steps):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("ahead", [True, False])
def test_it_trains_at_the_budget_that_its_refusal_names(ahead: bool) -> None:
    model, batch = built_on_host()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(memopt.BudgetError) as refused:
        memopt.optimize(model, 0.5, example_inputs=batch, allow=ALLOW)
    assert devices(model) == {"cpu"}, "a refused model is as it was"
    given = {"example_inputs": batch} if ahead else {}
    memopt.optimize(model, refused.value.smallest_gb, allow=ALLOW, **given)
    train(model, batch, 1)
    plan = memopt.plan_of(model)
    assert plan.hosted_bytes > 0.8 * sum(value.nbytes for value in values.values())
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    train(model, batch)
    assert before < torch.cuda.max_memory_allocated() < refused.value.smallest_gb * GIB
    assert devices(model) == {"cpu", "cuda"}
    with torch.no_grad():
        model.eval().generate(batch["input_ids"][:, :4], max_new_tokens=2, pad_token_id=0)  # type: ignore[operator]
    memopt.remove(model)
    assert devices(model) == {"cpu"}
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad or torch.equal(parameter, values[name])


def test_what_fits_moves_to_the_card() -> None:
    model, batch = built_on_host()
    memopt.optimize(model, 8.0, allow=ALLOW)
    train(model, batch)
    assert devices(model) == {"cuda"}
    memopt.optimize(model, 4.0, example_inputs=batch, allow=ALLOW)
    assert devices(model) == {"cuda"}


class _MovesItself(nn.Linear):
    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]


def test_of_a_model_on_the_host_frozen_parameters_stay_there() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), _MovesItself(3, 3))
    model.requires_grad_(False)
    model[0].bias.requires_grad_(True)
    model[2].weight = model[0].weight
    values = model[0].weight.clone()
    there = torch.device("cuda", 0)
    move_to(model, there)
    lie = {name: parameter.device.type for name, parameter in model.named_parameters()}
    itself = {"3.weight", "3.bias"}
    assert {name for name in lie if lie[name] == there.type} == itself | {"0.bias"}
    assert {buffer.device.type for buffer in model.buffers()} == {there.type}
    assert torch.equal(model[0].weight, values)
    with on_device(model):
        assert {parameter.device.type for parameter in model.parameters()} == {there.type}
    (moved,), _ = with_inputs_there(model, ((values,), {}))
    assert moved.device == there
    assert device_to_move_to(model, check_options(1.0, allow=ALLOW), ((moved,), {})) is None, "it has moved"
