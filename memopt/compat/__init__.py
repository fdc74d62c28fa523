"""Every private torch name that memopt uses, in one place, with what torch 2.11 to 2.15 do about it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from enum import Enum
from itertools import chain
from pathlib import Path
from typing import Any

import sympy
import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
from torch import fx
from torch._C import DispatchKey
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.convert_frame import input_codes
from torch._dynamo.eval_frame import cached_backends
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.exc import FailOnRecompileLimitHit as RecompileLimit
from torch._dynamo.exc import TorchDynamoException as DynamoError
from torch._functorch.partitioners import _extract_fwd_bwd_modules
from torch._prims import rng_prims
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import profiler, profiler_legacy
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx, track_tensor_tree
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols, rebind_unbacked
from torch.fx.graph import _BoxedCodeGen
from torch.optim.optimizer import _foreach_supported_types
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

__all__ = [
    "LEGACY_PROFILER",
    "BackendCompilerFailed",
    "CpuMemoryEvents",
    "DynamoError",
    "FakeTensor",
    "FakeTensorMode",
    "Fate",
    "InductorFailed",
    "RecompileLimit",
    "TorchDispatchMode",
    "aot_autograd",
    "autocast_kernel",
    "before_tracing",
    "boxed",
    "capture_settings",
    "compile_by_inductor",
    "compile_with",
    "composite_kernel",
    "current_backward",
    "current_leaf",
    "data_symbols_of",
    "drop_compilations",
    "eager_optimizers",
    "enters_autocast",
    "extract_halves",
    "failing_on_fakes",
    "fate_of_gradient",
    "fresh_fakes",
    "is_checkpoint",
    "keeps_graph",
    "known_sizes",
    "leaves_autocast",
    "new_fake_mode",
    "nonfinite_flags",
    "opaque_call",
    "plain_symbol",
    "plain_tensors",
    "pre_dispatch_graph",
    "profiler_is_active",
    "rebind_data_sizes",
    "sets_grad_mode",
    "skips_on_device",
    "to_fake",
    "tracing_again",
    "tree_leaves",
    "tree_map",
    "upper_bound",
    "without_autocast",
    "without_torch_functions",
]

# `torch._C` is the extension module: these parts have no complete stubs, hence Any.
_autograd: Any = torch._C._autograd
_dynamo: Any = torch._C._dynamo.eval_frame

LEGACY_PROFILER = hasattr(_autograd, "_enable_profiler_legacy")
"""The profiler that came before kineto: same memory events, no kineto start-up, nothing written to stderr.

