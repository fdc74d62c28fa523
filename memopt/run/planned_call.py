"""What stands in for `model(…)` once the model is optimised: training calls as planned, all others as before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memopt.capture.inputs import as_call, check_device
from memopt.compat.modules import compiled_call, reset_compiled_call, set_compiled_call
from memopt.optimizers import Proposals
from memopt.planning.options import Options
from memopt.planning.plan import Plan
from memopt.run.training import TrainingCalls


class PlannedCall:
    """Takes the place of a module's call, where `torch.nn.Module.compile` puts its own: not part of the module's state,
    so copies and pickles of the model are plain models."""

    def __init__(self, model: nn.Module, options: Options) -> None:
        check_model(model)
        self.model, self.options = model, options
        self.own_call = _own_call(model)
        self.forward = TrainingCalls(model, options, None, self.own_call)
        self.with_loss = TrainingCalls(model, options, options.loss_fn, self.own_call) if options.loss_fn else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.trains():
            return self.forward.plain(*args, **kwargs)
        return self.forward(*args, **kwargs)

    def loss(self, inputs: Any, targets: Any) -> Any:
        """The loss of `(inputs, targets)`, model and loss function in one planned region."""
        assert self.with_loss is not None
        if self.trains():
            return self.with_loss(inputs, targets)
        return self.with_loss.plain(inputs, targets)

    def trains(self) -> bool:
        return torch.is_grad_enabled() and self.model.training and not torch.compiler.is_compiling()

    def plan(self, example_inputs: Any, *, gradients_held: bool = False, advise: bool = True) -> Plan:
        """Plan a training call ahead of its first run, on fakes; `gradients_held`: as one that adds to gradients;
        `advise`: have a refusal say what else would help.

        Raises `BudgetError`, `CaptureError`.
        """
        calls = self.with_loss or self.forward
        call = as_call(example_inputs, with_targets=self.with_loss is not None)
        check_device(call, self.model, meta_allowed=True)
        return calls.plan_ahead(call, gradients_held=gradients_held, advise=advise)

    def take_over(self) -> None:
        """Stand in for the model's call. Further plans count on what the one made by now has pulled, and on no more."""
        for calls in (self.forward, self.with_loss):
            if calls is not None:
                calls.planner.proposing.decide(self.latest.proposals if self.latest else ())
        set_compiled_call(self.model, self)

    def give_back(self) -> None:
        """Leave no trace in the model: what it was called through before, it is called through again."""
        if self.own_call is None:
            reset_compiled_call(self.model)
        else:
            set_compiled_call(self.model, self.own_call)

    @property
    def low(self) -> torch.dtype | None:
        """The 16-bit dtype that planned calls compute in; None where all is in fp32."""
        return self.forward.planner.rewriting.autocast

    @property
    def pulled(self) -> Proposals:
        """Proposals about the optimiser that plans count on."""
        return chosen.chosen if (chosen := self.forward.planner.proposing.pulled) else Proposals()

    @property
    def latest(self) -> Plan | None:
        """The plan of the latest training call."""
        return (self.with_loss.latest if self.with_loss else None) or self.forward.latest


def planned_call_of(model: nn.Module) -> PlannedCall | None:
    """What an optimised model is called through; None for a plain model."""
    call = compiled_call(model)
    return call if isinstance(call, PlannedCall) else None


def _own_call(model: nn.Module) -> Callable[..., Any] | None:
    """What the model is called through when it is plain: its `compile()`, if there was one."""
    planned = planned_call_of(model)
    return planned.own_call if planned is not None else compiled_call(model)


def check_model(model: nn.Module) -> None:
    """Raise `TypeError` or `ValueError` for what cannot be trained."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} has no trainable parameters, so there is no training step to plan; "
            "set requires_grad=True on those to train"
        )
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"the parameters of {type(model).__name__} lie on several devices ({names}); move them to one")
