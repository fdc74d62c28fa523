"""Parameters, models and measurements for the tests of the proposals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim

from examples.models.families import integers, library
from memopt.device.devices import hardware
from memopt.levers import Lever
from memopt.levers.optimizer_levers import (
    BF16_PARAMETERS,
    LOW_BIT_OPTIMIZER,
    OFFLOAD_OPTIMIZER,
    OPTIMIZER_IN_BACKWARD,
    PricedLevers,
    TrainingFacts,
    apply_levers,
)
from memopt.meter import measure_peak, resident_cpu_blocks
from tests.train.pieces import GPT2

MB = 1024**2

# One of each of torch's that steps each parameter by itself, and one that looks at shapes.
OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "adamw": optim.AdamW,
    "adam-amsgrad": partial(optim.Adam, amsgrad=True, weight_decay=0.1),
    "adamw-fused": partial(optim.AdamW, fused=True),
    "sgd": partial(optim.SGD, lr=1e-2),
    "sgd-momentum": partial(optim.SGD, lr=1e-2, momentum=0.9, nesterov=True),
    "rmsprop": optim.RMSprop,
    "adagrad": optim.Adagrad,
    "nadam": optim.NAdam,
    "radam": optim.RAdam,
    "rprop": optim.Rprop,
    "asgd": optim.ASGD,
    "adafactor": optim.Adafactor,
}

# 21 MB of parameters.
large_gpt2 = library(
    "GPT2", "GPT2LMHeadModel", "ForCausalLM", vocab_size=8192, n_positions=64, n_embd=256, n_layer=4, n_head=4,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False,
)  # fmt: skip

small_gpt2 = library(
    "GPT2", "GPT2LMHeadModel", "ForCausalLM", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **GPT2
)  # fmt: skip


def text(vocabulary: int = 61, samples: int = 4, length: int = 16, seed: int = 1) -> dict[str, Tensor]:
    tokens = integers(vocabulary, samples, length, seed=seed)
    return {"input_ids": tokens, "labels": tokens}


def some_parameters(seed: int = 0) -> list[nn.Parameter]:
    """Parameters of odd shapes; one has the strides of a channels-last weight."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((37, 53), (101,), (8, 3, 5, 5), (1,), ())
    made = [torch.randn(shape, generator=generator) for shape in shapes]
    made[2] = made[2].to(memory_format=torch.channels_last)
    return [nn.Parameter(parameter) for parameter in made]


def gradients_for(parameters: Sequence[Tensor], step: int) -> list[Tensor]:
    """The same at each step number, whole in bfloat16."""
    generator = torch.Generator().manual_seed(1000 + step)
    return [torch.randn(parameter.shape, generator=generator).bfloat16().float() for parameter in parameters]


def train(
    optimizer: optim.Optimizer, parameters: Sequence[nn.Parameter], steps: Iterable[int], scheduler: Any = None
) -> None:
    """Step on given gradients."""
    for step in steps:
        for parameter, gradient in zip(parameters, gradients_for(parameters, step), strict=True):
            # In the parameter's order of memory, as autograd makes them: fused kernels of the CPU go by memory alone.
            parameter.grad = torch.empty_like(parameter).detach().copy_(gradient)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def values(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in parameters]


def same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


def saved_and_loaded(state: dict[str, Any], path: Any) -> dict[str, Any]:
    """Through a file, as a checkpoint goes."""
    torch.save(state, path)
    return torch.load(path, weights_only=True)


@dataclass(frozen=True)
class Choice:
    """Levers on the optimiser; by default none."""

    bf16_parameters: bool = False
    low_bit_optimizer: bool = False
    offload_optimizer: bool = False
    optimizer_in_backward: bool = False

    @property
    def levers(self) -> tuple[Lever, ...]:
        chosen = (
            self.bf16_parameters and BF16_PARAMETERS,
            self.low_bit_optimizer and LOW_BIT_OPTIMIZER,
            self.offload_optimizer and OFFLOAD_OPTIMIZER,
            self.optimizer_in_backward and OPTIMIZER_IN_BACKWARD,
        )
        return tuple(lever for lever in chosen if isinstance(lever, Lever))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(lever.name for lever in self.levers)

    def apply(self, model: nn.Module, optimizer: optim.Optimizer) -> optim.Optimizer:
        return apply_levers(self.levers, model, optimizer)


def priced(parameters: Iterable[Tensor], optimizer: Any, device: str, choice: Choice) -> PricedLevers:
    """The last lever of a choice, on a device of the table."""
    facts = TrainingFacts(tuple(parameters), optimizer, hardware(device))
    return PricedLevers.of(facts, choice.levers).each[-1]


def measured_step(build: Callable[[], tuple[optim.Optimizer, Sequence[nn.Parameter]]], steps: int = 2) -> int:
    """Bytes held on the CPU at the worst moment of the first steps: parameters, gradients, state, temporaries."""
    before = sum(resident_cpu_blocks().values())
    optimizer, parameters = build()
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.grad = torch.randn_like(parameter)
    peaks = []
    for _ in range(steps):
        with measure_peak("cpu") as peak:
            optimizer.step()
        peaks.append(peak.bytes - before)
    return max(peaks)


def tells(predicted: int, measured: int) -> bool:
    """Never under, and over by at most 2%."""
    return measured <= predicted <= 1.02 * measured


def losses(model: nn.Module, optimizer: optim.Optimizer, batch: Any, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found