Present in torch 2.11 to 2.13, deprecated; where it is gone, kineto serves, and some builds (2.13) then write two
`USDT:…` lines to stderr a session, which no log level silences.
"""


class CpuMemoryEvents:
    """Records what this thread allocates and frees on the CPU, through torch's allocator, from `start` to `stop`.

    Both profilers see allocations inside kernels and in compiled code, and those of threads that torch itself starts
    with this thread's state (the backward pass, `torch.jit.fork`); not those of other Python threads.
    """

    def __init__(self, *, legacy: bool = LEGACY_PROFILER) -> None:
        self._legacy = legacy
        kineto: dict[str, Any] = {} if legacy else {"use_kineto": True}
        self._profile: Any = (profiler_legacy if legacy else profiler).profile(profile_memory=True, **kineto)

    def start(self) -> None:
        if profiler_is_active():
            raise RuntimeError(
                "memory cannot be metered here: a torch profiler or another memopt meter is already active in this "
                "thread, and torch allows one; end that one first"
            )
        _map_blocks_from(2**20)
        self._profile._start_trace() if self._legacy else self._profile.__enter__()

    def declare(self, address: int, nbytes: int) -> None:
        """Records a block that is alive already as if allocated now, so that its free will be recorded too.

        torch knows the size of those blocks only that it saw allocated while some profiler ran, and leaves out the
        frees of others; of a block that was freed unseen it keeps a stale size.
        """
        _declare_block()(address, nbytes)

    def stop(self) -> list[int]:
        """Ends the recording and returns the events in order of time: bytes allocated, or minus the bytes freed."""
        try:
            return self._events()
        finally:
            _map_blocks_from(2**25)

    def _events(self) -> list[int]:
        if not self._legacy:
            self._profile.__exit__(None, None, None)
            cpu = _autograd.DeviceType.CPU
            events = self._profile.kineto_results.events()
            memory = [e for e in events if e.name() == "[memory]" and e.device_type() == cpu]
            return [e.nbytes() for e in sorted(memory, key=lambda e: e.start_ns())]
        # torch's own __exit__ would parse every operator event: only the raw memory records are wanted.
        threads = [list(records) for records in _autograd._disable_profiler_legacy()]
        if len(threads) == 1:
            return [r.cpu_memory_usage() for r in threads[0] if r.kind() == "memory_alloc"]
        begin = next(r for r in chain.from_iterable(threads) if r.name() == "__start_profile")
        memory = [r for r in chain.from_iterable(threads) if r.kind() == "memory_alloc"]
        return [r.cpu_memory_usage() for r in sorted(memory, key=begin.cpu_elapsed_us)]


def _map_blocks_from(nbytes: int) -> None:
    """Have glibc take blocks from `nbytes` on from the system one by one.

    The profiler's many small records would else settle in every large block that is freed while it runs, and glibc, its
    heap in splinters, would take fresh memory for each new one: 8 GB for a thousand temporaries of 4 MB. 2**25 is where
    glibc's own, moving threshold ends.
    """
    with contextlib.suppress(OSError, AttributeError):  # not glibc: no such splinters seen
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, nbytes)


_M_MMAP_THRESHOLD = -3


@functools.cache
def _declare_block() -> Callable[[int, int], None]:
    """`c10::profiledCPUMemoryReporter().New(address, nbytes)`: exported by libc10, without a Python binding."""
    lib = Path(torch.__file__).parent / "lib"
    found = [path for path in (lib / "libc10.so", lib / "libc10.dylib") if path.exists()]
    try:
        c10 = ctypes.CDLL(str(found[0]))
        reporter, new = c10._ZN3c1025profiledCPUMemoryReporterEv, c10._ZN3c1025ProfiledCPUMemoryReporter3NewEPvm
    except (IndexError, OSError, AttributeError):
        raise RuntimeError(f"the CPU meter needs libc10's memory reporter, which {lib} does not have") from None
    reporter.restype = ctypes.c_void_p
    new.argtypes, new.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], None
    return functools.partial(new, reporter())


def profiler_is_active() -> bool:
    """Whether any torch profiler records in this thread."""
    return bool(_autograd._profiler_enabled())


def plain_tensors() -> ExitStack:
    """Context in which tensors answer for themselves: no torch function or dispatch mode, no subclass override."""
    stack = ExitStack()
    stack.enter_context(torch._C.DisableTorchFunctionSubclass())
    stack.enter_context(_disable_current_modes())
    return stack


# Importing it registers `torch.ops.higher_order.run_and_save_rng_state`, which the rewritten graphs call.
assert rng_prims.run_and_save_rng_state is not None


RECOMPILE_LIMIT = 256
"""Compilations of one code object: sets of shapes of a call, or of what a broken forward calls."""


def capture_settings() -> ExitStack:
    """The Dynamo and AOTAutograd settings under which models are captured and run.

    Sizes and scalars that depend on data stay in the graph; hooks added later are noticed; past the limit of
    recompilations there is an error rather than an eager run, which would break the budget; dropout is repeated from
    saved generator states.
    """
    stack = ExitStack()
    ignored = set(dynamo_config.ignore_logging_functions)
    warn_once = getattr(logging.Logger, "warning_once", None)  # transformers adds it; its cache breaks the graph
    stack.enter_context(
        dynamo_config.patch(
            capture_scalar_outputs=True,
            capture_dynamic_output_shape_ops=True,
            skip_nnmodule_hook_guards=False,
            recompile_limit=RECOMPILE_LIMIT,
            accumulated_recompile_limit=16 * RECOMPILE_LIMIT,
            fail_on_recompile_limit_hit=True,
            suppress_errors=False,
            ignore_logging_functions=ignored | ({warn_once} if warn_once else set()),
        )
    )
    stack.enter_context(
        functorch_config.patch(functionalize_rng_ops=False, graphsafe_rng_functionalization=False, donated_buffer=False)
    )
    return stack


def compile_with(backend: Callable[..., Any], call: Callable[..., Any], *, whole: bool) -> Callable[..., Any]:
    """`call` compiled by `backend`, one graph for each set of shapes; `whole`: as one region or not at all."""
    known = set(cached_backends)
    compiled = torch.compile(call, backend=backend, dynamic=False, fullgraph=whole)
    # Dynamo keeps every backend for good, to reset it with all others; ours has no state of that kind.
    for added in set(cached_backends) - known:
        del cached_backends[added]
    return compiled


def drop_compilations(is_dead: Callable[[Any], bool]) -> None:
    """Empty Dynamo's caches of those code objects for which all compilations are by backends that are dead.

    Nothing else does: the entries of a model's forward belong to its class, and code that was made for one model is
    kept alive by its own entries, which the garbage collector cannot see. Not to be called while Dynamo compiles.
    """
    for code in [code for code in (reference() for reference in input_codes.seen) if code is not None]:
        entries = _dynamo._debug_get_cache_entry_list(code)
        if entries and all(is_dead(getattr(entry.backend, "compiler_fn", None)) for entry in entries):
            _dynamo.reset_code(code)


def tracing_again() -> Callable[[], AbstractContextManager[Any]]:
    """In a Dynamo backend: makes contexts in which the same region can be lowered again, later."""
    context: Any = torch._guards.TracingContext.get()
    return lambda: torch._guards.tracing(context)


def extract_halves(
    joint: fx.GraphModule, saved: list[fx.Node], saved_symbols: list[fx.Node], forward_outputs: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cut a tagged joint graph into the forward and backward modules that AOTAutograd wires together."""
    return _extract_fwd_bwd_modules(joint, saved, saved_symbols, num_fwd_outputs=forward_outputs)


