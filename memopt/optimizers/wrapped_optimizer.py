"""An optimiser around another: it shares the inner one's groups and state, and saves and loads them."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

import torch
from torch import optim

State = dict[str, Any]


class WrappedOptimizer(optim.Optimizer):
    """Shares the groups and the state of `inner`, so that schedulers of either work and training goes on from the state
    that `inner` has. Do not step `inner` by itself any more.

    `state_dict` is that of `inner`, with values in the form in which they are kept, and a further key "proposal".
    """

    title: ClassVar[str]
    """Its name in errors and in `state_dict`."""
    fields: ClassVar[tuple[str, ...]] = ("inner",)
    """Attributes that copies and pickles have beside those of any optimiser."""
    keeps_form: ClassVar[bool] = False
    """Whether values are kept in the form that `inner` has, so that state dicts of either can be loaded into both."""

    def __init__(self, inner: optim.Optimizer) -> None:
        check_inner(inner, self.title)
        self.inner = inner
        super().__init__(inner.param_groups, inner.defaults)
        self.param_groups, self.state = inner.param_groups, inner.state

    def room_for(self, parameter: torch.Tensor, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A new tensor in the shape of `tensor`, on the device where state of `parameter` is kept."""
        return torch.empty_like(tensor, dtype=dtype, device=self.home(parameter), requires_grad=False)

    def extra_state(self) -> dict[str, Any]:
        """The value of "proposal" in `state_dict`, of plain values and tensors."""
        inner = self.inner.extra_state() if isinstance(self.inner, WrappedOptimizer) else {}
        return inner if self.keeps_form else {"title": self.title, "inner": inner}

    def load_extra_state(self, saved: dict[str, Any] | None) -> None:
        """Restore what `extra_state` returned.

        Raises `ValueError` for that of another kind of optimiser, before anything is changed.
        """
        title = saved.get("title") if saved else None
        wanted = None if self.keeps_form else self.title
        inner = self.inner if isinstance(self.inner, WrappedOptimizer) else None
        if title != wanted and not (self.keeps_form and inner is not None):
            had = f"the proposal {title!r}" if title else "a plain optimizer"
            raise ValueError(
                f"the state is of {had}, this optimizer is of {self.title!r}; build it as it was, or load the state of "
                "a plain optimizer before it is wrapped"
            )
        if inner is not None:
            inner.load_extra_state(saved if self.keeps_form or saved is None else saved["inner"])

    def state_dict(self) -> dict[str, Any]:
        """Groups and state as of any optimiser, and "proposal"; tensors are not copied."""
        return {**super().state_dict(), "proposal": self.extra_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state, whose tensors are copied in their own dtypes.

        Raises `ValueError` where it is not of an optimiser built as this one.
        """
        saved = {key: value for key, value in state_dict.items() if key != "proposal"}
        _check_groups(saved, self)
        self.load_extra_state(state_dict.get("proposal"))
        super().load_state_dict({**saved, "state": {}})
        _share_groups(self)
        numbers = (number for group in saved["param_groups"] for number in group["params"])
        self.state = self.inner.state
        self.state.clear()
        for group in self.param_groups:
            for parameter in group["params"]:
                values = saved["state"].get(next(numbers), {})
                if values:
                    self.state[parameter] = {k: self._placed(group, parameter, v) for k, v in values.items()}

    def _placed(self, group: dict[str, Any], parameter: torch.Tensor, value: Any) -> Any:
        """A copy of a loaded value on the device where this optimiser keeps it."""
        if not isinstance(value, torch.Tensor):
            return value
        if is_per_element(value, parameter):
            return self.room_for(parameter, parameter, value.dtype).copy_(value)
        if value.dim():
            return self.room_for(parameter, value, value.dtype).copy_(value)
        on_device = group.get("capturable") or group.get("fused")
        return value.detach().to(self.stepped_on(parameter) if on_device else value.device, copy=True)

    def home(self, parameter: torch.Tensor) -> torch.device:
        """The device on which the state of a parameter is kept."""
        return parameter.device

    def stepped_on(self, parameter: torch.Tensor) -> torch.device:
        """The device on which `inner` steps the parameter."""
        return parameter.device

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self.fields}}


def is_per_element(value: Any, parameter: torch.Tensor) -> bool:
    """Whether a value of a parameter's state is a tensor of the parameter's shape."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == parameter.shape


def check_inner(inner: Any, title: str) -> None:
    """Raise `TypeError` or `ValueError` for an optimiser that cannot be stepped parameter by parameter."""
    if not isinstance(inner, optim.Optimizer):
        raise TypeError(f"{title} wraps a torch.optim.Optimizer, not {inner!r}")
    closure = inspect.signature(type(inner).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(inner).__name__} evaluates the model inside its step (a closure), so {title} cannot step it "
            "parameter by parameter; use another optimizer"
        )
    if isinstance(inner, optim.SparseAdam):
        raise ValueError(f"SparseAdam takes sparse gradients only, which {title} cannot step; use Adam")


def refuse_closure(closure: Any, title: str) -> None:
    """Raise `ValueError` for a closure."""
    if closure is not None:
        raise ValueError(f"{title} steps without a closure; call backward() first, then step()")


def _share_groups(optimizer: WrappedOptimizer) -> None:
    """Give all inner optimisers the groups of this one."""
    inner = optimizer.inner
    inner.param_groups = optimizer.param_groups
    if isinstance(inner, WrappedOptimizer):
        _share_groups(inner)


def _check_groups(saved: dict[str, Any], optimizer: optim.Optimizer) -> None:
    """Raise `ValueError` where a saved state has other numbers of parameters in its groups."""
    sizes = [len(group["params"]) for group in saved["param_groups"]]
    own = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != own:
        raise ValueError(f"the state is of groups of {sizes} parameters, this optimizer has {own}; build it as it was")
