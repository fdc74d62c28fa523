"""AOTAutograd in two phases: a region's joint graph is traced first, cut and made callable later, as often as wanted.

`aot_export_joint_with_descriptors` and `aot_stage2_compile` are there from torch 2.9 on. At first the second took the
compilers from its configuration instead of as arguments: its signature is asked which.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import preserve_rng_state
from torch._functorch._aot_autograd.graph_compile import aot_stage2_compile
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]
"""What cuts a joint graph: called with the graph, its inputs, and the keyword `num_fwd_outputs`."""
Compile = Callable[[fx.GraphModule, Sequence[Any]], Callable[[list[Any]], Any]]
"""What makes a half callable with a list of arguments, which it empties."""


_disable: Any = torch._dynamo.disable


class _JointGraphTraced(Exception):
    """The joint graph is there: compilation goes no further."""


@dataclass(frozen=True)
class AotTrace:
    """A region as AOTAutograd traced it."""

    module: fx.GraphModule | None
    """The joint graph of forward and backward in ATen operators; None for a region without gradients."""
    forward_outputs: int
    """How many of its first results are the forward's."""
    state: Any
    capture: Any

    def compile(self, partition: Partition, compiler: Compile) -> Callable[..., Any]:
        """The region as a function of its inputs that autograd differentiates by the halves which `partition` makes.

        It may be called several times with other partitions. To be called in the tracing context of the region.
        """
        compiled = _second_phase(self.state, self.capture, partition, compiler)
        compiled = _disable(compiled, reason="a planned region is not traced again")

        def region(*inputs: Any) -> Any:
            return compiled(list(inputs))

        return region


def trace_region(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> AotTrace:
    """Trace a region's forward and backward. To be called in the tracing context of the region; `inputs` are fakes."""
    with ExitStack() as stack:
        exported = aot_export_joint_with_descriptors(
            stack, graph_module, tuple(inputs), keep_inference_input_mutations=True
        )
    state, capture = exported._aot_state, exported._aot_graph_capture
    if not state.needs_autograd:
        return AotTrace(None, 0, state, capture)
    found: list[tuple[fx.GraphModule, int]] = []

    def look(joint: fx.GraphModule, *_: Any, num_fwd_outputs: int, **__: Any) -> Any:
        found.append((joint, num_fwd_outputs))
        raise _JointGraphTraced

    with suppress(_JointGraphTraced):
        _second_phase(state, capture, look, _no_compiler)
    return AotTrace(*found[0], state, capture)


def _second_phase(state: Any, capture: Any, partition: Partition, compiler: Compile) -> Callable[[list[Any]], Any]:
    def cut(*args: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        forward, backward = partition(*args, **kwargs)
        # AOTAutograd compiles a deep copy of the backward; compilation here changes nothing that it looks at later.
        vars(backward)["__deepcopy__"] = lambda memo: backward
        return forward, backward

    def compile_backward(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        compiled = compiler(module, inputs)
        return _disable(compiled, reason="a planned backward is not traced again")

    # The second phase writes into these, and what it returns reads them when it runs.
    state = copy.copy(state)
    state.fw_metadata = copy.copy(state.fw_metadata)
    state.aot_config = replace(state.aot_config, force_non_lazy_backward_lowering=True)
    how: dict[str, Any] = {"partition_fn": cut, "fw_compiler": compiler, "bw_compiler": compile_backward}
    how["inference_compiler"] = compiler
    if "partition_fn" not in inspect.signature(aot_stage2_compile).parameters:
        state.aot_config, how = replace(state.aot_config, **how), {}
    with _fakes_active(state):
        compiled, _ = aot_stage2_compile(state, capture, **how)
    return compiled


@contextmanager
def _fakes_active(state: Any) -> Iterator[None]:
    """The modes in which AOTAutograd compiles: those in which the trace was made."""
    with ExitStack() as stack:
        stack.enter_context(compiled_autograd._disable())
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(preserve_rng_state())
        stack.enter_context(state.fake_mode)
        stack.enter_context(enable_python_dispatcher())
        yield


def _no_compiler(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    raise AssertionError("nothing is compiled where a region is only traced")