def boxed(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """The module as a function that empties its list of arguments, so that nothing outlives its last use."""
    module.graph.set_codegen(_BoxedCodeGen())
    module.recompile()
    run = module.forward

    def call(arguments: list[Any]) -> Any:
        with without_autocast():
            return run(arguments)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


class InductorFailed(Exception):
    """Inductor, or a compiler that it calls, gave up."""


def compile_by_inductor(
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]],
    made: Callable[[Any, list[fx.Node], bool], Callable[..., Any]],
    plan_hash: Callable[[], str],
) -> Callable[..., Any]:
    """A region as torch.compile's own backend makes it callable, its joint graph cut by `partition` after inductor's
    decompositions and joint passes. Takes the graph module over.

    `made(compiled, inputs, is_backward)` gets each half as compiled, with its `source_code`, and the inputs of its
    graph; what it returns runs in its place. Both halves are compiled at once. The cache of whole regions would pass
    the partition over and is off; that of compiled graphs goes by their text, and by `plan_hash`. Raises what
    `partition` raises, and `InductorFailed`.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner  # slow to import: only where it is used
    from torch._inductor.custom_graph_pass import CustomPartitionerFn
    from torch._inductor.exc import InductorError
    from torch._inductor.virtualized import V

    class Partitioner(CustomPartitionerFn):
        def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
            return partition(gm, joint_inputs, **kwargs)

        def uuid(self) -> str:
            return plan_hash()

        def __reduce__(self) -> tuple[Any, ...]:
            return str, (plan_hash(),)  # as part of inductor's settings it is pickled into the cache's key

    def compile_half(half: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
        nodes = list(half.graph.find_nodes(op="placeholder"))
        with V.set_choices_handler(_nearby_fusions()()):
            compiled = compile_fx_inner(half, example_inputs, **options)
        return made(compiled, nodes, bool(options.get("is_backward")))

    at_once: dict[str, Any] = {"enable_autograd_cache": False, "force_non_lazy_backward_lowering": True}
    with functorch_config.patch(at_once):
        patches = {
            "custom_partitioner_fn": Partitioner(),
            "inductor_choices_class": _nearby_fusions(),
            "allow_buffer_reuse": False,  # it holds what is dead until something of its size comes
        }
        try:
            compiled: Any = compile_fx(graph_module, inputs, inner_compile=compile_half, config_patches=patches)
        except InductorError as failure:
            raise InductorFailed(str(failure)) from failure
        return compiled


@functools.cache
def _nearby_fusions() -> type[Any]:
    """Inductor's choices, but that nothing is fused across other kernels: what a plan has computed again late in the
    backward would else be computed early, along with something that reads the same, and be held until then.

    A reduction may come earlier than planned, past a few kernels: what it reads is freed the sooner.
    """
    from torch._inductor.choices import InductorChoices

    class NearbyFusions(InductorChoices):
        def __init__(self) -> None:
            super().__init__()
            self.scheduler: Any = None
            self.kernels: list[int] = []
            """The places of the kernels that take no part in fusion."""

        def uuid(self) -> str:
            return f"memopt: fusions of neighbours, reductions past {_MOST_PASSED} kernels"

        def can_fuse(self, scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:  # type: ignore[override]
            if scheduler is not self.scheduler:
                self.scheduler = scheduler
                self.kernels = sorted(node.min_order for node in scheduler.nodes if node.is_extern())
            near = self.between(node1, node2) == 0 or self.may_pass(scheduler, node1, node2)
            return near and InductorChoices.can_fuse(scheduler, node1, node2, shared_data_score)

        def between(self, node1: Any, node2: Any) -> int:
            first, last = min(node1.max_order, node2.max_order), max(node1.min_order, node2.min_order)
            return max(0, bisect_left(self.kernels, last) - bisect_right(self.kernels, first))

        def may_pass(self, scheduler: Any, node1: Any, node2: Any) -> bool:
            early, late = sorted((node1, node2), key=lambda node: node.min_order)
            if self.between(early, late) > _MOST_PASSED or not all(node.is_reduction() for node in late.get_nodes()):
                return False
            passed = (node for node in scheduler.nodes if early.max_order < node.min_order < late.min_order)
            return not any(late.ancestors & node.get_operation_names() for node in passed)

    return NearbyFusions


_MOST_PASSED = 3


def without_autocast() -> AbstractContextManager[None]:
    """Autocast off for all devices: a captured graph has its casts in it, and must get no others where it runs."""
    return torch._C._DisableAutocast()


def new_fake_mode() -> FakeTensorMode:
    """A mode for tensors that have shapes, types and devices, but no memory."""
    return FakeTensorMode(shape_env=ShapeEnv())


def to_fake(
    mode: FakeTensorMode, tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A fake of `tensor` (real, meta or fake) on `device`, in `dtype` if given; a parameter's fake is a parameter."""
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device="meta")
    fake = mode.fake_tensor_converter.from_meta_and_device(mode, meta, device)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad) if tensor.requires_grad else fake


