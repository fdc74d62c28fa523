"""The optimiser stepped within the backward: each gradient is used as soon as it is whole, and freed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import optim

from memopt.compat.autograd import post_accumulate_hooks
from memopt.optimizers.parameterwise import Parameterwise
from memopt.optimizers.wrapped_optimizer import refuse_closure


class OptimizerInBackward(Parameterwise):
    """Steps a parameter when the backward has its gradient, which is then freed: no two gradients need be held at once.

    Equal bit for bit to `inner` stepped after the backward, as far as that goes over its parameters one by one.
    `loss.backward()` trains; `step()` is still to be called after each, as schedulers ask for it, and steps what got
    its gradient otherwise. `state_dict` is that of `inner`.

    Autograd calls it for a parameter once the gradient is there. The backward of a captured call hands all gradients
    over at its end; one that is planned with this lever calls it inside, once nothing reads the parameter any more.

    What has to see all gradients before any is used is impossible, and refused where it is known: clipping by the
    norm of all, a `GradScaler`, several backwards for one step. A backward that fails half-way has stepped half.

    Args:
        inner: any optimiser that steps each parameter by itself, or a proposal's around one.
        max_grad_norm, scaler, accumulate: what the training step does to gradients, as for `memopt.TrainStep`.

    Raises:
        ValueError: where these are not None, None and 1; at the second backward before a `step()`.
    """

    title: ClassVar[str] = "optimizer_in_backward"
    keeps_form: ClassVar[bool] = True

    def __init__(
        self, inner: optim.Optimizer, *, max_grad_norm: float | None = None, scaler: Any = None, accumulate: int = 1
    ) -> None:
        refuse_what_needs_all_gradients(max_grad_norm, scaler, accumulate)
        self._forget_hooks()
        super().__init__(inner)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As of any optimiser; the group's parameters are stepped in the next backward."""
        super().add_param_group(param_group)
        number = len(self.param_groups) - 1
        for parameter in self.param_groups[-1]["params"]:
            if parameter.requires_grad:
                hook = SteppingHook(self, number)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """End the step: what still has a gradient (set by hand, or trained only lately) is stepped now."""
        refuse_closure(closure, self.title)
        super().step()
        self._stepped.clear()

    def detach(self) -> optim.Optimizer:
        """Step in backwards no more; returns the optimiser inside, with all that it has learned."""
        for handle in self._handles:
            handle.remove()
        self._forget_hooks()
        return self.inner

    def step_now(self, number: int, parameter: torch.Tensor) -> None:
        """Step a parameter of group `number` by its whole gradient, and free that.

        Raises `ValueError` where it has been stepped since the last `step()`.
        """
        if parameter.grad is None:  # autograd calls hooks where no gradient came, too
            return
        if id(parameter) in self._stepped:
            raise ValueError(
                "a second backward before optimizer.step(): with the optimizer in the backward, each backward is "
                "a whole step, and gradients cannot be accumulated; call step() after each, have the loss read "
                "parameters within the model's own call alone, or take another lever"
            )
        self._stepped.add(id(parameter))
        with torch.no_grad():
            self.step_parameter(self.param_groups[number], parameter)
        parameter.grad = None

    def _forget_hooks(self) -> None:
        self._handles: list[Any] = []
        self._stepped: set[int] = set()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy has no hooks: it steps in `step()`."""
        super().__setstate__(state)
        if "_handles" not in self.__dict__:
            self._forget_hooks()


@dataclass(frozen=True, eq=False)
class SteppingHook:
    """What autograd calls once a parameter's gradient is whole: its `OptimizerInBackward` steps it."""

    optimizer: OptimizerInBackward
    group: int

    def __call__(self, parameter: torch.Tensor) -> None:
        self.optimizer.step_now(self.group, parameter)


def stepping_hooks(parameter: torch.Tensor) -> list[SteppingHook]:
    """Those among the parameter's hooks; none where no optimiser steps it in the backward."""
    return [hook for hook in post_accumulate_hooks(parameter) if isinstance(hook, SteppingHook)]


def refuse_what_needs_all_gradients(
    max_grad_norm: float | None = None, scaler: Any = None, accumulate: int = 1
) -> None:
    """Raise `ValueError` for what an optimiser in the backward cannot do."""
    if max_grad_norm is not None:
        raise ValueError(
            f"max_grad_norm={max_grad_norm} needs the norm of all gradients before any is used, and with "
            "optimizer_in_backward each is used and freed at once; give max_grad_norm=None, or leave this lever out"
        )
    if scaler is not None and (not hasattr(scaler, "is_enabled") or scaler.is_enabled()):
        raise ValueError(
            "a GradScaler skips a step if any gradient is not finite, and with optimizer_in_backward others are used "
            "before that is known; train in bfloat16 without a scaler, or leave this lever out"
        )
    if accumulate != 1:
        raise ValueError(
            f"accumulate={accumulate} sums gradients over backwards, and with optimizer_in_backward each is used and "
            "freed at once; give accumulate=1, or leave this lever out"
        )
