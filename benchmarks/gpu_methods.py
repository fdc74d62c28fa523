"""The ways to train that `benchmarks.gpu` sets side by side: what people use today, and memopt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import memopt
from benchmarks.gpu_models import Candidate
from memopt.account.account import distinct_bytes

BUDGETS = (0.8, 0.6, 0.4, 0.2, 0.0)
_PRODUCTS = {
    torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default,
    torch.ops.aten.convolution.default,
}  # fmt: skip


@dataclass(frozen=True)
class Method:
    """A way to train: `prepare` changes the model in place, `settings` are in force while it trains, and each forward
    runs within `autocast`: one for all steps would keep its casts of the first step's weights."""

    name: str
    prepare: Callable[[nn.Module, Candidate], Any]
    activation_memory_budget: float | None = None
    memopt: bool = False

    def autocast(self, device: str) -> torch.autocast:
        """The context of one forward: the peers' autocast in bf16 on a GPU; memopt chooses dtypes itself."""
        return torch.autocast(device, torch.bfloat16, enabled=device == "cuda" and not self.memopt)

    @contextmanager
    def settings(self) -> Iterator[None]:
        """The settings of torch while the model trains."""
        share = self.activation_memory_budget
        patched = nullcontext() if share is None else functorch_config.patch(activation_memory_budget=share)
        with patched:
            yield


def peers(*, small: bool) -> tuple[Method, ...]:
    """Return recipes by hand and by torch: eager, checkpointed, compiled, compiled within an activation budget."""
    return (
        Method("eager", lambda model, candidate: None),
        Method("eager, per block", per_block),
        Method("eager, every second product", partial(per_block, selective=True)),
        Method("compile", lambda model, candidate: model.compile()),
        Method("compile, per block", _both(per_block)),
        Method("compile, every second product", _both(partial(per_block, selective=True))),
        *(
            Method(f"compile, budget {share}", lambda model, candidate: model.compile(), share)
            for share in (BUDGETS[::4] if small else BUDGETS)
        ),
    )


def within(budget_gb: float, backend: str, precision: str) -> Method:
    """Return the method that trains by memopt within a budget."""

    def prepare(model: nn.Module, candidate: Candidate) -> None:
        memopt.optimize(model, budget_gb, precision=precision, backend=backend, optimizer=adamw(model))

    return Method(f"memopt ({backend})", prepare, memopt=True)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of every method: fused kernels on a GPU."""
    on_gpu = next(model.parameters()).device.type == "cuda"
    return torch.optim.AdamW(model.parameters(), fused=on_gpu)


def lasting_bytes(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Mapping[str, Any]) -> int:
    """The bytes of parameters, buffers, the optimizer's state and the batch: what lasts from step to step."""
    state = [one for values in optimizer.state.values() for one in values.values() if isinstance(one, torch.Tensor)]
    return distinct_bytes([*model.parameters(), *model.buffers(), *state, *batch.values()])


def per_block(model: nn.Module, candidate: Candidate, *, selective: bool = False) -> None:
    """Checkpoint each block; with `selective` every second matrix product in it is saved."""
    options: dict[str, Any] = {"use_reentrant": False}
    if selective:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _every_second())
    blocks = [module for module in model.modules() if type(module).__name__ == candidate.block]
    assert blocks, f"{candidate.name} has no {candidate.block}"
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, **options)  # type: ignore[method-assign]


def _every_second() -> Callable[..., CheckpointPolicy]:
    numbers = {False: count(), True: count()}

    def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if operator in _PRODUCTS and next(numbers[context.is_recompute]) % 2:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _both(prepare: Callable[..., None]) -> Callable[[nn.Module, Candidate], None]:
    def prepared(model: nn.Module, candidate: Candidate) -> None:
        prepare(model, candidate)
        model.compile()

    return prepared
