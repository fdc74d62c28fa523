"""Which activations are saved in 16 or 8 bits, and which layers compute in 8 bits."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

import memopt
from memopt.capture.operators import OperatorGraph
from memopt.device import hardware
from memopt.rewrite.dtypes import Rules
from memopt.rewrite.narrow import LEAST_BYTES, DecideFp8, has_units, narrowed, quantized, quantizing
from passes import CANONICAL, NarrowSaved
from passes.ops.fp8_formats import E4M3
from passes.ops.fp8_ops import FP8_LINEAR, MATMUL, QUANTIZE
from tests.passes.capture import Sketch, aten, capture

ROWS, WIDTH = LEAST_BYTES // 4, 8


def normalised() -> GraphModule:
    """A norm, a softmax and the logarithm of one, with what their backwards read."""
    sketch = Sketch()
    x, tangent = sketch.input("primals_1", ROWS, WIDTH), sketch.input("tangents_1", ROWS, WIDTH)
    hidden = sketch.call(aten.tanh.default, x)
    rstd = sketch.call(aten.rsqrt.default, sketch.call(aten.mean.dim, hidden, [-1], True))
    likely = sketch.call(aten._softmax.default, hidden, -1, False)
    logs = sketch.call(aten._log_softmax.default, hidden, -1, False)
    gradients = [
        sketch.call(aten.mul.Tensor, tangent, hidden),
        sketch.call(aten.mul.Tensor, tangent, rstd),
        sketch.call(aten._softmax_backward_data.default, tangent, likely, -1, torch.float32),
        sketch.call(aten._log_softmax_backward_data.default, tangent, logs, -1, torch.float32),
    ]
    return sketch.returns(sketch.call(aten.exp.default, likely), *gradients)


def test_products_are_tolerant_exponents_and_statistics_are_not() -> None:
    assert narrowed(normalised().graph, 1) == ("tanh", "_softmax")


def test_what_is_returned_stays_as_it_is() -> None:
    graph_module = normalised()
    output = graph_module.graph.output_node()
    (results,) = output.args
    hidden = next(node for node in graph_module.graph.nodes if node.name == "tanh")
    output.args = ((hidden, *results),)  # type: ignore[misc]
    assert narrowed(graph_module.graph, 2) == ("_softmax",)


def test_one_reader_that_needs_all_bits_is_enough() -> None:
    graph_module = normalised()
    output = graph_module.graph.output_node()
    (results,) = output.args
    named = {node.name: node for node in graph_module.graph.nodes}
    with graph_module.graph.inserting_before(output):
        logs = graph_module.graph.call_function(aten.sub.Tensor, (named["tangents_1"], named["tanh"]))
    logs.meta["val"] = named["tanh"].meta["val"]
    output.args = ((*results, logs),)  # type: ignore[misc]
    assert narrowed(graph_module.graph, 1) == ("_softmax",)


def test_the_gradient_of_a_number_is_summed_from_values_with_all_bits() -> None:
    graph_module = normalised()
    output = graph_module.graph.output_node()
    (results,) = output.args
    named = {node.name: node for node in graph_module.graph.nodes}
    with graph_module.graph.inserting_before(output):
        total = graph_module.graph.call_function(aten.sum.default, (named["mul"],))
    total.meta["val"] = named["tanh"].meta["val"].new_empty(())
    output.args = ((*results, total),)  # type: ignore[misc]
    assert narrowed(graph_module.graph, 1) == ("_softmax",)


class Scaled(nn.Module):
    """A residual stream with a learned weight for each layer, as nanochat's: norms behind it leave the scale of the
    stream without effect, so that the gradient of the first weight is next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(64, 128), nn.Linear(128, 64)
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(3))
        self.scales = nn.Parameter(torch.ones(3))
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=1e-4)  # type: ignore[arg-type]

    def forward(self, tokens: Tensor) -> Tensor:
        x = nn.functional.rms_norm(self.words(tokens), (128,))
        for number, layer in enumerate(self.layers):
            x = self.scales[number] * x
            x = x + layer(nn.functional.rms_norm(x, (128,)))
        logits = self.head(nn.functional.rms_norm(x, (128,)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


@pytest.mark.plans_always
def test_weights_of_a_residual_stream_get_no_noise_for_gradients() -> None:
    torch.manual_seed(0)
    plain = Scaled().train()
    models, tokens = [copy.deepcopy(plain) for _ in range(2)], torch.randint(0, 64, (16, 64))
    memopt.optimize(models[0], 1, precision="bf16", optimizer=None)
    within = torch.autocast("cpu", torch.bfloat16)
    for model, types in zip((plain, *models), (nullcontext(), nullcontext(), within), strict=True):
        with types:
            loss = model(tokens)
        loss.backward()
    expected, found, autocast = (model.scales.grad for model in (plain, *models))
    off = [(gradient - expected).norm() for gradient in (found, autocast)]
    assert off[0] <= 2 * off[1]


@pytest.mark.plans_always
@pytest.mark.parametrize(
    "norm", [nn.LayerNorm(128), nn.RMSNorm(128), nn.GroupNorm(8, 128)], ids=lambda norm: norm._get_name()
)
def test_a_number_before_a_norm_gets_the_gradient_that_it_has_under_autocast(norm: nn.Module) -> None:
    """The norms' backwards, which return several values, are on the way to it."""

    class Before(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm, self.head = nn.Linear(128, 128), norm, nn.Linear(128, 128)
            self.scale = nn.Parameter(torch.tensor(0.7))

        def forward(self, x: Tensor) -> Tensor:
            hidden = (x + 0.1 * self.layer(x).float()) * self.scale
            return (self.head(self.norm(hidden)).float() - x).square().mean()

    torch.manual_seed(0)
    within, x = Before(), torch.randn(512, 128)
    planned = copy.deepcopy(within)
    memopt.optimize(planned, 1, precision="bf16", optimizer=None)
    planned(x).backward()
    with torch.autocast("cpu", torch.bfloat16):
        loss = within(x)
    loss.backward()
    torch.testing.assert_close(planned.scale.grad, within.scale.grad, rtol=0.01, atol=0)


BF16 = torch.bfloat16
H100, CPU = hardware("h100"), hardware("cpu")


class Network(Sketch):
    """Layers in bf16."""

    def layer(self, x: Node, columns: int, weight: Node | None = None) -> Node:
        name = f"weight_{len(self.graph.nodes)}"
        weight = weight or self.input(name, columns, x.meta["val"].shape[1], dtype=BF16)
        return self.call(aten.linear.default, x, weight)


def attention(rows: int = 8192, width: int = 4096) -> GraphModule:
    """Three layers with one input, one layer on their attention, and one behind it: linear, linear_1, …, linear_4."""
    network = Network()
    x = network.input("x", rows, width, dtype=BF16)
    q, k, v = network.layer(x, width), network.layer(x, width), network.layer(x, width)
    joined = network.call(aten.add.Tensor, network.call(aten.add.Tensor, q, k), v)
    return network.returns(network.layer(network.layer(joined, width), width))


def rewritten(decide: DecideFp8, module: GraphModule) -> list[str]:
    return sorted(decide(OperatorGraph(module, frozenset())).reasons)


def notes(decide: DecideFp8, module: GraphModule) -> str:
    return "; ".join(decide(OperatorGraph(module, frozenset())).notes)


def test_large_layers_are_taken_on_a_card_with_units_and_the_last_is_not() -> None:
    assert rewritten(DecideFp8(H100), attention()) == ["linear", "linear_1", "linear_2", "linear_3"]
    assert "4 of 5 layers in e4m3, gradients in e5m2, current scaling" in notes(DecideFp8(H100), attention())
    assert "a layer is left alone, since no other layer follows it" in notes(DecideFp8(H100), attention())


def test_small_ones_are_not() -> None:
    small = attention(rows=64, width=64)
    assert rewritten(DecideFp8(H100), small) == []
    assert len(DecideFp8(H100)(OperatorGraph(small, frozenset())).pipeline) == 0
    assert "too small for 8 bits to be faster" in notes(DecideFp8(H100), small)


def test_all_are_where_memory_asks_and_there_are_no_units() -> None:
    for decide in (DecideFp8(CPU), DecideFp8(hardware("a100-80")), DecideFp8(H100, scaling="mx")):
        assert len(rewritten(decide, attention(rows=64, width=64))) == 4
    assert "cpu has no such 8-bit units and multiplies dequantised copies" in notes(
        DecideFp8(CPU), attention(rows=64, width=64)
    )


def test_which_cards_have_units_for_which_scales() -> None:
    found = {
        scaling: [
            card for card in ("a100-80", "l4", "h100", "b200", "rtx-5090", "cpu") if has_units(hardware(card), scaling)
        ]
        for scaling in ("current", "delayed", "block", "mx")
    }
    every = ["l4", "h100", "b200", "rtx-5090"]
    assert found == {"current": every, "delayed": every, "block": ["h100"], "mx": ["b200", "rtx-5090"]}


def test_microscaled_layers_have_sizes_of_32_and_gradients_in_e4m3() -> None:
    decide = DecideFp8(hardware("b200"), scaling="mx")
    assert rewritten(decide, attention()) == ["linear", "linear_1", "linear_2", "linear_3"]
    assert "4 of 5 layers in e4m3, gradients in e4m3, mx scaling" in notes(decide, attention())
    assert "its 48 rows are no multiple of 32" in notes(decide, attention(rows=48))


def test_layers_of_one_input_are_decided_on_together() -> None:
    """A layer that is too small by itself is rewritten with large ones, whose 8-bit input it shares."""

    def module(*columns: int) -> GraphModule:
        network = Network()
        x = network.input("x", 4096, 2048, dtype=BF16)
        layers = [network.layer(x, column) for column in columns]
        return network.returns(*(network.layer(network.call(aten.relu.default, item), 16) for item in layers))

    assert "linear" not in rewritten(DecideFp8(H100), module(64))
    assert {"linear", "linear_1"} <= set(rewritten(DecideFp8(H100), module(64, 8192)))


def test_an_embeddings_weight_is_left_alone() -> None:
    network = Network()
    weight = network.input("weight", 512, 64, dtype=BF16)
    tokens = network.input("tokens", 32, dtype=torch.int64)
    hidden = network.call(aten.embedding.default, weight, tokens)
    module = network.returns(network.layer(network.layer(hidden, 512, weight), 16))
    assert rewritten(DecideFp8(CPU), module) == []
    assert "an embedding shares its weight" in notes(DecideFp8(CPU), module)


def test_wishes_are_kept() -> None:
    module = attention(rows=64, width=64)
    decide = DecideFp8(CPU, Rules((("linear_1", BF16),)))
    assert "linear_1" not in rewritten(decide, module)
    assert "a rule of yours sets its dtype" in notes(decide, module)
    decision = DecideFp8(CPU)(OperatorGraph(module, frozenset(), author_typed=frozenset({"linear_3"})))
    assert "linear_3" not in decision.reasons


def test_autocast_is_left_its_types() -> None:
    with torch.autocast("cpu", BF16):
        assert rewritten(DecideFp8(CPU), attention(rows=64, width=64)) == []


def test_layers_of_one_input_share_its_copy() -> None:
    """In the joint graph there is one copy in 8 bits of what three layers read, and the backward reads that."""

    class Three(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = torch.nn.ParameterList(torch.randn(64, 64) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.tanh()
            q, k, v = (FP8_LINEAR(x, weight) for weight in self.weights)
            return (q * k * v).float().sum()

    joint = CANONICAL(capture(Three(), torch.randn(2, 32, 64, dtype=BF16, requires_grad=True)).graph_module)
    copies = [node for node in joint.graph.nodes if node.target is QUANTIZE]
    of_tanh = [node for node in copies if node.meta["val"][0].shape == (64, 64) and "tanh" in _sources(node)]
    assert len(of_tanh) == 1
    products = [node for node in joint.graph.nodes if node.target is MATMUL]
    assert len(products) == 9
    (narrow,) = [user for user in of_tanh[0].users if user.args[1] == 0]
    assert sum(narrow in node.all_input_nodes for node in products) == 6


def _sources(node: Node) -> set[str]:
    """The nodes that copies are made from, behind views."""
    found, node = set(), node.all_input_nodes[0]
    while node.op != "placeholder" and "view" in node.name:
        node = node.all_input_nodes[0]
    found.add(node.name)
    return found


def saving() -> GraphModule:
    """A joint graph: silu, which a product and a smooth derivative read, and exp, which a sum reads."""
    sketch = Sketch()
    x, tangent = (sketch.input(name, 64, 2048, dtype=BF16) for name in ("primals_1", "tangents_1"))
    doubled = sketch.call(aten.mul.Tensor, x, 2.0)
    silu, exp = sketch.call(aten.silu.default, doubled), sketch.call(aten.exp.default, x)
    gate = sketch.call(aten.mul.Tensor, tangent, silu)
    slope = sketch.call(aten.silu_backward.default, tangent, doubled)
    other = sketch.call(aten.sum.default, sketch.call(aten.add.Tensor, tangent, exp))
    return sketch.returns(sketch.call(aten.neg.default, x), gate, slope, other)


def test_what_tolerant_operators_read_is_kept_in_8_bits() -> None:
    module = saving()
    assert quantized(module.graph, 1) == ("mul", "silu")
    assert NarrowSaved(("mul", "silu"), E4M3) in list(quantizing(module, 1))


def test_what_is_returned_stays() -> None:
    module = saving()
    output = module.graph.output_node()
    silu = next(node for node in module.graph.nodes if node.name == "silu")
    output.args = ([silu, *output.args[0][1:]],)  # type: ignore[index]
    assert quantized(module.graph, 1) == ("mul",)
