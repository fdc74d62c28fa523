"""Makes traced graphs compute as eager mode does: with its kernels, which torch replaces by Python functions that give
other bits while it traces, and with the masks that transformers chooses by values. In eager mode it makes no mask that
would mask nothing: attention then runs by another kernel, which is given `is_causal`, and keys that heads share are not
repeated for each head. While Dynamo traces, it makes the mask always."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from operator import add, getitem
from types import FunctionType, ModuleType
from typing import Any, TypeGuard

import torch
from torch import fx
from torch._C import DispatchKey
from torch._decomp.decompositions import upsample_compute_output_size

from memopt.compat.fakes import FakeTensor, know_resizing_gradients
from memopt.compat.host import HOST, is_on_host
from memopt.compat.operators import plain_tensors, tree_leaves, without_torch_functions
from memopt.compat.symbols import is_symbolic
from passes.compat import private, replaced_all

# transformers 4.56 and later.
PRIVATE_NAMES = private("""
    torch._ops: OpOverload.py_kernels? ._dispatch_cache? ._op_dk?
    torch._C: DispatchKey _dispatch_get_all_op_names _get_mkldnn_enabled _set_mkldnn_enabled
    torch._inductor.config: fallback_random
    torch._decomp.decompositions: upsample_compute_output_size
    transformers.masking_utils: find_packed_sequence_indices(position_ids)? _ignore_causal_mask_sdpa?
        _ignore_bidirectional_mask_sdpa?
    transformers.utils.output_capturing: maybe_install_capturing_hooks(model)?
    torch._dynamo.comptime: comptime ComptimeContext._i_will_not_complain_if_bc_breaks_InstructionTranslator
    torch._dynamo.eval_frame: skip_code
    torch._dynamo.variables: ConstantVariable.create
""")

aten = torch.ops.aten

_KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
# Eager batch normalisation writes its running statistics without saying so, which a trace would lose.
_KEPT = ("batch_norm",)
_SAMPLE = 65_537
"""The number of values on which a product is tried: every significand of 16-bit numbers many times."""
_PART = 4_096
"""The number of values that are tried at once: the first step's budget has little room for them."""


@contextmanager
def eager_kernels() -> Iterator[None]:
    """Context in which operators are differentiated by eager mode's kernels, on symbolic sizes where these take them.
    Torch replaces some (`upsample_bilinear2d`, `matmul`, `lstm`, `dropout`) while it traces by Python functions that
    sum or round in another order and may hold more memory."""
    know_resizing_gradients()
    replaced = {(operator, key): operator.py_kernels[key] for operator, key in _replaced_operators()}
    for (operator, key), python in replaced.items():
        _set_kernel(operator, key, _eager_kernel(operator, key, python))
    try:
        yield
    finally:
        for (operator, key), python in replaced.items():
            _set_kernel(operator, key, python)


def dead_draws_kept() -> AbstractContextManager[None]:
    """Context in which random operators without readers stay in traced graphs, since they advance the generator: torch
    reads inductor's setting `fallback_random` while it traces, whatever the backend."""
    import torch._inductor.config as inductor_config

    return inductor_config.patch(fallback_random=True)


def _set_kernel(operator: Any, key: DispatchKey, kernel: Callable[..., Any]) -> None:
    operator.py_kernels[key] = kernel
    operator._dispatch_cache.clear()


@functools.cache
def _replaced_operators() -> tuple[tuple[Any, DispatchKey], ...]:
    """The ATen operators that eager mode runs by a kernel and that torch replaces by Python functions while it traces,
    each with the dispatch key under which such a function is registered."""
    found: list[tuple[Any, DispatchKey]] = []
    for name in torch._C._dispatch_get_all_op_names():
        library, _, overload = name.partition("::")
        base, _, variant = overload.partition(".")
        if library != "aten" or any(kept in base for kept in _KEPT) or variant == "out":
            continue
        operator = getattr(getattr(aten, base), variant or "default", None)
        kernels = getattr(operator, "py_kernels", {})
        if DispatchKey.Autograd in kernels or operator is aten.matmul.default:
            found += [(operator, key) for key in _KEYS if key in kernels]
    return tuple(found)


