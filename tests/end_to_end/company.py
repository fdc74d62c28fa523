"""Small models, steps and measurements for tests of training in company: with other models on the device, or with
several forwards before a backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import memopt

EXACT: dict[str, Any] = {"precision": "fp32", "allow": {"recompute", "reinplace"}}
ALL: dict[str, Any] = {**EXACT, "outputs": "all"}
GIB = 1024**3
Step = Callable[[], Tensor]


def gpt2(layers: int = 2, *, tied: bool = True, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=320, n_positions=64, n_embd=96, n_layer=layers, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        bos_token_id=0, eos_token_id=0, use_cache=False, tie_word_embeddings=tied,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    return model.train()


@dataclass
class Trained:
    """The losses of all steps that ran, the peaks of all steps in bytes, the refusals, and the parameters after."""

    losses: list[Tensor]
    peaks: list[int]
    refusals: list[str]
    parameters: list[Tensor]


def train(step: Step, model: nn.Module, steps: int = 3) -> Trained:
    """Run `steps` steps, each metered with everything on the device; a refused one is tried again."""
    done = Trained([], [], [], [])
    while len(done.losses) < steps:
        try:
            with memopt.measure_peak("cpu") as peak:
                done.losses.append(step())
        except memopt.BudgetError as refused:
            done.refusals.append(str(refused))
            assert len(done.refusals) < 3, done.refusals
        done.peaks.append(peak.bytes)
    done.parameters = [parameter.detach().clone() for parameter in model.parameters()]
    return done


def assert_same(trained: Trained, plain: Trained) -> None:
    assert all(map(torch.equal, trained.losses, plain.losses))
    assert all(map(torch.equal, trained.parameters, plain.parameters))


def assert_within(trained: Trained, budget_gb: float) -> None:
    assert max(trained.peaks) <= budget_gb * GIB, f"{[peak / GIB for peak in trained.peaks]} GB exceed {budget_gb}"


def middle(plan: memopt.Plan) -> float:
    return (plan.smallest_gb() + plan.plain_peak_gb) / 2


def bytes_of(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def tokens(seed: int, rows: int = 8) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return torch.randint(0, 320, (rows, 64))
