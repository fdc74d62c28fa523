"""A wrapper that shares an optimizer's groups and state, and runs its code on one piece of a parameter at a time."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import optim

from memopt.device.op_call import fills

# Elements of a piece: kernels on them take longer than their launch, and a float32 copy is 8 MB.
PIECE_ELEMENTS = 2**21

# torch's optimizers that treat each element by itself, so that a tensor may be stepped in pieces.
_ELEMENTWISE = (
    optim.Adadelta, optim.Adagrad, optim.Adam, optim.Adamax, optim.AdamW, optim.ASGD, optim.NAdam, optim.RAdam,
    optim.RMSprop, optim.Rprop, optim.SGD,
)  # fmt: skip

State = dict[str, Any]

Span = tuple[slice, int]
"""A range of the elements of an array, and the number of its elements."""


@dataclass(frozen=True)
class Slice:
    """A part of a parameter and of all tensors of its shape: elements `start` to `stop` in memory order, or the whole
    tensor in its shape (`flat=False`), for optimizers that use the shape."""

    start: int
    stop: int
    flat: bool
    first: bool
    last: bool

    @property
    def whole(self) -> bool:
        """Whether this is the only piece of its parameter."""
        return self.first and self.last

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view of this piece of `tensor`."""
        return flat(tensor)[self.start : self.stop] if self.flat else tensor.detach()


def pieces_of(parameter: torch.Tensor, *, elementwise: bool) -> Iterator[Slice]:
    """The pieces of a parameter, to be stepped one after the other; one piece unless `elementwise`."""
    elements = parameter.numel()
    if not (elementwise and parameter.dim() and is_dense(parameter)):
        yield Slice(0, elements, flat=False, first=True, last=True)
        return
    starts = range(0, max(elements - PIECE_ELEMENTS, 0) + 1, PIECE_ELEMENTS)  # the last takes the rest: none is small
    for start in starts:
        stop = elements if start == starts[-1] else start + PIECE_ELEMENTS
        yield Slice(start, stop, flat=True, first=start == 0, last=stop == elements)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A view of all elements of a dense tensor, in memory order."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a contiguous range of memory without gaps or overlaps, in any order of dimensions."""
    return fills(sorted(zip(tensor.stride(), tensor.shape, strict=True)))