def _eager_kernel(operator: Any, key: DispatchKey, python: Callable[..., Any]) -> Callable[..., Any]:
    """A function for the dispatch key `key` that runs an operator as eager mode does. With symbolic sizes that eager
    mode's kernel does not take, it runs `python`, torch's replacement."""
    if operator is aten.dropout.default:
        return _dropout

    # oneDNN's LSTM saves a workspace whose size only a run tells, and must not run on made-up values.
    by_cells = operator.overloadpacket is aten.lstm
    resizes = "upsample" in operator.__name__

    def eager(*args: Any, **kwargs: Any) -> Any:
        if not by_cells and any(map(is_symbolic, tree_leaves((args, kwargs)))):
            if not resizes:
                return python(*args, **kwargs)
            if operator._overloadname == "vec":
                return _resized(operator.overloadpacket.default, *args)
        ours = operator.py_kernels.pop(key)
        operator._dispatch_cache.clear()
        try:
            with _without_onednn() if by_cells else nullcontext():
                return operator(*args, **kwargs)
        finally:
            _set_kernel(operator, key, ours)

    return eager


def _resized(operator: Any, value: torch.Tensor, sizes: Any, *settings: Any) -> torch.Tensor:
    """The result of a resizing operator, whose kernel takes symbols, given the arguments of its overload `vec`: either
    `sizes` or the scales, which are last in `settings`, is None."""
    *aligned, scales = settings
    if sizes is None:
        sizes = upsample_compute_output_size(value.shape, None, scales)  # type: ignore[no-untyped-call]
    return operator(value, sizes, *aligned, *(scales or ()))


@contextmanager
def _without_onednn() -> Iterator[None]:
    """Context in which composite operators do not choose oneDNN's kernels. It uses a private setting, since setting the
    public flags warns where there is no card."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def _dropout(value: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Dropout with the bits of eager mode, also on symbolic sizes, which saves a mask of one byte for each element."""
    empty = not is_symbolic(value) and value.numel() == 0
    if train and 0 < p < 1 and is_on_host(value) and value.dtype.is_floating_point and not empty:
        return _Dropout.apply(value, p)  # type: ignore[no-untyped-call]
    return aten.dropout.default._op_dk(DispatchKey.CompositeImplicitAutograd, value, p, train)


