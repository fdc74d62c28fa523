"""AOTAutograd in two phases: a region's joint graph is traced first; later it is cut and compiled, once or repeatedly.
Functions import torch._dynamo and torch._functorch.aot_autograd themselves: these take more than a second."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import fx
from torch._logging._internal import getArtifactLogger
from torch._prims_common import suggest_memory_format

from memopt.compat.check import check
from memopt.compat.eager_mode import dead_draws_kept, eager_kernels
from memopt.compat.fakes import broadcast_masks
from memopt.compat.symbols import has_gaps
from memopt.compat.true_results import correct_strides
from passes.compat import Replacement, enable_python_dispatcher, erase_all, forget_erased, private, replaced_all

PRIVATE_NAMES = private("""
    torch._functorch.aot_autograd:
        aot_export_joint_with_descriptors(stack, module, args, keep_inference_input_mutations=)
    torch._functorch._aot_autograd.graph_compile:
        aot_stage2_compile(state, capture, partition_fn=, fw_compiler=, bw_compiler=, inference_compiler=)
        aot_stage2_autograd
    torch._dynamo.compiled_autograd: _disable
    torch._guards: TracingContext.get .fake_mode?
    torch._dynamo.utils: preserve_rng_state
    torch._functorch._aot_autograd.schemas: OutputType.alias_of_input .is_input MemoryFormatMeta.from_tensor(tensor)
        MemoryFormatMeta(memory_format=) JointWithDescriptors._aot_state? ._aot_graph_capture? AOTState.needs_autograd?
        .fw_metadata? .aot_config? .fake_mode? ViewAndMutationMeta.output_info? .input_info?
        .dynamic_saved_tensors_idxs? .subclass_inp_meta? .bw_donated_idxs?
    torch._prims_common: suggest_memory_format
    torch._logging._internal: getArtifactLogger
    torch._dynamo.symbolic_convert: TensorifyState.force_specializations
""")

Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]
"""Cuts a joint graph into forward and backward. Takes the graph, its inputs, and the keyword `num_fwd_outputs`."""
Compile = Callable[[fx.GraphModule, Sequence[Any]], Callable[[list[Any]], Any]]
"""Compiles a forward or backward, given with example inputs, to a function that empties its list of arguments."""


_disable: Any = torch.compiler.disable


class JointGraphTraced(Exception):
    """Raised to end a compilation, by AOTAutograd or inductor, once the joint graph is known."""


@dataclass(frozen=True)
class InputUse:
    """The inputs that a region writes to, and those it only reads, as AOTAutograd found them."""

    overwritten: frozenset[int] = frozenset()
    """The positions of the region's inputs to which AOTAutograd writes after the forward: inputs that require
    gradients, and that the region writes to in place."""
    only_read: frozenset[int] = frozenset()
    """The positions of the region's inputs that require gradients, that the region does not write to, and of which it
    returns neither the input itself nor a view."""

    @classmethod
    def of(cls, state: Any) -> InputUse:
        """The use of a region's inputs, read from `state`, in which AOTAutograd keeps its trace of the region."""
        from torch._functorch._aot_autograd.schemas import OutputType

        metadata = state.fw_metadata
        of_inputs = (OutputType.alias_of_input, OutputType.is_input)
        returned = {info.base_idx for info in metadata.output_info if info.output_type in of_inputs}
        only_read = frozenset(
            number
            for number, info in enumerate(metadata.input_info)
            if info.requires_grad and not info.mutates_data and not info.mutates_metadata and number not in returned
        )
        return cls(frozenset(metadata.mutated_inp_runtime_indices), only_read)