_known_sizes: ContextVar[Mapping[str, int] | None] = ContextVar("known_sizes", default=None)


@contextmanager
def known_sizes(sizes: Mapping[str, int]) -> Iterator[None]:
    """Values of data-dependent symbols, by name, that `upper_bound` counts with inside the block."""
    token = _known_sizes.set(sizes)
    try:
        yield
    finally:
        _known_sizes.reset(token)


def upper_bound(size: torch.SymInt) -> int:
    """The largest value that a symbolic size may take: its hint where it has one, else by the sizes known here, else
    the bound of its data."""
    node: Any = size.node
    if node.has_hint():
        return int(node.hint)
    known = _known_sizes.get() or {}
    values = {s: known[s.name] for s in node.expr.free_symbols if s.name in known}
    expression = sympy.sympify(node.expr.xreplace(values))
    bound = node.shape_env.bound_sympy(expression).upper
    if not bound.is_Integer:
        mend = f"call torch._check({size} <= …) in the model"
        raise ValueError(f"the size {size} depends on data and has no bound; {mend}")
    return int(bound)


def data_symbols_of(value: Any) -> set[str]:
    """Names of the symbols in a node's value whose size only data tell."""
    if isinstance(value, (tuple, list)):
        return set().union(*map(data_symbols_of, value))
    return {symbol.name for symbol in free_unbacked_symbols(value)} if isinstance(value, _SYMBOLIC) else set()


