"""Inductor: a region compiled with a partition and with fusions of memopt's choice, and the timing of its kernels."""

from __future__ import annotations

import functools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import fx

from memopt.compat.check import check
from memopt.compat.fakes import FakeTensor, FakeTensorMode
from memopt.compat.inductor_lowering import FALLBACKS, make_fallbacks_known, order_of_random_kernels, pools_as_they_are
from memopt.compat.joint_trace import constants_as_attributes, gradients_without_gaps, unread_numbers_left
from memopt.errors import CaptureError
from passes.compat import Replacement, private, replaced_all

PRIVATE_NAMES = private("""
    torch._inductor.compile_fx: compile_fx(module, inputs, inner_compile=, config_patches=) compile_fx_inner
    torch._inductor.custom_graph_pass: CustomPartitionerFn
    torch._inductor.exc: InductorError
    torch._inductor.fx_passes.replace_random: fuse_seed_creation_pass(graph)
    torch._inductor.virtualized: V.set_fake_mode .set_choices_handler
    torch._inductor.choices: InductorChoices
    torch._inductor.runtime.benchmarking: benchmarker.benchmark_gpu
    torch._ops: HigherOrderOperator.python_key_table?
""")


NO_CUDA_GRAPHS = (
    "training calls run without CUDA graphs, although torch._inductor.config.triton.cudagraphs is set: the memory pool "
    "of a graph keeps what a plan frees"
)


def cuda_graphs_wanted() -> bool:
    """Whether the user has told inductor to run what it compiles as CUDA graphs."""
    import torch._inductor.config as inductor_config

    return bool(inductor_config.triton.cudagraphs)


def compile_by_inductor(
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]],
    made: Callable[[Any, list[fx.Node], bool], Callable[..., Any]],
    plan_hash: Callable[[], str],
) -> Callable[..., Any]:
    """Compile a region with inductor and `partition`, and return the callable. The graph module must not be used
    afterwards.

    `partition` gets the joint graph after inductor's decompositions and joint passes. `made(compiled, placeholders,
    is_backward)` is called for the forward and the backward, with the half as inductor has compiled it, with its
    `source_code`, and the placeholders of its graph; what it returns runs in place of `compiled`. AOTAutograd's cache
    of regions is off, since a hit would skip the partition; `plan_hash()` is in the key of inductor's graph cache.

    Raises what `partition` raises, and `CaptureError` where inductor, or a compiler that it calls, fails."""
    import torch._functorch.config as functorch_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.exc import InductorError
    from torch._inductor.virtualized import V

    check()

    def compile_half(half: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
        nodes, is_backward = list(half.graph.find_nodes(op="placeholder")), bool(options.get("is_backward"))
        make_fallbacks_known(half, is_backward=is_backward)
        with V.set_choices_handler(_nearby_fusions()()):
            compiled = compile_fx_inner(half, example_inputs, **options)
        return made(compiled, nodes, is_backward)

    at_once: dict[str, Any] = {"enable_autograd_cache": False, "force_non_lazy_backward_lowering": True}
    with (
        functorch_config.patch(at_once),
        _fake_generator_states(),
        replaced_all([gradients_without_gaps(), *pools_as_they_are()]),
        unread_numbers_left(next((one.fake_mode for one in inputs if isinstance(one, FakeTensor)), None)),
    ):
        patches = {
            "custom_partitioner_fn": _partitioner(partition, plan_hash),
            "inductor_choices_class": _nearby_fusions(),
            "_pre_fusion_custom_pass": order_of_random_kernels(),
            "allow_buffer_reuse": False,  # with reuse, a dead buffer is held until one of its size is wanted
            "triton.cudagraphs": False,  # nobody counts what the pool of a graph holds
        }
        try:
            module = constants_as_attributes(graph_module)  # else they would be the first inputs of the joint graph
            compiled: Any = compile_fx(module, inputs, inner_compile=compile_half, config_patches=patches)
        except InductorError as failure:
            reason = " ".join(str(failure).split())[:300]
            raise CaptureError(
                f"inductor cannot compile a region of the model: {reason}; give optimize backend='aten'"
            ) from failure
        return compiled


def seeds_apart() -> Replacement:
    """The replacement with which inductor leaves each random operator in a joint graph its own seed."""
    from torch._inductor.fx_passes import replace_random

    return replace_random, "fuse_seed_creation_pass", lambda graph: 0


def draw_seeds_at_once(joint: fx.GraphModule) -> None:
    """Have a joint graph that was traced with `seeds_apart`, which is edited, draw all its seeds in one call."""
    from torch._inductor.fx_passes.replace_random import fuse_seed_creation_pass
    from torch._inductor.virtualized import V

    fakes = (value.fake_mode for node in joint.graph.nodes if isinstance(value := node.meta.get("val"), FakeTensor))
    with V.set_fake_mode(next(fakes)):
        fuse_seed_creation_pass(joint.graph)


def _fake_generator_states() -> AbstractContextManager[None]:
    """Context in which `run_and_save_rng_state` on fake tensors returns a fake state. Torch returns a real one, which
    stops the compilation of a graph that draws from it again: inductor runs each graph on fake tensors first."""
    save: Any = torch.ops.higher_order.run_and_save_rng_state
    kernels = save.python_key_table
    run = kernels[FakeTensorMode]

    def run_fake(mode: FakeTensorMode, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        state, drawn = run(mode, *args, **kwargs)
        with mode:
            return torch.empty(state.shape, dtype=state.dtype), drawn

    return replaced_all([(kernels, FakeTensorMode, run_fake)])


def _partitioner(partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]], plan_hash: Callable[[], str]) -> Any:
    """`partition` as the object that inductor takes, with `plan_hash()` in the keys of inductor's caches."""
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class _Partitioner(CustomPartitionerFn):
        def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
            return partition(gm, joint_inputs, **kwargs)

        def uuid(self) -> str:
            return f"{plan_hash()}, {FALLBACKS}"

        def __reduce__(self) -> tuple[Any, ...]:
            return str, (self.uuid(),)  # inductor pickles its settings, with this object, into the cache's key

    return _Partitioner()


