"""A run under FSDP2 or DDP, saved by `torch.distributed.checkpoint` and resumed: bitwise on as many ranks, and to the
same losses on another number of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import memopt
from examples.models.ddp import VOCABULARY, gpt2_of
from examples.models.families import integers, library
from memopt import RunState, TrainStep
from memopt.optimizers.state_optimizers import LowBitOptimizer
from tests.two_ranks import on_ranks

STEPS, SAVED_AFTER, TEXTS = 4, 2, 8
BUDGET_GB = 0.5
LOSSES_AGREE = 2e-6
"""Sums over two ranks and over four round otherwise."""
MAKERS = {
    "GPT-2": gpt2_of(64, 2, 4),
    "Llama": library(
        "Llama", "LlamaForCausalLM", "ForCausalLM",
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, use_cache=False,
    ),
}  # fmt: skip
BLOCKS = {"GPT-2": "transformer.h", "Llama": "model.layers"}


def built(name: str, way: str, ranks: int, *, drops: bool) -> Any:
    """The optimised model as a rank has it, under FSDP2 or DDP, and its `TrainStep`."""
    model: Any = MAKERS[name]().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout) and not drops:
            module.p = 0.0
    if way == "FSDP2":
        mesh = init_device_mesh("cpu", (ranks,))
        for block in model.get_submodule(BLOCKS[name]):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    memopt.optimize(model, BUDGET_GB, precision="fp32")
    if way == "DDP":
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 0.9**number)
    return model, TrainStep(model, optimizer, scheduler=scheduler)


def batch(rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """A rank's share of a batch that is the same in each step and for any number of ranks."""
    tokens = integers(VOCABULARY, TEXTS, 32)[rank::ranks]
    return {"input_ids": tokens, "labels": tokens}


def trained(
    rank: int, ranks: int, name: str, way: str, drops: bool, folder: str, first: int, last: int, saves: int | None
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train the steps from `first` to `last`, from the checkpoint in `folder` unless it is the first; save after step
    number `saves`. Returns the losses and the whole parameters."""
    torch.manual_seed(rank)
    model, step = built(name, way, ranks, drops=drops)
    if first:
        torch.manual_seed(99)
        checkpoint.load({"run": RunState(step)}, checkpoint_id=folder)
        assert step.number == first
    losses = []
    for number in range(first, last):
        losses.append(float(step(batch(rank, ranks)).loss))
        if saves == number + 1:
            checkpoint.save({"run": RunState(step)}, checkpoint_id=folder)
    return losses, {key: whole(value) for key, value in model.state_dict().items()}


def whole(value: Any) -> torch.Tensor:
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return value.detach().clone()


@pytest.mark.slow  # each run plans on several ranks
@pytest.mark.parametrize(("name", "way"), [("GPT-2", "FSDP2"), ("GPT-2", "DDP"), ("Llama", "FSDP2")])
def test_a_resumed_run_is_bitwise_the_same_on_as_many_ranks(name: str, way: str, tmp_path: Path) -> None:
    folder = str(tmp_path)
    alone = on_ranks(2, trained, 2, name, way, True, folder, 0, STEPS, SAVED_AFTER)
    resumed = on_ranks(2, trained, 2, name, way, True, folder, SAVED_AFTER, STEPS, None)
    for (losses, parameters), (later, again) in zip(alone, resumed, strict=True):
        assert losses[SAVED_AFTER:] == later
        assert parameters.keys() == again.keys()
        assert all(torch.equal(value, again[key]) for key, value in parameters.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "way", "before", "after"),
    [
        ("GPT-2", "FSDP2", 2, 4),
        ("GPT-2", "FSDP2", 4, 2),
        ("Llama", "FSDP2", 2, 4),
        ("Llama", "FSDP2", 4, 2),
        ("GPT-2", "DDP", 2, 4),
        ("GPT-2", "DDP", 4, 2),
    ],
)
def test_a_run_goes_on_to_the_same_losses_on_other_ranks(
    name: str, way: str, before: int, after: int, tmp_path: Path
) -> None:
    folder = str(tmp_path)
    (alone, _), *_ = on_ranks(before, trained, before, name, way, False, folder, 0, STEPS, SAVED_AFTER)
    resumed = on_ranks(after, trained, after, name, way, False, folder, SAVED_AFTER, STEPS, None)
    for losses, _ in resumed:
        assert losses == pytest.approx(alone[SAVED_AFTER:], rel=LOSSES_AGREE)
    assert abs(alone[-1] - alone[0]) > 0.1  # or the comparison could not tell a run that forgot its state


@pytest.mark.slow
def test_a_checkpoint_of_fsdp_is_resumed_under_ddp(tmp_path: Path) -> None:
    folder = str(tmp_path)
    (alone, _), *_ = on_ranks(2, trained, 2, "GPT-2", "FSDP2", False, folder, 0, STEPS, SAVED_AFTER)
    (later, _), *_ = on_ranks(2, trained, 2, "GPT-2", "DDP", False, folder, SAVED_AFTER, STEPS, None)
    assert later == pytest.approx(alone[SAVED_AFTER:], rel=LOSSES_AGREE)


def alone_step(*, accumulate: int = 1, schedules: bool = True) -> tuple[nn.Module, TrainStep]:
    model = MAKERS["GPT-2"]().train()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 0.5**number) if schedules else None
    return model, TrainStep(model, optimizer, scheduler=scheduler, accumulate=accumulate)


def test_one_device_resumes_bitwise(tmp_path: Path) -> None:
    model, step = alone_step()
    step(batch(0, 1))
    checkpoint.save({"run": RunState(step)}, checkpoint_id=tmp_path, no_dist=True)
    expected = step(batch(0, 1)).loss
    torch.manual_seed(99)
    other, resumed = alone_step()
    checkpoint.load({"run": RunState(resumed)}, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(resumed(batch(0, 1)).loss, expected)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_it_is_not_saved_within_an_effective_batch(tmp_path: Path) -> None:
    _, step = alone_step(accumulate=2)
    step(batch(0, 1))
    with pytest.raises(ValueError, match="within an effective batch, after 1 of 2 calls"):
        RunState(step).state_dict()


def test_a_state_of_a_run_that_was_built_otherwise_is_refused() -> None:
    _, step = alone_step()
    state = RunState(step).state_dict()
    model, other = alone_step(schedules=False)
    with torch.no_grad():
        before = [parameter.mul_(2).clone() for parameter in model.parameters()]
    with pytest.raises(ValueError, match="the state has 1 schedulers, this TrainStep 0"):
        RunState(other).load_state_dict(state)
    assert all(map(torch.equal, before, model.parameters()))


def test_an_optimizer_that_levers_changed_is_refused() -> None:
    model = MAKERS["GPT-2"]().train()
    step = TrainStep(model, LowBitOptimizer(torch.optim.AdamW(model.parameters())))
    with pytest.raises(ValueError, match="the state of LowBitOptimizer cannot be divided among ranks"):
        RunState(step)