_SYMBOLIC = (torch.Tensor, torch.SymInt, torch.SymFloat)


def plain_symbol(size: int | torch.SymInt) -> str | None:
    """The symbol's name if a size is one symbol and no expression of it."""
    if isinstance(size, int):
        return None
    expression: Any = size.node.expr
    return expression.name if expression.is_symbol else None


class Fate(Enum):
    """What the backward pass that runs does with the gradient of a leaf."""

    ACCUMULATED = "added to its .grad"
    RETURNED = "returned by torch.autograd.grad"
    DROPPED = "wanted by nobody"


def fate_of_gradient(leaf: torch.Tensor) -> Fate:
    """In a backward pass: what it will do with the leaf's gradient."""
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    try:
        return Fate.ACCUMULATED if torch._C._will_engine_execute_node(node) else Fate.DROPPED
    except RuntimeError:  # "A leaf node was passed … but we are currently running autograd.grad()"
        return Fate.RETURNED


def current_leaf(position: int) -> torch.Tensor | None:
    """In the backward of a captured region: the leaf that was tensor input `position` of that call, if it was one."""
    edges: Any = torch._C._current_autograd_node().next_functions
    return getattr(edges[position][0], "variable", None)


def current_backward() -> int:
    """A number for the backward pass that runs."""
    return torch._C._current_graph_task_id()


