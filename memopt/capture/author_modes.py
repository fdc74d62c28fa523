"""The modes under which the author's code runs: those that the model sets itself, and the caller's autocast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from memopt.compat.fakes import FakeTensorMode, failing_on_fakes
from memopt.compat.host import HOST
from memopt.compat.operators import (
    RunningBy,
    autocast_kernel,
    composite_kernel,
    plain_tensors,
    schema_of,
    tree_leaves,
    tree_map,
    without_torch_functions,
)
from memopt.compat.tensors import is_view, storage_key
from memopt.device.devices import DEVICES, device_of
from passes.graphs.op_kinds import DATA

aten = torch.ops.aten


class Untraceable(Exception):
    """Raised where a region cannot be traced as an operator graph without changing what it computes. Dynamo's graph is
    then used in its place, and no passes rewrite it. The message is the reason, as a clause that can follow "since"."""


class AuthorModes:
    """Applies the grad mode and autocast of the model's code to each operator before a tracer records it, so that the
    trace shows their effects as operators.

    Under `no_grad` the operator gets detached arguments. Under autocast the dispatcher's own autocast kernel runs, and
    the tracer records its casts and its calls; a composite operator is decomposed if autocast changes what it computes.
    As with autocast's cache, all uses of a weight share one cast, which determines the dtype in which its gradients are
    summed. Operators on CPU tensors are cast by the autocast rules of the device type `planned_for`, if one is given.
    """

    def __init__(self, mode: FakeTensorMode, planned_for: str = "") -> None:
        self.mode, self.planned_for = mode, planned_for
        self.authored: list[torch.autocast] = []
        """The open autocast blocks of the model itself, outermost first."""
        self._enclosed = autocast_blocks() > 0
        self._caching = [torch.is_autocast_cache_enabled()]
        self._casts: dict[tuple[int, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}
        self._detached: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._in_kernel = False

    def enter_autocast(
        self, device: str, dtype: torch.dtype | None = None, enabled: bool = True, cache: bool | None = None
    ) -> None:
        """Open an autocast block of the model; the arguments are those of `torch.autocast`."""
        block = torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache)
        with without_torch_functions():
            block.__enter__()  # type: ignore[no-untyped-call]
        self.authored.append(block)
        self._caching.append(self._caching[0] if cache is None else cache)

    def leave_autocast(self) -> None:
        """Close the model's innermost autocast block."""
        with without_torch_functions():
            self.authored.pop().__exit__(None, None, None)
        self._caching.pop()
        if not self.authored and not self._enclosed:
            self._casts.clear()

    def see(self, trace: Callable[..., Any], within: Any, func: Any, args: Any, kwargs: Any) -> Any:
        """Handle the call of the operator `func` and return its result. `trace(func, args, kwargs)` records a call in
        the graph. Autocast's kernels run under the context manager `within`, in which each operator that they call
        comes to this method again."""
        if not torch.is_grad_enabled():
            args, kwargs = self._without_gradients(trace, func, args, kwargs)
        device = _autocast_device(args, kwargs)
        if device is None:
            return self._cached_cast(trace, func, args, kwargs) if self._in_kernel else trace(func, args, kwargs)
        if device == HOST.type and self.planned_for not in ("", device):
            kernel = device_of(self.planned_for).autocast_kernel(func, torch.get_autocast_dtype(device))
            return trace(func, args, kwargs) if kernel is None else self._within(within, kernel, args, kwargs)
        kernel = autocast_kernel(func, device)
        if kernel is None:
            kernel = composite_kernel(func)
            if kernel is None or not self._autocast_changes(func, device, args, kwargs):
                return trace(func, args, kwargs)
        return self._within(within, kernel, args, kwargs)

    def _within(self, within: Any, kernel: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a kernel under the context `within` and return its result."""
        outer, self._in_kernel = self._in_kernel, True
        try:
            with within:
                return kernel(*args, **kwargs)
        finally:
            self._in_kernel = outer

    def _cached_cast(self, trace: Callable[..., Any], func: Any, args: Any, kwargs: Any) -> Any:
        """Trace a call made inside an autocast kernel. If it casts a weight that was cast to the same dtype before,
        return that cast from the cache instead."""
        if func is not aten.to.dtype or not self._caching[-1] or not _is_weight(args[0]):
            return trace(func, args, kwargs)
        weight, dtype = args[0], args[1]
        if (id(weight), dtype) not in self._casts:
            self._casts[id(weight), dtype] = (weight, trace(func, args, kwargs))
        return self._casts[id(weight), dtype][1]

    def _without_gradients(self, trace: Callable[..., Any], func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of a call under `no_grad`, with every tensor that requires a gradient detached. Raises
        `Untraceable` where the call writes into such a tensor."""
        if func in (aten.detach.default, DATA):
            return args, kwargs
        for argument, value in zip(schema_of(func).arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._check_write(func, value)

        def detach(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.requires_grad:
                return value
            if id(value) not in self._detached:
                self._detached[id(value)] = (value, trace(aten.detach.default, (value,), {}))
            return self._detached[id(value)][1]

        return tree_map(detach, args), tree_map(detach, kwargs)

    def _check_write(self, func: Any, written: Any) -> None:
        """Raise `Untraceable` where `func` would write into a tensor that requires a gradient or that shares storage
        with a detached one."""
        kept = {storage_key(value) for value, _ in self._detached.values()}
        for value in tree_leaves(written):
            if isinstance(value, torch.Tensor) and (value.requires_grad or storage_key(value) in kept):
                raise Untraceable(f"{func} writes under no_grad into a value that requires a gradient")

    def _autocast_changes(self, func: Any, device: str, args: Any, kwargs: Any) -> bool:
        """Whether autocast changes what a composite operator computes: it does if the composite makes other calls, or
        the same calls on other dtypes. A composite that fails without autocast, because only the casts give its
        operands one dtype, counts as changed."""

        def calls(*, enabled: bool) -> list[tuple[Any, ...]]:
            seen: list[tuple[Any, ...]] = []

            def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
                leaves = tree_leaves((args, kwargs))
                seen.append((func, *(leaf.dtype for leaf in leaves if isinstance(leaf, torch.Tensor))))
                return func(*args, **kwargs)

            with plain_tensors(), without_torch_functions(), self.mode, torch.no_grad(), RunningBy(run):
                given = tree_map(lambda one: one.detach() if isinstance(one, torch.Tensor) else one, (args, kwargs))
                dtype = torch.get_autocast_dtype(device)
                with torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False):
                    func(*given[0], **given[1])
            return seen

        with_casts = calls(enabled=True)
        try:
            with failing_on_fakes():
                return with_casts != calls(enabled=False)
        except RuntimeError:
            return True


def autocast_is_on() -> bool:
    """Whether autocast is active for any device."""
    return any(map(torch.is_autocast_enabled, DEVICES))


def autocast_blocks() -> int:
    """The number of `torch.autocast` blocks that this thread is in, those that switch it off included."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _autocast_device(args: Any, kwargs: Any) -> str | None:
    """The type of the device whose autocast applies to a call; None where none does."""
    on = [device for device in reversed(DEVICES) if torch.is_autocast_enabled(device)]
    if not on:
        return None
    types = {leaf.device.type for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
    return next((device for device in on if device in types), None)


def _is_weight(value: torch.Tensor) -> bool:
    """Whether autocast's cache takes a tensor: an fp32 leaf that requires a gradient and is not a view."""
    return value.is_leaf and value.requires_grad and value.dtype == torch.float32 and not is_view(value)


_ATTENTION = {
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
    SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
    SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled,
}


def attention_kernels() -> tuple[SDPBackend, ...]:
    """The kernels that `scaled_dot_product_attention` may choose from now."""
    return tuple([kernel for kernel, is_allowed in _ATTENTION.items() if is_allowed()])  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class CallerModes:
    """The modes of the caller's code that decide which operators run, and that memopt must keep itself, since Dynamo
    has no guards on them or they end before the backward: autocast, and the kernels that attention may use."""

    types: tuple[tuple[str, torch.dtype], ...]
    """The device types for which autocast is on, each with its dtype."""
    cached: bool
    """Whether casts of weights are kept until the outermost autocast block ends."""
    within: bool = False
    """Whether the code is in an autocast block, even one that switches autocast off."""
    attention: tuple[SDPBackend, ...] = ()
    """The kernels that `scaled_dot_product_attention` may choose from (`torch.nn.attention.sdpa_kernel`)."""

    @classmethod
    def now(cls) -> CallerModes:
        """The modes of this thread now."""
        on = (device for device in DEVICES if torch.is_autocast_enabled(device))
        types = tuple((device, torch.get_autocast_dtype(device)) for device in on)
        return cls(types, torch.is_autocast_cache_enabled(), autocast_blocks() > 0, attention_kernels())

    @contextmanager
    def restored(self) -> Iterator[None]:
        """A context in which these modes are set in place of the present ones."""
        present = CallerModes.now()
        wanted, given = dict(self.types), dict(present.types)
        with ExitStack() as blocks:
            for device in DEVICES:
                if present.cached != self.cached or wanted.get(device) != given.get(device):
                    how: Any = {"dtype": wanted.get(device), "enabled": device in wanted}
                    blocks.enter_context(torch.autocast(device, **how, cache_enabled=self.cached))
            if self.within and not autocast_blocks():
                blocks.enter_context(torch.autocast(HOST.type, enabled=False))
            if self.attention != present.attention:
                blocks.enter_context(sdpa_kernel(list(self.attention)))
            yield
