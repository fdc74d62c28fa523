"""The session of an optimised model: training calls run as planned, all others as before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from memopt.capture.dynamo import is_capturing
from memopt.capture.inputs import Call, as_call, check_device
from memopt.compat import settled_gloo
from memopt.compat.ddp import unwrapped
from memopt.compat.dynamo import is_exporting
from memopt.compat.modules import compiled_call, inside_compiled, reset_compiled_call, set_compiled_call
from memopt.compat.resharding import Resharding
from memopt.levers import Lever
from memopt.planning.largest import estimated_bytes
from memopt.planning.options import Options
from memopt.planning.plan import Plan
from memopt.progress import stage
from memopt.run.data_parallel import DataParallel
from memopt.run.sharding import check_sharding
from memopt.run.status import State, Status
from memopt.run.tensor_parallel import check_terms
from memopt.run.training import TrainingCalls
from memopt.run.unplanned import UnplannedWatch


class Session:
    """Takes the place of a module's call where `torch.nn.Module.compile` puts its own. It is not part of the module's
    state, so copies and pickles of the model are plain models."""

    def __init__(self, model: nn.Module, options: Options) -> None:
        check_model(model)
        self.model, self.options = unwrapped(model), options
        self.own_call = _own_call(self.model)
        self.watch = UnplannedWatch(self.model, self)
        parallel = DataParallel(self.model, model if isinstance(model, DistributedDataParallel) else None)
        earlier = session_of(self.model)
        self.resharding: Resharding = earlier.resharding if earlier else Resharding(self.model)
        calls = partial(
            TrainingCalls,
            self.model,
            options,
            own_call=self.own_call,
            watch=self.watch,
            parallel=parallel,
            resharding=self.resharding,
        )
        self.forward = calls(None)
        check_terms(self.model, self.forward.planner.terms)
        self.with_loss = calls(options.loss_fn) if options.loss_fn else None
        self.uncompiled: Callable[..., Any] = self.forward
        self._loss_to_come: Callable[[Any], Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._loss_to_come is not None:
            loss, self._loss_to_come = self._loss_to_come, None
            return loss(*args)
        if not self.trains():
            return self._plain(self.forward, *args, **kwargs)
        if torch.compiler.is_compiling():
            return self.uncompiled(*args, **kwargs)
        return self.forward(*args, **kwargs)

    def loss(self, inputs: Any, targets: Any, model: nn.Module | None = None) -> Any:
        """The loss of `(inputs, targets)`, with model and loss function in one planned region, inside the forward of
        `model` if that is `DistributedDataParallel` around the planned model."""
        assert self.with_loss is not None
        if isinstance(model, DistributedDataParallel):
            self._loss_to_come = lambda moved: self.loss(moved, targets)
            try:
                return model(inputs)
            finally:
                self._loss_to_come = None
        if self.trains():
            return self.with_loss(inputs, targets)
        return self._plain(self.with_loss, inputs, targets)

    def trains(self) -> bool:
        """Whether a call now is a training call: gradients are enabled, the model is in training mode, and it is
        neither exported nor captured as a part of another planned model."""
        others = is_exporting() or is_capturing()
        return torch.is_grad_enabled() and self.model.training and not others

    def _plain(self, calls: TrainingCalls, *args: Any, **kwargs: Any) -> Any:
        """Run the plain model, freeing what it gathers; a backward through it in eval mode is noticed."""
        self.resharding.restore()
        if torch.is_grad_enabled() and not self.model.training and not torch.compiler.is_compiling():
            self.watch.begin()
        return calls.plain(*args, **kwargs)

    def plan(self, example_inputs: Any, *, gradients_held: bool = False, advise: bool = True) -> Plan:
        """Plan a training call before its first run, on fake tensors. `gradients_held`: as a call that adds to existing
        gradients; `advise`: a refusal suggests further changes.

        Raises `BudgetError`, `CaptureError`.
        """
        calls, call = self._ahead(example_inputs)
        with stage("planning"):
            return calls.plan_ahead(call, gradients_held=gradients_held, advise=advise)

    def estimated_bytes(self, example_inputs: Any) -> int:
        """About the smallest budget in bytes within which a training call can be planned, in a fraction of the time
        that its plan takes. Raises `CaptureError`."""
        calls, call = self._ahead(example_inputs)
        return estimated_bytes(calls.planner, call)

    def _ahead(self, example_inputs: Any) -> tuple[TrainingCalls, Call]:
        """The training calls that example inputs belong to, and the call that they stand for."""
        call = as_call(example_inputs, with_targets=self.with_loss is not None)
        check_device(call, self.model, meta_allowed=True)
        return self.with_loss or self.forward, call

    @contextmanager
    def from_captures(self, earlier: Session | None) -> Iterator[None]:
        """A block in which this call is planned from the graphs of an earlier one of the same model, if its options
        differ in the room that they leave a step alone; the earlier one has them back if the block fails."""
        if earlier is None or not self._differs_in_room(earlier):
            yield
            return
        self._take_captures(earlier)
        try:
            yield
        except BaseException:
            earlier._take_captures(self)
            raise

    def _differs_in_room(self, earlier: Session) -> bool:
        """Whether what was captured for an earlier call of the model serves this one: not where the optimiser's levers
        decide about its parameters, nor where other ranks take part."""
        alone = not (self.forward.parallel.wrapper or earlier.forward.parallel.wrapper or self.forward.sharded.there)
        proposes = self.options.optimizer_levers
        own = self.options
        budget, elsewhere, forwards = own.budget_bytes, own.elsewhere_bytes, own.forwards
        same = replace(earlier.options, budget_bytes=budget, elsewhere_bytes=elsewhere, forwards=forwards) == own
        return alone and not proposes and same and earlier.own_call is self.own_call

    def _take_captures(self, earlier: Session) -> None:
        self.forward.take_captures(earlier.forward)
        if self.with_loss and earlier.with_loss:
            self.with_loss.take_captures(earlier.with_loss)

    def take_over(self) -> None:
        """Replace the model's call. Further plans use exactly the proposals of the plan made so far, if any.

        Where torch.compile is asked to compile the call, its graph breaks there and the call runs as planned.
        """
        for calls in (self.forward, self.with_loss):
            if calls is not None:
                calls.planner.proposing.decide(self.latest.proposals if self.latest else ())
        reason = "memopt plans and compiles this training call itself, so that nothing needs to be compiled around it"
        disable: Any = torch.compiler.disable
        self.uncompiled = disable(self.forward.__call__, reason=reason)
        set_compiled_call(self.model, self)
        self.watch.begin()

    def give_back(self) -> None:
        """Restore the model's own call."""
        self.watch.end()
        self.resharding.restore()
        settled_gloo.leave(self.model)
        if self.own_call is None:
            reset_compiled_call(self.model)
        else:
            set_compiled_call(self.model, self.own_call)

    @property
    def status(self) -> Status:
        """The state of the model's training calls: of those with the loss function where there have been any."""
        with_loss = self.with_loss.status if self.with_loss else None
        return self.forward.status if with_loss is None or with_loss.state is State.NEW else with_loss

    @property
    def low(self) -> torch.dtype | None:
        """The 16-bit dtype that planned calls compute in; None where all is in fp32."""
        return self.forward.planner.terms.rewriting.autocast

    @property
    def chosen(self) -> tuple[Lever, ...]:
        """The chosen levers on the optimiser, on which plans are based, from the inside out."""
        chosen = self.forward.planner.proposing.chosen
        return chosen.levers if chosen else ()

    @property
    def latest(self) -> Plan | None:
        """The plan of the latest training call."""
        return (self.with_loss.latest if self.with_loss else None) or self.forward.latest

    @property
    def in_use(self) -> Plan | None:
        """The plan by which the latest training call ran; None where it ran plain. Nothing is planned to find it."""
        return (self.with_loss.in_use if self.with_loss else None) or self.forward.in_use


def session_of(model: nn.Module) -> Session | None:
    """The call that replaces an optimised model's own, inside `DistributedDataParallel` and the wrapper of
    `torch.compile` too; None for a plain model."""
    call = compiled_call(unwrapped(model)) if isinstance(model, nn.Module) else None
    if isinstance(call, Session):
        return call
    inner = inside_compiled(unwrapped(model)) if isinstance(model, nn.Module) else None
    return None if inner is None else session_of(inner)


def _own_call(model: nn.Module) -> Callable[..., Any] | None:
    """The model's `compile()`d call, if there is one, also while memopt replaces it."""
    planned = session_of(model)
    return planned.own_call if planned is not None else compiled_call(model)


def check_model(model: nn.Module) -> None:
    """Raise `TypeError` or `ValueError` for an object that cannot be trained as a model on one device."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} has no trainable parameters, so there is no training step to plan; "
            "set requires_grad=True on those to train"
        )
    check_sharding(model)
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"the parameters of {type(model).__name__} lie on several devices ({names}); move them to one")