def noting_input_use(found: list[InputUse]) -> Replacement:
    """A replacement by which AOTAutograd, before it cuts a joint graph, adds to `found` the use of its inputs."""
    from torch._functorch._aot_autograd import graph_compile

    own: Any = graph_compile.aot_stage2_autograd

    def aot_stage2_autograd(state: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(InputUse.of(state))
        return own(state, *args, **kwargs)

    return graph_compile, "aot_stage2_autograd", aot_stage2_autograd


@dataclass(frozen=True)
class AotTrace:
    """A region that AOTAutograd has traced, ready to be compiled with any partition of its joint graph."""

    module: fx.GraphModule | None
    """The joint graph of forward and backward in ATen operators, or None for a region without gradients."""
    forward_outputs: int
    """The number of outputs of the forward, which come first among the outputs of the joint graph."""
    state: Any
    capture: Any

    @cached_property
    def inputs(self) -> InputUse:
        """The inputs that the region writes to, and those it only reads."""
        return InputUse.of(self.state)

    @property
    def places(self) -> tuple[int, ...]:
        """For each input of the region, the position of the corresponding input of the joint graph; for a tensor
        subclass, such as a sharded parameter, that of the first of several, which holds its memory."""
        return _firsts(self.state.fw_metadata.subclass_inp_meta)

    @property
    def gradient_places(self) -> tuple[int, ...]:
        """For each input of the region, the position of its gradient among those that the joint graph returns: that of
        the first for a tensor subclass, whose gradient is several values there, of a single None for no gradient."""
        wrappers = self.capture.maybe_subclass_meta
        return self.places if wrappers is None else _firsts(wrappers.grad_input_metas)

    def compile(self, partition: Partition, forward: Compile, backward: Compile) -> Callable[..., Any]:
        """The region as a differentiable function of its inputs, which runs the forward and backward into which
        `partition` cuts the joint graph. `forward` and `backward` are the compilers of these two modules, whose graphs
        are empty afterwards. This may be called repeatedly, each time in the region's tracing context."""
        log = _graphs_are_logged()
        compiled, halves = _second_phase(self.state, self.capture, partition, forward, backward, log=log)
        for half in halves:
            erase_all(half.graph)  # their code is compiled
        compiled = _disable(compiled, reason="memopt has compiled this region by its plan")

        return lambda *inputs: compiled(list(inputs))

    def of(self, joint: fx.GraphModule) -> AotTrace:
        """The same trace with its joint graph replaced by `joint`, a rewritten one."""
        return replace(self, module=joint, capture=replace(self.capture, graph_module=joint))


def trace_region(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> AotTrace:
    """Traces a region's forward and backward on fake `inputs`. To be called in the region's tracing context."""
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    check()
    context: Any = torch._guards.TracingContext.get()
    correct_strides(context.fake_mode)
    replacements = [broadcast_masks(), gradients_without_gaps()]
    with eager_kernels(), dead_draws_kept(), replaced_all(replacements), ExitStack() as stack:
        exported = aot_export_joint_with_descriptors(
            stack, graph_module, tuple(inputs), keep_inference_input_mutations=True
        )
    state, capture = exported._aot_state, exported._aot_graph_capture
    forget_erased(capture.graph_module.graph)
    if not state.needs_autograd:
        return AotTrace(None, 0, state, capture)
    found: list[tuple[fx.GraphModule, int]] = []

    def look(joint: fx.GraphModule, *_: Any, num_fwd_outputs: int, **__: Any) -> Any:
        found.append((joint, num_fwd_outputs))
        raise JointGraphTraced

    with suppress(JointGraphTraced):
        _second_phase(state, capture, look, _no_compiler, _no_compiler, log=False)
    joint, forward_outputs = found[0]
    forget_erased(joint.graph)
    for node in joint.graph.nodes:
        node.meta.pop("tensor_meta", None)  # a second description of `val`
    return AotTrace(joint, forward_outputs, state, capture)


def gradients_without_gaps() -> Replacement:
    """A replacement by which AOTAutograd takes the gradients of outputs that are views with gaps as contiguous tensors.
    By itself it copies them to the strides of the view: that of one column would take the memory of the matrix."""
    from torch._functorch._aot_autograd.schemas import MemoryFormatMeta

    return MemoryFormatMeta, "from_tensor", _gapless(MemoryFormatMeta.from_tensor)


@cache
def _gapless(own: Callable[..., Any]) -> Any:
    from torch._functorch._aot_autograd.schemas import MemoryFormatMeta

    def from_tensor(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if has_gaps(tensor):
            return MemoryFormatMeta(memory_format=suggest_memory_format(tensor))
        return own(tensor, *args, **kwargs)

    return from_tensor


def constants_as_attributes(module: fx.GraphModule) -> fx.GraphModule:
    """Turn the buffers of a module, which is returned, into plain attributes, constants for AOTAutograd."""
    for name, constant in list(module._buffers.items()):
        del module._buffers[name]
        setattr(module, name, constant)
    return module


def _second_phase(
    state: Any, capture: Any, partition: Partition, forward: Compile, backward: Compile, *, log: bool
) -> tuple[Callable[[list[Any]], Any], Sequence[fx.GraphModule]]:
    """Cuts the joint graph by `partition` and compiles both parts by `forward` and `backward`. Returns the function
    that runs them on a list of inputs, and their graphs. With `log`, AOTAutograd logs the graphs."""
    from torch._dynamo import compiled_autograd
    from torch._dynamo.utils import preserve_rng_state
    from torch._functorch._aot_autograd.graph_compile import aot_stage2_compile

    halves: list[fx.GraphModule] = []

    def cut(*args: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        forward, backward = partition(*args, **kwargs)
        halves.extend((forward, backward))
        # AOTAutograd would compile a deep copy of the backward. Our compilers change nothing that it reads later.
        vars(backward)["__deepcopy__"] = lambda memo: backward
        return forward, backward

    def compile_backward(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        compiled = backward(module, inputs)
        return _disable(compiled, reason="memopt has compiled this backward by its plan")

    # The second phase writes to these objects, and the function that it returns reads them when it is called.
    state = copy.copy(state)
    state.fw_metadata = _unused(state.fw_metadata)
    if capture.maybe_subclass_meta is not None:
        wrappers = copy.copy(capture.maybe_subclass_meta)
        wrappers.fw_metadata = _unused(wrappers.fw_metadata)
        wrappers.grad_input_metas = _unused_wrappers(wrappers.grad_input_metas)
        capture = replace(capture, maybe_subclass_meta=wrappers)
    state.aot_config = replace(state.aot_config, force_non_lazy_backward_lowering=True, enable_log=log)
    second_phase: Any = aot_stage2_compile
    compilers = {"fw_compiler": forward, "bw_compiler": compile_backward, "inference_compiler": forward}
    with (  # the modes in which the region was traced
        compiled_autograd._disable(), torch.autograd.set_multithreading_enabled(False), preserve_rng_state(),
        state.fake_mode, enable_python_dispatcher(), dead_draws_kept(),
        unread_numbers_left(state.fake_mode, capture.graph_module),
    ):  # fmt: skip
        compiled, _ = second_phase(state, capture, partition_fn=cut, **compilers)
    # Else each forward would mark inputs that it saves as changing in size, for all later captures; before torch 2.13
    # these marks cannot be told from those that users make.
    state.fw_metadata.dynamic_saved_tensors_idxs.clear()
    return compiled, halves


def _unused(metadata: Any) -> Any:
    """A copy of a joint graph's metadata for a second phase, which writes to it."""
    metadata = copy.copy(metadata)
    metadata.dynamic_saved_tensors_idxs = {}  # filled by the second phase, for one partition
    metadata.bw_donated_idxs = []  # no saved value is written over: a retained graph runs twice
    for name in ("subclass_inp_meta", "subclass_fw_graph_out_meta", "subclass_tangent_meta"):
        setattr(metadata, name, _unused_wrappers(getattr(metadata, name)))
    return metadata


def _unused_wrappers(metas: Sequence[Any] | None) -> list[Any] | None:
    """Copies of the descriptions of wrappers, such as sharded tensors, and of those inside of them."""
    if metas is None:
        return None
    copies = list(map(copy.copy, metas))
    for meta in copies:
        if hasattr(meta, "attrs"):
            meta.attrs = dict(zip(meta.attrs, _unused_wrappers(list(meta.attrs.values())) or (), strict=True))
    return copies


def _firsts(metas: Sequence[Any]) -> tuple[int, ...]:
    """For each described tensor, the position of the first of the values that stand for it."""
    return tuple(
        meta.flat_tensor_start_idx if hasattr(meta, "flat_tensor_start_idx") else meta.unwrapped_idx for meta in metas
    )


def _graphs_are_logged() -> bool:
    """Whether a log of AOTAutograd's graphs is on, for which it would turn the graphs into text before it asks."""
    name = "torch._functorch._aot_autograd.graph_compile"
    return "TORCH_TRACE" in os.environ or getArtifactLogger(name, "aot_graphs").isEnabledFor(logging.DEBUG)


@contextmanager
def unread_numbers_left(mode: Any, joint: fx.GraphModule | None = None) -> Iterator[None]:
    """Context in which AOTAutograd does not ask Dynamo to capture a call again because of unread symbols for numbers.
    Torch makes a symbol for the number in each 0-dim fp64 tensor on the CPU among the inputs, in case the forward asks
    for it by `item()`, and captures the call again without it where nothing reads it. Symbols here are those of the
    fake mode `mode` (none if it is None) that no operator of `joint` reads; without `joint` all of them, since a second
    trace of a region makes new symbols, and reads those instead."""
    from torch._dynamo.symbolic_convert import TensorifyState

    environment = getattr(mode, "shape_env", None)
    if environment is None:
        yield
        return
    numbers = {str(symbol) for symbol in environment.backed_var_to_val if str(symbol).startswith("zf")}
    for node in joint.graph.nodes if joint is not None and numbers else ():
        if isinstance(value := node.meta.get("val"), torch.SymFloat):
            numbers -= {str(symbol) for symbol in value.node.expr.free_symbols}
    added = numbers - TensorifyState.force_specializations
    TensorifyState.force_specializations |= added
    try:
        yield
    finally:
        TensorifyState.force_specializations -= added


def _no_compiler(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    raise AssertionError("AOTAutograd called the compiler, but was only to trace the region")
