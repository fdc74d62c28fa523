"""Joint graphs to test passes on: captured from real models, or written out by hand under a fake mode."""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.graph import _BoxedCodeGen

aten = torch.ops.aten


@dataclass(frozen=True)
class Captured:
    """A joint graph, and real inputs for it: the parameters and batch it was traced with, and tangents of ones."""

    graph_module: GraphModule
    inputs: tuple[torch.Tensor | int, ...]
    forward_outputs: int


def capture(model: nn.Module, *args: Any, dynamic: bool = False, **kwargs: Any) -> Captured:
    """Traces one training step of the model, which returns its loss or an object with one."""
    found: dict[str, Any] = {}

    def compiler(graph_module: GraphModule, _: Any) -> Callable[..., Any]:
        graph_module.graph.set_codegen(_BoxedCodeGen())
        graph_module.recompile()

        def boxed(inputs: list[Any]) -> Any:
            found.setdefault("inputs", list(inputs))
            return graph_module.forward(inputs)

        boxed._boxed_call = True
        return boxed

    def partition(joint: GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        found["joint"], found["forward_outputs"] = joint, num_fwd_outputs
        return default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)

    backend = aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        inference_compiler=compiler,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    warn_once = getattr(logging.Logger, "warning_once", None)
    if warn_once is not None:
        torch._dynamo.config.ignore_logging_functions.add(warn_once)
    settings = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    with torch._dynamo.config.patch(settings):
        # A function of our own: compiling the model itself would leave compiled code on it.
        torch.compile(lambda *a, **k: model(*a, **k), backend=backend, dynamic=dynamic)(*args, **kwargs)
    placeholders = found["joint"].graph.find_nodes(op="placeholder")
    tangents = [node for node in placeholders if str(node.target).startswith("tangents")]
    inputs = found["inputs"][: len(placeholders) - len(tangents)]
    ones = [torch.ones([_hint(size) for size in node.meta["val"].shape]) for node in tangents]
    return Captured(found["joint"], tuple(inputs + ones), found["forward_outputs"])


def _hint(size: int | torch.SymInt) -> int:
    return size if isinstance(size, int) else size.node.hint


@functools.cache
def gpt2() -> Captured:
    """Two blocks of Hugging Face's GPT-2 with dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=61, n_positions=16, **ends)).train()
    model.loss_type = "ForCausalLM"
    tokens = torch.randint(0, 61, (2, 8))
    return capture(model, input_ids=tokens, labels=tokens)


class Residual(nn.Module):
    """Two convolutions with BatchNorm and a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.first_norm, self.second_norm = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first_norm(self.first(image)))
        return torch.relu(image + self.second_norm(self.second(hidden)))


@functools.cache
def resnet() -> Captured:
    """A small ResNet: its running statistics are written by `copy_` at the end of the forward."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), Residual(8), Residual(8), nn.MaxPool2d(2), nn.Flatten())
    return capture(nn.Sequential(body, nn.Linear(128, 5), nn.LogSoftmax(-1)).train(), torch.randn(2, 3, 8, 8))


class RowsAboveZero(nn.Module):
    """Sizes that depend on data: only rows with a positive sum take part."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        chosen = torch.nonzero(rows.sum(1) > 0).squeeze(1)
        return self.linear(rows[chosen]).square().sum() * (chosen.size(0) + 1)


@functools.cache
def rows_above_zero() -> Captured:
    torch.manual_seed(0)
    return capture(RowsAboveZero(), torch.randn(6, 4))


@functools.cache
def dynamic_mlp() -> Captured:
    """Symbolic batch and width."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.5), nn.Linear(8, 3)).train()
    return capture(model, torch.randn(5, 7, 4), dynamic=True)


def with_inputs(graph_module: GraphModule) -> Captured:
    """A hand-written graph with random inputs of its types."""
    torch.manual_seed(0)
    values = [node.meta["val"] for node in graph_module.graph.find_nodes(op="placeholder")]
    return Captured(graph_module, tuple(torch.randn(value.shape).to(value.dtype) for value in values), 0)


def run(captured: Captured, graph_module: GraphModule) -> list[Any]:
    """The graph's outputs, and its inputs after it wrote to them, from the same seed each time."""
    inputs = [tensor.detach().clone() if isinstance(tensor, torch.Tensor) else tensor for tensor in captured.inputs]
    torch.manual_seed(1)
    with torch.no_grad():
        outputs = torch.fx.Interpreter(graph_module).run(*inputs, enable_io_processing=False)
    return [*outputs, *inputs, torch.get_rng_state()]


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes in the order of its elements, whatever its strides."""
    return tensor.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)


def assert_bitwise_equal(captured: Captured, before: GraphModule, after: GraphModule) -> None:
    """Both graphs return the same bits, write the same bits, and leave the generator in the same state."""
    first, second = run(captured, before), run(captured, after)
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert type(one) is type(other)
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype
            assert one.stride() == other.stride()
            assert torch.equal(bits_of(one), bits_of(other))
        else:
            assert one == other


class Sketch:
    """A graph written by hand; each call's value is what its operator gives on fake tensors."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.constants: dict[str, torch.Tensor] = {}
        self.mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)

    def input(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Node:
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        return node

    def constant(self, name: str, value: torch.Tensor) -> Node:
        self.constants[name] = value
        node = self.graph.get_attr(name)
        node.meta["val"] = self.mode.from_tensor(value, static_shapes=True)
        return node

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        # The name that tracing would give: without the overload.
        name = target.__name__.partition(".")[0]
        node = self.graph.create_node("call_function", target, args, kwargs, name=name)
        values = torch.fx.map_arg((args, kwargs), lambda item: item.meta["val"])
        with self.mode, torch.no_grad():
            node.meta["val"] = target(*values[0], **values[1])
        return node

    def returns(self, *nodes: Node | None) -> GraphModule:
        self.graph.output(nodes)
        return GraphModule(self.constants, self.graph)