def like(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """`tensor` with the strides of `parameter`: itself where it has them, else a copy."""
    if tensor.stride() == parameter.stride():
        return tensor
    return torch.empty_like(parameter, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


class Parameterwise(optim.Optimizer):
    """Wraps the optimizer `inner` and runs its code parameter by parameter. Do not call `inner.step()` any more.

    It shares the groups and the state of `inner`, so that schedulers of either work and training goes on from the state
    that `inner` has. `state_dict` is that of `inner`, with values in the form in which this optimizer stores them, and
    a further key "proposal", which says what kind of optimizer saved it; `load_state_dict` refuses another kind's.

    Subclasses define in which form parameters and state are stored between steps: `_open` converts them for `inner`,
    and `_close…` methods convert them back."""

    title: ClassVar[str]
    """The name in errors and in `state_dict`, which is also the lever's."""
    fields: ClassVar[tuple[str, ...]] = ("inner",)
    """Attributes that copies and pickles have beside those of any optimizer."""
    keeps_form: ClassVar[bool] = False
    """Whether values are kept in the form in which `inner` has them, so that both can load each other's state dicts."""

    def __init__(self, inner: optim.Optimizer) -> None:
        check_inner(inner, self.title)
        self.inner = inner
        super().__init__(inner.param_groups, inner.defaults)
        self.param_groups, self.state = inner.param_groups, inner.state

    def room_for(self, parameter: torch.Tensor, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A new, uninitialised tensor of `dtype` like `tensor`, on the device that has the state of `parameter`."""
        return torch.empty_like(tensor, dtype=dtype, device=parameter.device, requires_grad=False)

    def extra_state(self) -> dict[str, Any]:
        """The entry "proposal" of `state_dict`, plain values and tensors: the kind of this optimizer, by which
        `load_extra_state` recognises it, and what a subclass saves beside the groups and the state."""
        inner = self.inner.extra_state() if isinstance(self.inner, Parameterwise) else {}
        return inner if self.keeps_form else {"title": self.title, "inner": inner}

    def load_extra_state(self, saved: dict[str, Any] | None) -> None:
        """Restore what `extra_state` returned. Raises `ValueError`, before anything is changed, where that was another
        kind of optimizer's."""
        title = saved.get("title") if saved else None
        wanted = None if self.keeps_form else self.title
        inner = self.inner if isinstance(self.inner, Parameterwise) else None
        if title != wanted and not (self.keeps_form and inner is not None):
            had = f"an optimizer with the lever {title!r}" if title else "a plain optimizer"
            mend = "wrap the optimizer with the same levers" if title else "load it before memopt.wrap_optimizer"
            raise ValueError(f"the state was saved by {had}, and this optimizer has the lever {self.title!r}; {mend}")
        if inner is not None:
            inner.load_extra_state(saved if self.keeps_form or saved is None else saved["inner"])

    def state_dict(self) -> dict[str, Any]:
        """Groups and state as in any state dict, and `extra_state` under "proposal". Tensors are not copied."""
        return {**super().state_dict(), "proposal": self.extra_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state dict; its tensors are copied, and keep their dtypes. Raises `ValueError` where its groups
        have other numbers of parameters, or it is of another kind of optimizer."""
        saved = {key: value for key, value in state_dict.items() if key != "proposal"}
        sizes, own = (
            [len(group["params"]) for group in groups] for groups in (saved["param_groups"], self.param_groups)
        )
        if sizes != own:
            raise ValueError(
                f"the state has parameter groups of {sizes} parameters, this optimizer of {own}; build the optimizer "
                "as it was at saving"
            )
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
        """A copy of a loaded value on the device where this optimizer keeps it."""
        if not isinstance(value, torch.Tensor):
            return value
        if value.dim():
            shaped_like = parameter if is_per_element(value, parameter) else value
            return self.room_for(parameter, shaped_like, value.dtype).copy_(value)
        on_device = group.get("capturable") or group.get("fused")
        return value.detach().to(parameter.device if on_device else value.device, copy=True)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self.fields}}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient. Raises `ValueError` for a closure."""
        refuse_closure(closure, self.title)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.step_parameter(group, parameter)

    def step_parameter(self, group: dict[str, Any], parameter: torch.Tensor) -> None:
        """Step one parameter, which has a gradient, by its group's options. Raises `ValueError` if that is sparse."""
        assert parameter.grad is not None
        if parameter.grad.layout != torch.strided:
            raise ValueError(
                f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse, which {self.title} cannot "
                "step; build its module with sparse=False"
            )
        state, gradient = self.state[parameter], like(parameter.grad, parameter)
        known = frozenset(state)  # state that the first piece makes has no values for the others yet
        for piece in pieces_of(parameter, elementwise=goes_in_pieces(self.inner)):
            tensor = self._open(parameter, piece)
            tensor.grad = self._open(gradient, piece)
            given = self._take(parameter, {key: state[key] for key in state if key in known}, piece)
            after = step_one(self.inner, group, tensor, dict(given))
            tensor.grad = None
            self._give(parameter, state, piece, given, after)
            self._close(parameter, piece, tensor)
            del tensor, given, after  # freed before the next piece

    def _open(self, kept: torch.Tensor, piece: Slice) -> torch.Tensor:
        """The tensor that `inner` gets for a piece of a parameter, of its gradient, or of a state tensor like it."""
        return piece.of(kept)

    def _close(self, parameter: torch.Tensor, piece: Slice, tensor: torch.Tensor) -> None:
        """Write `tensor`, which `_open` returned for a piece and `inner` has stepped, back into the parameter."""

    def _take(self, parameter: torch.Tensor, state: State, piece: Slice) -> State:
        """The state of a piece, in the form that `inner` expects."""
        given = {}
        for key, value in state.items():
            span = self._inner_span(key, parameter, piece)
            if is_per_element(value, parameter):
                given[key] = self._open(value, piece)
            elif span is not None:
                given[key] = value[span[0]]
            else:
                # Of another shape, like the step number, which every piece increases: all but the last get a copy.
                given[key] = value.clone() if isinstance(value, torch.Tensor) and not piece.last else value
        return given

    def _give(self, parameter: torch.Tensor, state: State, piece: Slice, given: State, after: State) -> None:
        """Keep the state of a piece as `inner` left it (`after`); `given` is what `_take` returned before."""
        shape = piece.of(parameter).shape
        for key, value in after.items():
            span = self._inner_span(key, parameter, piece)
            if isinstance(value, torch.Tensor) and value.dim() and value.shape == shape:
                self._close_state(parameter, state, key, piece, value, value is given.get(key))
            elif span is not None:
                if key not in state:
                    whole = torch.empty(span[1], dtype=value.dtype, device="meta")
                    state[key] = self.room_for(parameter, whole, value.dtype)
                self._close_part(state[key][span[0]], value, value is given.get(key))
            elif piece.last:
                state[key] = self._close_other(parameter, state.get(key), value)

    def _close_state(
        self, parameter: torch.Tensor, state: State, key: str, piece: Slice, value: torch.Tensor, in_place: bool
    ) -> None:
        """Keep `value` as a piece's part of the state tensor `key`, which has the parameter's shape. `in_place` says
        that it is the tensor that `_open` returned, which `inner` has written to."""
        if in_place:
            return
        if piece.whole:
            state[key] = value.as_strided(parameter.shape, parameter.stride()) if piece.flat else value
            return
        if not is_per_element(state.get(key), parameter):
            state[key] = self.room_for(parameter, parameter, value.dtype)
        piece.of(state[key]).copy_(value)

    def _close_part(self, kept: torch.Tensor, value: torch.Tensor, in_place: bool) -> None:
        """Write `value`, a piece's part of a state tensor that has another shape than the parameter, into `kept`.
        `in_place` says that `value` is the tensor that `_take` returned."""
        if not in_place:
            kept.copy_(value)

    def _close_other(self, parameter: torch.Tensor, kept: Any, value: Any) -> Any:
        """The value to keep in the state in place of `value`, which has another shape than the parameter and is not
        divided into pieces; `kept` is the one kept before."""
        return value

    def span(self, key: str, parameter: torch.Tensor, piece: Slice) -> Span | None:
        """The elements of the state tensor `key`, whose shape differs from the parameter's, that belong to a piece of
        the parameter; None where that tensor is not divided into pieces."""
        return self._inner_span(key, parameter, piece)

    def _inner_span(self, key: str, parameter: torch.Tensor, piece: Slice) -> Span | None:
        inner = self.inner if isinstance(self.inner, Parameterwise) else None
        return inner.span(key, parameter, piece) if inner is not None and not piece.whole else None


def step_one(
    optimizer: optim.Optimizer, options: Mapping[str, Any], tensor: torch.Tensor, state: dict[str, Any]
) -> dict[str, Any]:
    """Step `tensor`, which has a gradient, by the code of `optimizer` with a group's `options` and the tensor's
    `state`, whose tensors may be written to. Returns the state after the step; groups and state of the optimizer are
    not changed. Raises `ValueError` for an optimizer whose step changes its group's options, since all parameters share
    these."""
    groups, states = optimizer.param_groups, optimizer.state
    own = {key: value for key, value in options.items() if key not in ("params", "param_names")}
    alone = {**own, "params": [tensor]}
    optimizer.param_groups = [alone]
    optimizer.state = defaultdict(dict, {tensor: state})
    try:
        optimizer.step()
        found: dict[str, Any] = optimizer.state[tensor]
    finally:
        optimizer.param_groups, optimizer.state = groups, states
    changed = [key for key, value in alone.items() if key != "params" and _differs(value, own.get(key))]
    if changed:
        raise ValueError(
            f"{type(optimizer).__name__} changes the option {changed[0]!r} of its parameter group in each step, so "
            "that its parameters cannot be stepped one by one; use an optimizer that keeps such values in the state of "
            "each parameter"
        )
    return found


def _differs(value: Any, before: Any) -> bool:
    if value is before or isinstance(value, torch.Tensor):
        return value is not before
    return bool(value != before)


def goes_in_pieces(optimizer: optim.Optimizer) -> bool:
    """Whether the innermost optimizer can step a tensor piece by piece: it is one of torch's that treat each element
    alone, and no subclass of these."""
    return goes_in_pieces(optimizer.inner) if isinstance(optimizer, Parameterwise) else type(optimizer) in _ELEMENTWISE


def is_per_element(value: Any, parameter: torch.Tensor) -> bool:
    """Whether a value of a parameter's state is a tensor of the parameter's shape."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == parameter.shape


def check_inner(inner: Any, title: str) -> None:
    """Raise `TypeError` where `inner` is not an optimizer, and `ValueError` where it cannot be stepped parameter by
    parameter: it needs a closure, or takes sparse gradients only. `title` is the wrapper's name in the message."""
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
    """Raise `ValueError` if a closure is given to `step`; `title` names the optimizer in the message."""
    if closure is not None:
        raise ValueError(f"{title} steps without a closure; call backward() first, then step()")


def _share_groups(optimizer: Parameterwise) -> None:
    """Give the groups of `optimizer` to all optimizers inside it."""
    inner = optimizer.inner
    inner.param_groups = optimizer.param_groups
    if isinstance(inner, Parameterwise):
        _share_groups(inner)
