"""An optimiser around another that has it step one piece of a parameter at a time, on temporary tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import optim

from memopt.optimizers.one_parameter import Piece, is_elementwise, like, pieces_of, step_one
from memopt.optimizers.wrapped_optimizer import State, WrappedOptimizer, is_per_element, refuse_closure


@dataclass(frozen=True)
class Span:
    """Elements `start` to `stop` of an array with `whole` of them."""

    start: int
    stop: int
    whole: int


class Parameterwise(WrappedOptimizer):
    """Steps by `inner`'s own code, parameter by parameter.

    Subclasses say in which form parameters and state are kept between steps: `_open…` methods convert them for `inner`,
    `_close…` methods convert them back.
    """

    own_keys: ClassVar[frozenset[str]] = frozenset()
    """Keys of a parameter's state that are hidden from `inner`."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient. Raises `ValueError` for a closure."""
        refuse_closure(closure, self.title)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.step_parameter(group, parameter)

    def step_parameter(self, group: dict[str, Any], parameter: torch.Tensor) -> None:
        """Step one parameter by the options of its group."""
        assert parameter.grad is not None
        if parameter.grad.layout != torch.strided:
            raise ValueError(
                f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse, which {self.title} cannot "
                "step; build its module with sparse=False"
            )
        state, gradient = self.state[parameter], like(parameter.grad, parameter)
        known = frozenset(state)  # state that the first piece makes has no values for the others yet
        for piece in pieces_of(parameter, elementwise=goes_in_pieces(self.inner)):
            self._step_piece(group, parameter, gradient, piece, known)

    def _step_piece(
        self,
        group: dict[str, Any],
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        piece: Piece,
        known: frozenset[str],
    ) -> None:
        state = self.state[parameter]
        tensor = self._open(parameter, piece)
        tensor.grad = self._open_gradient(gradient, piece)
        given = self._take(parameter, {key: state[key] for key in state if key in known}, piece)
        after = step_one(self.inner, group, tensor, dict(given))
        tensor.grad = None
        self._give(parameter, state, piece, given, after)
        self._close(parameter, piece, tensor)

    def _open(self, parameter: torch.Tensor, piece: Piece) -> torch.Tensor:
        """The tensor that `inner` steps instead of a piece of the parameter."""
        return piece.of(parameter)

    def _open_gradient(self, gradient: torch.Tensor, piece: Piece) -> torch.Tensor:
        return piece.of(gradient)

    def _close(self, parameter: torch.Tensor, piece: Piece, tensor: torch.Tensor) -> None:
        """Write the tensor of `_open`, as `inner` stepped it, back into the parameter."""

    def _take(self, parameter: torch.Tensor, state: State, piece: Piece) -> State:
        """The state of a piece, as `inner` expects it."""
        given = {}
        for key, value in state.items():
            if key in self.own_keys:
                continue
            span = self._inner_span(key, parameter, piece)
            if is_per_element(value, parameter):
                given[key] = self._open_state(key, value, piece)
            elif span is not None:
                given[key] = value[span.start : span.stop]
            else:
                given[key] = self._open_other(parameter, value, piece)
        return given

    def _give(self, parameter: torch.Tensor, state: State, piece: Piece, given: State, after: State) -> None:
        """Keep the state of a piece as it is `after` the step; `given` is what `_take` returned before."""
        shape = piece.of(parameter).shape
        for key, value in after.items():
            span = self._inner_span(key, parameter, piece)
            if isinstance(value, torch.Tensor) and value.dim() and value.shape == shape:
                self._close_state(parameter, state, key, piece, value, value is given.get(key))
            elif span is not None:
                if key not in state:
                    whole = torch.empty(span.whole, dtype=value.dtype, device="meta")
                    state[key] = self.room_for(parameter, whole, value.dtype)
                self._close_part(state[key][span.start : span.stop], value, value is given.get(key))
            elif piece.last:
                state[key] = self._close_other(parameter, state.get(key), value)

    def _open_state(self, key: str, kept: torch.Tensor, piece: Piece) -> torch.Tensor:
        return piece.of(kept)

    def _close_state(
        self, parameter: torch.Tensor, state: State, key: str, piece: Piece, value: torch.Tensor, in_place: bool
    ) -> None:
        """Keep `value` as a piece's part of a tensor with the parameter's shape; `in_place`: it is the tensor of
        `_open_state`."""
        if in_place:
            return
        if piece.whole:
            state[key] = value.as_strided(parameter.shape, parameter.stride()) if piece.flat else value
            return
        if not is_per_element(state.get(key), parameter):
            state[key] = self.room_for(parameter, parameter, value.dtype)
        piece.of(state[key]).copy_(value)

    def _close_part(self, kept: torch.Tensor, value: torch.Tensor, in_place: bool) -> None:
        """Write a piece's part of a tensor of another shape; `in_place`: `value` is the tensor of `_take`."""
        if not in_place:
            kept.copy_(value)

    def _open_other(self, parameter: torch.Tensor, kept: Any, piece: Piece) -> Any:
        """The value that a piece gets of a state value of another shape than the parameter, like the step number, which
        every piece increases."""
        return kept.clone() if isinstance(kept, torch.Tensor) and not piece.last else kept

    def _close_other(self, parameter: torch.Tensor, kept: Any, value: Any) -> Any:
        """The value to keep instead of such a `value`; `kept` is the one kept before."""
        return value

    def span(self, key: str, parameter: torch.Tensor, piece: Piece) -> Span | None:
        """The part of a state tensor of another shape than the parameter that belongs to a piece; None where it has no
        parts."""
        return self._inner_span(key, parameter, piece)

    def _inner_span(self, key: str, parameter: torch.Tensor, piece: Piece) -> Span | None:
        inner = self.inner if isinstance(self.inner, Parameterwise) else None
        return inner.span(key, parameter, piece) if inner is not None and not piece.whole else None


def goes_in_pieces(optimizer: optim.Optimizer) -> bool:
    """Whether the optimiser may step a tensor in pieces."""
    return goes_in_pieces(optimizer.inner) if isinstance(optimizer, Parameterwise) else is_elementwise(optimizer)
