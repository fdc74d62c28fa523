"""Optimisers as people write them: with attributes, compiled helpers, and ways that torch's own do not take."""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn, optim


@torch.compile(dynamic=False, fullgraph=True)
def adamw_of_one(p: Any, grad: Any, mean: Any, square: Any, step: Any, rate: Any) -> None:
    """One parameter's step, with all numbers as tensors so that nothing is compiled again."""
    mean.lerp_(grad, 1 - 0.9)
    square.lerp_(grad.square(), 1 - 0.95)
    p.sub_(rate * (mean / (1 - 0.9**step)) / ((square / (1 - 0.95**step)).sqrt() + 1e-8))


@torch.compile(dynamic=False, fullgraph=True)
def orthogonal(stacked: torch.Tensor) -> torch.Tensor:
    """Newton and Schulz's iterations, in bf16."""
    x = stacked.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-6)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x


class MuonAdamW(optim.Optimizer):
    """Matrices by shape in one stacked step, all else by AdamW; its numbers are tensors made in `__init__`."""

    def __init__(self, parameters: Any) -> None:
        parameters = list(parameters)
        rest = [p for p in parameters if p.dim() != 2]
        shapes = dict.fromkeys(p.shape for p in parameters if p.dim() == 2)
        groups = [{"params": rest, "lr": 0.01, "kind": "adamw"}] if rest else []
        groups += [
            {"params": [p for p in parameters if p.shape == shape], "lr": 0.01, "kind": "muon"} for shape in shapes
        ]
        super().__init__(groups, {})
        self._numbers = {"step": torch.tensor(0.0), "rate": torch.tensor(0.0)}

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self._numbers["rate"].fill_(group["lr"])
            getattr(self, f"_{group['kind']}")([p for p in group["params"] if p.grad is not None])

    def _adamw(self, params: list[Any]) -> None:
        for p in params:
            state = self.state[p]
            if not state:
                state.update(step=0, mean=torch.zeros_like(p), square=torch.zeros_like(p))
            state["step"] += 1
            self._numbers["step"].fill_(state["step"])
            adamw_of_one(p, p.grad, state["mean"], state["square"], self._numbers["step"], self._numbers["rate"])

    def _muon(self, params: list[Any]) -> None:
        if not params:
            return
        state = self.state[params[0]]
        if not state:
            state["momentum"] = torch.zeros(len(params), *params[0].shape)
        gradients, values = torch.stack([p.grad for p in params]), torch.stack(params)
        state["momentum"].lerp_(gradients, 0.05)
        values.sub_(self._numbers["rate"] * orthogonal(gradients.lerp_(state["momentum"], 0.95)))
        torch._foreach_copy_(params, list(values.unbind(0)))


class SAM(optim.Optimizer):
    """Foret et al. 2021 around another optimiser, whose groups it shares."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"rho": 0.05})
        self.base = optim.SGD(self.param_groups, lr=0.01, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is not None, "needs a closure"
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.norm(torch.stack([p.grad.norm() for p in parameters]))
        for p in parameters:
            self.state[p]["old"] = p.data.clone()
            p.add_(p.grad * (0.05 / (norm + 1e-12)))
        self.zero_grad()
        torch.enable_grad()(closure)()
        for p in parameters:
            p.data = self.state[p]["old"]
        self.base.step()


class Lookahead(optim.Optimizer):
    """A wrapper that is never initialised as an optimiser, and shares what it wraps."""

    def __init__(self, parameters: Any) -> None:
        self.inner = optim.AdamW(parameters)
        self.param_groups, self.defaults, self.state = self.inner.param_groups, {}, self.inner.state
        self.slow, self.taken = [[p.detach().clone() for p in group["params"]] for group in self.param_groups], 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.taken += 1
        for group, slow in zip(self.param_groups, self.slow, strict=True):
            for p, behind in zip(group["params"], slow, strict=True):
                behind.lerp_(p, 0.5)
                p.copy_(behind)


class Sophia(optim.Optimizer):
    """Branches on numbers of tensors, and knows its parameters by their `id`."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.numbers = {id(p): number for group in self.param_groups for number, p in enumerate(group["params"])}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is None or self.numbers[id(p)] < 0:
                continue
            state = self.state[p]
            if not state:
                state.update(step=torch.tensor(0.0), mean=torch.zeros_like(p), hessian=torch.zeros_like(p))
            state["step"] += 1
            state["mean"].lerp_(p.grad, 0.1)
            if state["step"].item() % 10 == 1:
                state["hessian"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
            ratio = (state["mean"].abs() / (20 * state["hessian"] + 1e-15)).clamp(None, 1)
            if ratio.max().item() > 0:
                p.addcmul_(state["mean"].sign(), ratio, value=-1e-4)


class Slotted(optim.Optimizer):
    """Its state is in a slot, by parameter, and its step in a partial of a method."""

    __slots__ = ("momenta", "update")

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.momenta: dict[Any, torch.Tensor] = {}
        self.update = partial(self._update, rate=1e-3)

    def _update(self, p: Any, rate: float) -> None:
        if p not in self.momenta:
            self.momenta[p] = torch.zeros_like(p)
        self.momenta[p].lerp_(p.grad, 0.1)
        p.sub_(self.momenta[p] * rate)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                self.update(p)


def patched(parameters: Any) -> optim.Optimizer:
    """One whose step is replaced, below a scheduler."""
    optimizer = optim.SGD(parameters, lr=0.01, momentum=0.9)
    own = optimizer.step

    def step(self: Any, *args: Any) -> Any:
        self.steps = getattr(self, "steps", 0) + 1
        return own(*args)

    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
    optim.lr_scheduler.StepLR(optimizer, 10)
    return optimizer


class InNumpy(optim.Optimizer):
    """Computes outside of torch, where nothing can be tried."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                state = self.state[p]
                state.setdefault("mean", torch.zeros_like(p)).add_(torch.from_numpy(0.1 * p.grad.numpy()))
                p.sub_(state["mean"], alpha=1e-3)


class UntilSmall(optim.Optimizer):
    """Ends a loop by a value."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                length = mean.norm()
                while length.item() > 1e-3:
                    length = length / 2
                p.sub_(mean * length)


TRIED: dict[str, Callable[[Any], optim.Optimizer]] = {
    "muon-adamw": MuonAdamW,
    "sam": SAM,
    "lookahead": Lookahead,
    "sophia": Sophia,
    "slotted": Slotted,
    "patched": patched,
}
GUESSED: dict[str, Callable[[Any], optim.Optimizer]] = {
    "in-numpy": lambda parameters: InNumpy(parameters, {}),
    "until-small": lambda parameters: UntilSmall(parameters, {}),
}


def closure_for(optimizer: optim.Optimizer, closure: Callable[[], Any]) -> tuple[Any, ...]:
    """The arguments of a step: the closure for those that need one."""
    return (closure,) if isinstance(optimizer, SAM) else ()


def parameters() -> list[nn.Parameter]:
    shapes = [(256, 128)] * 6 + [(128,)] * 6 + [(128, 256)] * 3
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]
