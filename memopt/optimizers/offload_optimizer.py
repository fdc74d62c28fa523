"""Optimiser state in the host's memory, copied to the device piece by piece, or stepped on the host."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, get_args

import torch
from torch import optim

from memopt.compat.host import HOST, is_on_host
from memopt.optimizers.one_parameter import Piece
from memopt.optimizers.parameterwise import Parameterwise
from memopt.optimizers.wrapped_optimizer import State

Where = Literal["device", "host"]


class OffloadedOptimizer(Parameterwise):
    """Keeps `inner`'s state in the host's memory, and steps one piece of a parameter at a time.

    `update` says where a piece is stepped:

    - "device": its state is copied to the device and back. The numbers are those of `inner` stepping parameters one by
      one.
    - "host": its gradient and parameter are copied to the host, and the parameter back. This moves fewer bytes where
      the state is larger than both; the host's arithmetic may round differently.

    Parameters in the host's memory are copied too, without use. Copies wait for each other. `state_dict` is that of
    `inner`; a state dict of a plain optimiser can be loaded, and goes to the host.

    Raises:
        TypeError, ValueError: for another `update`, an optimiser that needs a closure, or `update="host"` with
            `capturable=True`, which runs on a GPU only.
    """

    title: ClassVar[str] = "offload_optimizer"
    keeps_form: ClassVar[bool] = True
    fields: ClassVar[tuple[str, ...]] = ("inner", "update")

    def __init__(self, inner: optim.Optimizer, update: Where = "device") -> None:
        check_update(inner, update)
        super().__init__(inner)
        self.update = update
        for parameter, state in self.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and (value.dim() or update == "host"):
                    state[key] = self.room_for(parameter, value, value.dtype).copy_(value)

    def home(self, parameter: torch.Tensor) -> torch.device:
        return HOST

    def stepped_on(self, parameter: torch.Tensor) -> torch.device:
        return HOST if self.update == "host" else parameter.device

    def room_for(self, parameter: torch.Tensor, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        made = torch.empty_like(tensor, dtype=dtype, device=HOST, requires_grad=False)
        return made.pin_memory() if self.update == "device" and parameter.is_cuda else made

    def _open(self, parameter: torch.Tensor, piece: Piece) -> torch.Tensor:
        return piece.of(parameter) if self.update == "device" else _copy(piece.of(parameter), HOST)

    def _open_gradient(self, gradient: torch.Tensor, piece: Piece) -> torch.Tensor:
        return piece.of(gradient) if self.update == "device" else _copy(piece.of(gradient), HOST)

    def _close(self, parameter: torch.Tensor, piece: Piece, tensor: torch.Tensor) -> None:
        if self.update == "host":
            piece.of(parameter).copy_(tensor)

    def _take(self, parameter: torch.Tensor, state: State, piece: Piece) -> State:
        given = super()._take(parameter, state, piece)
        if self.update == "host":
            return given
        arrays = {key: value for key, value in given.items() if isinstance(value, torch.Tensor) and value.dim()}
        return {**given, **{key: _copy(value, parameter.device) for key, value in arrays.items()}}

    def _close_state(
        self, parameter: torch.Tensor, state: State, key: str, piece: Piece, value: torch.Tensor, in_place: bool
    ) -> None:
        if self.update == "host":
            super()._close_state(parameter, state, key, piece, value, in_place)
            return
        if key not in state:
            state[key] = self.room_for(parameter, parameter, value.dtype)
        piece.of(state[key]).copy_(value)

    def _close_part(self, kept: torch.Tensor, value: torch.Tensor, in_place: bool) -> None:
        super()._close_part(kept, value, in_place and self.update == "host")

    def _close_other(self, parameter: torch.Tensor, kept: Any, value: Any) -> Any:
        if self.update == "host" or not isinstance(value, torch.Tensor) or not value.dim():
            return value
        same = isinstance(kept, torch.Tensor) and kept.shape == value.shape and kept.dtype == value.dtype
        return (kept if same else self.room_for(parameter, value, value.dtype)).copy_(value)


def _copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on `device`: complete on the host, in stream order on a GPU."""
    # Pinned memory is next written by the copy back, which is queued behind this one.
    return tensor.to(device, copy=True, non_blocking=is_on_host(tensor) and tensor.is_pinned())


def check_update(optimizer: Any, update: Any) -> None:
    """Raise `ValueError` for another `update`, or an optimiser that cannot be stepped there."""
    if update not in get_args(Where):
        raise ValueError(f"update must be one of {', '.join(get_args(Where))}, not {update!r}")
    groups = optimizer.param_groups if isinstance(optimizer, optim.Optimizer) else []
    if update == "host" and any(group.get("capturable") for group in groups):
        raise ValueError(
            f"{type(optimizer).__name__} has capturable=True, which runs on a GPU only; make it without, or give "
            'update="device"'
        )
