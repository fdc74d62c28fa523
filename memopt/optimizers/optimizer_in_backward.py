"""Steps the optimizer within the backward: each gradient is used as soon as it is complete, and freed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import optim

from memopt.compat.hooks import post_accumulate_hooks
from memopt.optimizers.parameterwise import Parameterwise, refuse_closure


class OptimizerInBackward(Parameterwise):
    """Steps a parameter as soon as the backward has its gradient, and frees the gradient, so that no two gradients need
    be alive at once.

    The result is bitwise that of `inner` stepping its parameters one by one after the backward. `loss.backward()`
    already updates parameters; call `step()` after each backward nevertheless: schedulers need it, and it steps
    parameters that got their gradients outside of a backward. `state_dict` is that of `inner`.

    Autograd calls a hook for a parameter once its gradient is complete. The backward of a captured call gives all
    gradients to autograd at its end; if it is planned with this lever, it calls the hook itself, as soon as nothing
    reads the parameter any more.

    Whatever needs all gradients before one is used is impossible: clipping by the total norm, a `GradScaler`, several
    backwards for one step. A backward that fails half-way has stepped some parameters.

    Args:
        inner: any optimizer that steps each parameter independently of the others, or a lever's wrapper of one.

    Raises:
        ValueError: at the second backward before a `step()`.
    """

    title: ClassVar[str] = "optimizer_in_backward"
    keeps_form: ClassVar[bool] = True

    def __init__(self, inner: optim.Optimizer) -> None:
        self._forget_hooks()
        super().__init__(inner)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as `Optimizer.add_param_group` does, to be stepped from the next backward on."""
        super().add_param_group(param_group)
        number = len(self.param_groups) - 1
        for parameter in self.param_groups[-1]["params"]:
            if parameter.requires_grad:
                hook = SteppingHook(self, number)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """End the training step. Parameters that still have a gradient are stepped now: they got it outside of a
        backward, or became trainable after the hooks were set."""
        refuse_closure(closure, self.title)
        super().step()
        self._stepped.clear()

    def detach(self) -> optim.Optimizer:
        """Remove the hooks from the parameters, and return the inner optimizer with its state."""
        for handle in self._handles:
            handle.remove()
        self._forget_hooks()
        return self.inner

    def step_now(self, number: int, parameter: torch.Tensor) -> None:
        """Step a parameter of group `number` by its gradient, and free the gradient. Raises `ValueError` where it has
        been stepped since the last `step()`."""
        if parameter.grad is None:  # autograd calls hooks also where there is no gradient
            return
        if id(parameter) in self._stepped:
            raise ValueError(
                "a parameter got a second gradient before optimizer.step(): with the optimizer in the backward, it has "
                "been stepped by the first one, and gradients cannot be accumulated. Call step() after each backward; "
                "where the loss also reads parameters outside of the model's call, read them in the model's forward; "
                "or leave 'optimizer_in_backward' out of allow"
            )
        self._stepped.add(id(parameter))
        with torch.no_grad():
            self.step_parameter(self.param_groups[number], parameter)
        parameter.grad = None

    def _forget_hooks(self) -> None:
        self._handles: list[Any] = []
        self._stepped: set[int] = set()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy or a pickle. It has no hooks, so that all its parameters are stepped in `step()`."""
        super().__setstate__(state)
        if "_handles" not in self.__dict__:
            self._forget_hooks()


@dataclass(frozen=True, eq=False)
class SteppingHook:
    """The hook that autograd calls once a parameter's gradient is complete: the optimizer steps the parameter."""

    optimizer: OptimizerInBackward
    group: int

    def __call__(self, parameter: torch.Tensor) -> None:
        self.optimizer.step_now(self.group, parameter)


def stepping_hooks(parameter: torch.Tensor) -> list[SteppingHook]:
    """The stepping hooks of a parameter; none where no optimizer steps it in the backward."""
    return [hook for hook in post_accumulate_hooks(parameter) if isinstance(hook, SteppingHook)]