def keeps_graph() -> bool:
    """In a backward pass: whether it was started with `retain_graph=True`."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def nonfinite_flags(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """What `scaler.unscale_(optimizer)` found, a scalar for each device, 1 where a gradient is not finite: the very
    tensors by which `scaler.step(optimizer)` decides and `scaler.update()` adapts the scale."""
    return list(scaler._found_inf_per_device(optimizer).values())


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a `GradScaler` leaves skipping to the optimiser's own kernel, as with `fused=True`."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


@contextmanager
def eager_optimizers(*, foreach: bool) -> Iterator[None]:
    """Context in which the optimisers of torch treat fake tensors as plain ones, and do not see that something is being
    compiled around them: what they choose (foreach, single numbers on the device) is what they would choose in a run.

    `foreach`: on the CPU too they take all parameters at once by default, as they do on a GPU.
    """
    types: list[Any] = _foreach_supported_types
    compiler: Any = torch.compiler
    module: Any = sys.modules[torch.optim.Optimizer.__module__]  # torch.optim hides it
    devices, compiling = module._get_foreach_kernels_supported_devices, compiler._is_compiling_flag
    types.append(FakeTensor)
    compiler._is_compiling_flag = False
    if foreach:
        module._get_foreach_kernels_supported_devices = lambda: [*devices(), "cpu"]
    try:
        yield
    finally:
        module._get_foreach_kernels_supported_devices = devices
        compiler._is_compiling_flag = compiling
        types.remove(FakeTensor)


def fresh_fakes(inputs: Sequence[Any]) -> tuple[FakeTensorMode, list[Any]]:
    """In a Dynamo backend: a fake mode of its own, and fakes in it for the inputs of the region.

    Tracing may write to them; those of Dynamo and AOTAutograd stay as they are.
    """
    context: Any = torch._guards.TracingContext.get()
    mode = FakeTensorMode(shape_env=context.fake_mode.shape_env)

    def fake(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if isinstance(value, FakeTensor):
            return mode.from_tensor(value)
        symbolic = context.tensor_to_context.get(value)
        source = symbolic.tensor_source if symbolic is not None else None
        return mode.from_tensor(value, symbolic_context=symbolic, source=source, trace=False)

    return mode, [fake(value) for value in inputs]


def pre_dispatch_graph(call: Callable[..., Any], mode: FakeTensorMode, inputs: Sequence[Any]) -> fx.GraphModule:
    """What `call` does with fakes of `mode`, as operators before any of them is taken apart or differentiated."""
    outer: Any = torch._guards.TracingContext.get()
    inner: Any = torch._guards.TracingContext(mode)
    inner.module_context, inner.fake_mode = outer.module_context, mode
    with torch._guards.tracing(inner), mode, fx_traceback.preserve_node_meta():
        return make_fx(call, pre_dispatch=True)(*inputs)


@contextmanager
def before_tracing(see: Callable[..., Any]) -> Iterator[None]:
    """In `pre_dispatch_graph`: have `see(trace, within, operator, args, kwargs)` called in the tracer's place.

    `trace(operator, args, kwargs)` goes on to the tracer; calls made under `within` are seen in turn.
    """
    tracer: Any = get_proxy_mode()
    go_on = tracer.__torch_dispatch__

    def trace(func: Any, args: Any, kwargs: Any) -> Any:
        return go_on(func, (), args, kwargs)

    def dispatch(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return see(trace, tracer, func, args, kwargs or {})

    tracer.__torch_dispatch__ = dispatch
    try:
        yield
    finally:
        del tracer.__torch_dispatch__


def opaque_call(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mode: FakeTensorMode) -> Any:
    """In `pre_dispatch_graph`: a call of a higher-order operator as one node; nothing in it is traced."""
    tracer: Any = get_proxy_mode().tracer  # type: ignore[union-attr]
    for number, module in enumerate(each for each in tree_leaves((args, kwargs)) if isinstance(each, fx.GraphModule)):
        tracer.root.register_module(tracer.get_fresh_qualname(f"{target}_{number}_"), module)
    proxies = tree_map(tracer.unwrap_proxy, (args, kwargs))
    proxy = tracer.create_proxy("call_function", target, *proxies)
    with plain_tensors(), without_torch_functions(), mode:
        value = target(*args, **kwargs)
    return track_tensor_tree(value, proxy, constant=None, tracer=tracer)


def rebind_data_sizes(mode: FakeTensorMode, node: fx.Node, result: Any) -> None:
    """Have the data-dependent symbols of a repeated run stand for those of the first."""
    rebind_unbacked(mode.shape_env, node, result)


def without_torch_functions() -> AbstractContextManager[None]:
    """Torch functions go straight to their implementation, past modes such as that of tracing."""
    return torch._C.DisableTorchFunction()


@contextmanager
def failing_on_fakes() -> Iterator[None]:
    """For calls on fakes that may fail: torch would log each as an error, with its stack."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def autocast_kernel(operator: Any, device: str) -> Callable[..., Any] | None:
    """What autocast does with an operator on a device type: casts, then the operator; None where it leaves it alone."""
    return _kernel(operator, f"Autocast{device.upper()}")


def composite_kernel(operator: Any) -> Callable[..., Any] | None:
    """The calls that an operator is made of; None for one with a kernel or a gradient of its own."""
    return _kernel(operator, "CompositeImplicitAutograd")


def _kernel(operator: Any, name: str) -> Callable[..., Any] | None:
    if not torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), name):
        return None
    return functools.partial(operator._op_dk, getattr(DispatchKey, name))


def sets_grad_mode(target: Any) -> bool:
    """Whether a call in Dynamo's graph is `torch.set_grad_enabled`."""
    return target is torch._C._set_grad_enabled


def enters_autocast(target: Any) -> bool:
    """Whether a call in Dynamo's graph opens a `torch.autocast` block."""
    return target is torch.amp.autocast_mode._enter_autocast


def leaves_autocast(target: Any) -> bool:
    """Whether a call in Dynamo's graph closes a `torch.autocast` block."""
    return target is torch.amp.autocast_mode._exit_autocast


def is_checkpoint(target: Any) -> bool:
    """Whether a call in Dynamo's graph is `torch.utils.checkpoint.checkpoint`."""
    return target is torch.ops.higher_order.tag_activation_checkpoint