class _Dropout(torch.autograd.Function):
    """Dropout that multiplies the elements it keeps by `1 / (1 - p)`, rounded to the dtype of the value, as eager mode
    does on a CPU. `native_dropout` and its backward are called where they give the same products."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, p: float) -> torch.Tensor:
        result, kept = aten.native_dropout(value, p, True)
        if not _rounds_alike(p, value.dtype)[0]:
            result = value * _noise(kept, p, value.dtype)
        ctx.save_for_backward(kept)
        ctx.p = p
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (kept,) = ctx.saved_tensors
        (grad,) = grads
        if _rounds_alike(ctx.p, grad.dtype)[1]:
            return aten.native_dropout_backward(grad, kept, 1 / (1 - ctx.p)), None
        return grad * _noise(kept, ctx.p, grad.dtype), None


def _noise(kept: torch.Tensor, p: float, dtype: torch.dtype) -> torch.Tensor:
    return kept.to(dtype).div(1 - p)


@functools.lru_cache(maxsize=64)
def _rounds_alike(p: float, dtype: torch.dtype) -> tuple[bool, bool]:
    """Whether `native_dropout`, and whether its backward, give the products of eager mode's dropout."""
    forward = backward = True
    with plain_tensors(), without_torch_functions(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        for first in range(0, _SAMPLE, _PART):
            numbers = torch.arange(first, min(first + _PART, _SAMPLE), dtype=torch.float64, device=HOST)
            values = (1 + numbers / (_SAMPLE - 1)).to(dtype)
            result, kept = torch.native_dropout(values, p, True)
            expected = values * _noise(kept, p, dtype)
            forward &= torch.equal(expected, result)
            backward &= torch.equal(expected, aten.native_dropout_backward(values, kept, 1 / (1 - p)))
    return forward, backward


_CHOOSING = "transformers.masking_utils", "transformers.utils.import_utils", "transformers.utils.output_capturing"
"""The modules of transformers whose functions decide otherwise where Dynamo traces them."""
_SAME_VALUES = {"expand", "to", "long", "bool", "contiguous"}
_IDLE = ContextVar[torch.Tensor | None]("a mask that masks nothing, or position ids of one sequence in each row")


@contextmanager
def eager_mask_branches(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Context in which transformers, traced by Dynamo, decides about masks as it would for these arguments in eager
    mode: a mask that masks nothing is left out. Dynamo guards on these decisions. Hooks that collect hidden states,
    attentions and the logits of routers are installed as in eager mode, too."""
    masking, asking, collecting = map(sys.modules.get, _CHOOSING)
    for choosing in filter(None, (masking, asking)):
        _run_frames_eagerly(choosing)
    idle = _idle_mask(args, kwargs)
    changes: list[tuple[ModuleType | None, str, Callable[..., Any]]] = [
        (masking, "find_packed_sequence_indices", _finding_packed),
        (collecting, "maybe_install_capturing_hooks", _installing_while_traced),
    ]
    if idle is not None:
        changes += [(masking, f"_ignore_{kind}_mask_sdpa", _unless_idle) for kind in ("causal", "bidirectional")]
    there = [
        (module, name, change(own))
        for module, name, change in changes
        if (own := getattr(module, name, None)) is not None
    ]
    token = _IDLE.set(idle)
    try:
        with replaced_all(there):
            yield
    finally:
        _IDLE.reset(token)


@functools.cache
def _run_frames_eagerly(module: ModuleType) -> None:
    """Have Dynamo trace the functions of a module only where traced code calls them. Where a forward with graph breaks
    calls them outside of any graph, they run as in the eager model and choose by values."""
    from torch._dynamo.eval_frame import skip_code

    for function in vars(module).values():
        while isinstance(function, FunctionType) and function.__module__ == module.__name__:
            skip_code(function.__code__)
            function = getattr(function, "__wrapped__", None)


def _idle_mask(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The attention mask among a call's arguments if it masks nothing; without a mask, its position ids if each row of
    them is one sequence. Eager mode makes no mask of either. None for all other calls."""
    for named in (kwargs, *(value for value in args if isinstance(value, Mapping))):
        mask, positions = named.get("attention_mask"), named.get("position_ids")
        if _has_values(mask):
            return mask if _is_ones(mask) else None
        if _has_values(positions):
            return positions if (positions.diff(dim=-1) == 1).all() else None
    return None


def _is_ones(mask: torch.Tensor) -> bool:
    """Whether all values of a mask are one, and so remain true in any dtype; true for an empty one."""
    if mask.numel() == 0:
        return True
    least, most = mask.aminmax()
    return bool((least == 1) & (most == 1))


def _has_values(value: Any) -> TypeGuard[torch.Tensor]:
    known = isinstance(value, torch.Tensor) and not value.is_meta and type(value) is not FakeTensor
    return known and value.dim() == 2


@functools.lru_cache(maxsize=8)
def _unless_idle(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function of transformers whose first argument is a mask: it gets None there if Dynamo traces it with the
    call's mask, or positions, that mask nothing."""
    from torch._dynamo.comptime import comptime
    from torch._dynamo.eval_frame import skip_code

    def unless_idle(mask: Any, *others: Any, **named: Any) -> Any:
        is_idle = False
        comptime(_note_idle)
        return original(None if is_idle else mask, *others, **named)

    skip_code(unless_idle.__code__)
    return unless_idle


@functools.lru_cache(maxsize=2)
def _finding_packed(original: Callable[..., Any]) -> Callable[..., Any]:
    from torch._dynamo.comptime import comptime
    from torch._dynamo.eval_frame import skip_code

    def find_packed_sequence_indices(position_ids: Any) -> Any:
        counts_up = False
        comptime(_note_counting)
        return None if counts_up else original(position_ids)

    skip_code(find_packed_sequence_indices.__code__)
    return find_packed_sequence_indices


@functools.lru_cache(maxsize=2)
def _installing_while_traced(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the function of transformers that installs, in the first forward which asks for hidden states, attentions
    or the logits of routers, the hooks that collect these. Traced by Dynamo, which would break the graph at its lock,
    it installs them while it is traced, before Dynamo comes to the modules that have them."""
    from torch._dynamo.comptime import comptime
    from torch._dynamo.eval_frame import skip_code

    def maybe_install_capturing_hooks(model: Any) -> None:
        comptime(install)
        if not torch.compiler.is_dynamo_compiling():
            original(model)

    def install(context: Any) -> None:
        traced = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
        original(traced.symbolic_locals["model"].realize().value)

    skip_code(maybe_install_capturing_hooks.__code__)
    return maybe_install_capturing_hooks


def _note_counting(context: Any) -> None:
    """Set the traced function's local variable `counts_up` to True if its positions are plainly 0, 1, 2 and so on, or
    those of the call that mask nothing."""
    node = _node_of(context, "position_ids")
    _note(context, "counts_up", _counts_up(node) or _is_idle(node))


def _note_idle(context: Any) -> None:
    """Set the traced function's local variable `is_idle` to True if its `mask` is the call's that masks nothing."""
    _note(context, "is_idle", _is_idle(_node_of(context, "mask")))


def _node_of(context: Any, name: str) -> fx.Node | None:
    """The node of Dynamo's graph whose value a local variable of the traced function has; None for a constant."""
    value = context.get_local(name)
    return None if value.is_python_constant() else value.as_proxy().node


def _note(context: Any, name: str, value: bool) -> None:
    from torch._dynamo.variables import ConstantVariable

    if value:
        traced = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
        traced.symbolic_locals[name] = ConstantVariable.create(True)


def _is_idle(node: fx.Node | None) -> bool:
    """Whether a value of Dynamo's graph is the mask, or the positions, that `_idle_mask` found, perhaps of another
    dtype or expanded."""
    while node is not None and node.op != "placeholder":
        tensors = [source for source in node.all_input_nodes if _is_tensor(source)]
        node = tensors[0] if len(tensors) == 1 and node.target in _SAME_VALUES else None
    idle = _IDLE.get()
    return node is not None and idle is not None and getattr(node.meta.get("grapharg"), "example", None) is idle


def _counts_up(node: fx.Node | None) -> bool:
    """Whether a value of Dynamo's graph is an `arange` with a step of one, perhaps shifted, or repeated in rows. True
    also for no value (None): models then make such positions themselves."""
    if node is None:
        return True
    while node.target is not torch.arange:
        tensors = [source for source in node.all_input_nodes if _is_tensor(source)]
        shifts = node.target in (add, torch.add)
        if len(tensors) != 1 or not (shifts or node.target in _SAME_VALUES or _adds_rows(node)):
            return False
        if node.meta["example_value"].dtype != torch.int64:
            return False
        (node,) = tensors
    return len(node.args) < 3 and "step" not in node.kwargs


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.Tensor)


def _adds_rows(node: fx.Node) -> bool:
    """Whether a call adds a dimension in front: `unsqueeze(0)`, `[None]`, `[None, :]`."""
    if node.target == "unsqueeze":
        return node.args[1:] == (0,)
    return node.target is getitem and node.args[1] in (None, (None,), (None, slice(None)))