@functools.cache
def _nearby_fusions() -> type[Any]:
    """A class that makes inductor's choices, but fuses nodes only if no external kernel runs between them. Otherwise a
    value that the plan recomputes late could be fused with an early node that reads the same inputs, and be held from
    then on. A reduction may still move up past a few kernels, since its input is freed earlier then."""
    from torch._inductor.choices import InductorChoices

    class NearbyFusions(InductorChoices):
        def __init__(self) -> None:
            super().__init__()
            self.scheduler: Any = None
            self.kernels: list[int] = []
            """The positions, in ascending order, of the nodes that are external kernels, which are not fused."""

        def uuid(self) -> str:
            return f"memopt: neighbors fused, reductions past {_MOST_PASSED} kernels"

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

    # Inductor pickles the class into the key of its cache, by the module and the name that it is found under.
    NearbyFusions.__qualname__ = NearbyFusions.__name__
    return NearbyFusions


def __getattr__(name: str) -> Any:
    """The class `NearbyFusions`, made when it is first asked for, since its base class is slow to import. Inductor's
    cache looks it up by this name."""
    if name != "NearbyFusions":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _nearby_fusions()


_MOST_PASSED = 3


_PAGE = 20 * 1024**2
"""A segment exceeds the block that it is allocated for by fewer bytes than this, expandable or not."""


@contextmanager
def autotuning_within(limit_bytes: int) -> Iterator[None]:
    """A context in which kernels are timed while torch's allocator for CUDA holds at most `limit_bytes`. Inductor fills
    a buffer of the size of the card's cache before each run, which is left out where it has no room. What a timing
    allocates is returned to the card, so that later blocks lie as without it. A configuration that there is no memory
    to time counts as infinitely slow; if that holds for all of them, the first one is used."""
    from torch._inductor.runtime.benchmarking import benchmarker

    attributes = vars(benchmarker)
    before, whole = dict(attributes), torch.cuda.get_device_properties().L2_cache_size
    timed = benchmarker.benchmark_gpu

    def benchmark_gpu(*args: Any, **kwargs: Any) -> Any:
        attributes["L2_cache_size"] = whole if _fits(whole, limit_bytes) else 0
        try:
            with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
                return timed(*args, **kwargs)
        except torch.OutOfMemoryError:
            return math.inf

    attributes["benchmark_gpu"] = benchmark_gpu
    try:
        yield
    finally:
        attributes.clear()
        attributes.update(before)


def _fits(nbytes: int, limit_bytes: int) -> bool:
    """Whether torch's allocator would still hold at most `limit_bytes` after a new segment for a block of `nbytes`."""
    return torch.cuda.memory_reserved() + -(-nbytes // _PAGE) * _PAGE <= limit_bytes
