"""An optimiser around another, which lets it step one parameter at a time on tensors made for the moment."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import optim

from memopt.proposals.one_parameter import Piece, is_elementwise, like, pieces_of, step_one

State = dict[str, Any]


@dataclass(frozen=True)
class Span:
    """Elements `start` to `stop` of an array with `whole` of them."""

    start: int
    stop: int
    whole: int


class Parameterwise(optim.Optimizer):
    """Steps by `inner`'s own code, parameter by parameter; subclasses say in what form values are kept in between.

    Groups and state are taken over from `inner`, so that learning rate schedulers of either work, and what `inner`
    has learned so far stays. `inner` is to be stepped no more by itself.

    `state_dict` is `inner`'s, with the kept forms, and "proposal" beside "state" and "param_groups".
    """

    title: ClassVar[str]
    """What it is called in errors and in `state_dict`."""
    own_keys: ClassVar[frozenset[str]] = frozenset()
    """Keys of a parameter's state that `inner` does not see."""
    fields: ClassVar[tuple[str, ...]] = ("inner",)
    """Attributes that copies and pickles have beside an optimiser's own."""
    keeps_form: ClassVar[bool] = False
    """Whether values are kept in the form that `inner` has them in, so that state dicts of either serve both."""

    def __init__(self, inner: optim.Optimizer) -> None:
        check_inner(inner, self.title)
        self.inner = inner
        super().__init__(inner.param_groups, inner.defaults)
        self.param_groups, self.state = inner.param_groups, inner.state

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
        if parameter.grad is None or parameter.grad.layout != torch.strided:
            raise ValueError(f"a gradient of layout {parameter.grad and parameter.grad.layout} cannot be stepped here")
        state, gradient = self.state[parameter], like(parameter.grad, parameter)
        known = frozenset(state)  # what the first piece makes is not yet the others'
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
        """The tensor that `inner` steps in the place of a piece of the parameter."""
        return piece.of(parameter)

    def _open_gradient(self, gradient: torch.Tensor, piece: Piece) -> torch.Tensor:
        return piece.of(gradient)

    def _close(self, parameter: torch.Tensor, piece: Piece, tensor: torch.Tensor) -> None:
        """Put what `inner` made of the tensor of `_open` back into the parameter."""

    def _take(self, parameter: torch.Tensor, state: State, piece: Piece) -> State:
        """The state of a piece, as `inner` is to have it."""
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
        """Keep the state of a piece."""
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
        """Keep `value`; `in_place` says that it is the very tensor of `_open_state`."""
        if in_place:
            return
        if piece.whole:
            state[key] = value.as_strided(parameter.shape, parameter.stride()) if piece.flat else value
            return
        if not is_per_element(state.get(key), parameter):
            state[key] = self.room_for(parameter, parameter, value.dtype)
        piece.of(state[key]).copy_(value)

    def _close_part(self, kept: torch.Tensor, value: torch.Tensor, in_place: bool) -> None:
        """Write a piece's part of an array; `in_place` says that it is the very tensor of `_take`."""
        if not in_place:
            kept.copy_(value)

    def _open_other(self, parameter: torch.Tensor, kept: Any, piece: Piece) -> Any:
        """What has no element for each of the parameter's: the number of the step, say, which each piece counts."""
        return kept.clone() if isinstance(kept, torch.Tensor) and not piece.last else kept

    def _close_other(self, parameter: torch.Tensor, kept: Any, value: Any) -> Any:
        """What to keep of such a value; `kept` is what was kept before."""
        return value

    def room_for(self, parameter: torch.Tensor, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A new tensor in the shape of `tensor`, where state of `parameter` is kept."""
        return torch.empty_like(tensor, dtype=dtype, device=self.home(parameter), requires_grad=False)

    def span(self, key: str, parameter: torch.Tensor, piece: Piece) -> Span | None:
        """What of an array of the state, of another shape than the parameter, is that of a piece; None for what has no
        parts."""
        return self._inner_span(key, parameter, piece)

    def _inner_span(self, key: str, parameter: torch.Tensor, piece: Piece) -> Span | None:
        inside = isinstance(self.inner, Parameterwise) and not piece.whole
        return self.inner.span(key, parameter, piece) if inside else None

    def extra_state(self) -> dict[str, Any]:
        """What goes into `state_dict` beside groups and state, as plain values and tensors."""
        inner = self.inner.extra_state() if isinstance(self.inner, Parameterwise) else {}
        return inner if self.keeps_form else {"title": self.title, "inner": inner}

    def load_extra_state(self, saved: dict[str, Any] | None) -> None:
        """Set what `extra_state` gave. Raises `ValueError` for that of another kind, before anything is changed."""
        title = saved.get("title") if saved else None
        wanted = None if self.keeps_form else self.title
        inner = self.inner if isinstance(self.inner, Parameterwise) else None
        if title != wanted and not (self.keeps_form and inner is not None):
            had = f"the proposal {title!r}" if title else "a plain optimizer"
            raise ValueError(
                f"the state is of {had}, this optimizer is of {self.title!r}; build it as it was, or load the state of "
                "a plain optimizer before it is wrapped"
            )
        if inner is not None:
            inner.load_extra_state(saved if self.keeps_form or saved is None else saved["inner"])

    def state_dict(self) -> dict[str, Any]:
        """Groups and state as of any optimiser, and "proposal"; tensors are the live ones."""
        return {**super().state_dict(), "proposal": self.extra_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from `state_dict`, whose tensors are copied, in the dtypes that they have.

        Raises `ValueError` where it is not of an optimiser built as this one.
        """
        saved = {key: value for key, value in state_dict.items() if key != "proposal"}
        _check_groups(saved, self)
        self.load_extra_state(state_dict.get("proposal"))
        super().load_state_dict({**saved, "state": {}})
        self.inner.param_groups = self.param_groups
        numbers = (number for group in saved["param_groups"] for number in group["params"])
        self.state = self.inner.state
        self.state.clear()
        for group in self.param_groups:
            for parameter in group["params"]:
                values = saved["state"].get(next(numbers), {})
                if values:
                    self.state[parameter] = {k: self._placed(group, parameter, v) for k, v in values.items()}

    def _placed(self, group: dict[str, Any], parameter: torch.Tensor, value: Any) -> Any:
        """A copy of a loaded value, where this optimiser keeps it."""
        if not isinstance(value, torch.Tensor):
            return value
        if is_per_element(value, parameter):
            return self.room_for(parameter, parameter, value.dtype).copy_(value)
        if value.dim():
            return self.room_for(parameter, value, value.dtype).copy_(value)
        on_device = group.get("capturable") or group.get("fused")
        return value.detach().to(self.stepped_on(parameter) if on_device else value.device, copy=True)

    def home(self, parameter: torch.Tensor) -> torch.device:
        """Where the state of a parameter is kept."""
        return parameter.device

    def stepped_on(self, parameter: torch.Tensor) -> torch.device:
        """Where `inner` steps the parameter."""
        return parameter.device

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self.fields}}


def goes_in_pieces(optimizer: optim.Optimizer) -> bool:
    """Whether a tensor may be stepped in pieces."""
    return goes_in_pieces(optimizer.inner) if isinstance(optimizer, Parameterwise) else is_elementwise(optimizer)


def is_per_element(value: Any, parameter: torch.Tensor) -> bool:
    """Whether a value of a parameter's state has an element for each of its own."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == parameter.shape


def check_inner(inner: Any, title: str) -> None:
    """Raise `TypeError` or `ValueError` for what cannot be stepped parameter by parameter."""
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
    if closure is not None:
        raise ValueError(f"{title} steps without a closure; call backward() first, then step()")


def _check_groups(saved: dict[str, Any], optimizer: optim.Optimizer) -> None:
    sizes = [len(group["params"]) for group in saved["param_groups"]]
    own = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != own:
        raise ValueError(f"the state is of groups of {sizes} parameters, this optimizer has {own}; build it as it was")
