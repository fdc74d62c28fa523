import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.fx import GraphModule
from transformers.activations import ACT2FN

from examples.models.families import (
    DECODER,
    ENCODER,
    GPT2,
    VOCABULARY,
    causal_batch,
    library,
    masked_batch,
    t5_batch,
)
from passes import FuseActivations, PassError, diff_graphs, find_activations, format_graph
from tests.marks import slow
from tests.passes.capture import Sketch, aten
from tests.passes.operators import Operators, assert_same_gradients, capture_operators

ROOT, SCALE = math.sqrt(2.0), math.sqrt(2 / math.pi)


def sketch(*, returned: bool = False) -> GraphModule:
    sketch = Sketch()
    x = sketch.input("hidden", 2, 8)
    half = sketch.call(aten.mul.Tensor, x, 0.5)
    erf = sketch.call(aten.erf.default, sketch.call(aten.div.Tensor, x, ROOT))
    result = sketch.call(aten.mul.Tensor, half, sketch.call(aten.add.Tensor, erf, 1.0))
    return sketch.returns(result, erf) if returned else sketch.returns(result)


def test_golden() -> None:
    assert_expected_inline(
        format_graph(FuseActivations()(sketch())),
        """\
input hidden: f32[2, 8]
gelu: f32[2, 8] = aten.gelu(hidden)
return (gelu,)""",
    )


def test_a_part_that_is_returned() -> None:
    before = sketch(returned=True)
    assert not diff_graphs(before, FuseActivations()(before))
    assert [str(module) for module in find_activations(before)] == ["erf: erf is returned as well"]


def test_a_named_activation_that_cannot_be_is_refused() -> None:
    with pytest.raises(PassError, match="returned as well"):
        FuseActivations(activations=frozenset({"erf"}))(sketch(returned=True))
    with pytest.raises(PassError, match="it is in no formula that looks like GELU or SiLU"):
        FuseActivations(activations=frozenset({"div"}))(sketch())


def test_only_the_named_ones() -> None:
    before = capture_operators(lambda x: (x * x.sigmoid()).sin() * x.sigmoid(), x=torch.randn(4)).graph_module
    assert [module.name for module in find_activations(before)] == ["sigmoid"]
    assert not diff_graphs(before, FuseActivations(activations=frozenset())(before))
    assert "silu" in format_graph(FuseActivations(activations=frozenset({"sigmoid"}))(before))


class OfTensors(nn.Module):
    """Its constants are tensors, as in code that was made from TensorFlow's."""

    def forward(self, x: Tensor) -> Tensor:
        root = torch.sqrt(torch.tensor(2.0 / math.pi, dtype=x.dtype))
        return torch.full((), 0.5, dtype=x.dtype) * x * (1.0 + torch.tanh(root * (x + 0.044715 * x**3)))


def distributed(x: Tensor) -> Tensor:
    half = x / 2
    return half + half * torch.tanh(x * SCALE + (SCALE * 0.044715) * (x * x * x))


FORMS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "gelu_new": ("gelu_tanh", ACT2FN["gelu_new"]),
    "gelu_accurate": ("gelu_tanh", ACT2FN["gelu_accurate"]),
    "gelu_python_tanh": ("gelu_tanh", ACT2FN["gelu_python_tanh"]),
    "gelu_python": ("gelu", ACT2FN["gelu_python"]),
    "constants as tensors": ("gelu_tanh", OfTensors()),
    "distributed": ("gelu_tanh", distributed),
    "square": ("gelu_tanh", lambda x: x * (0.5 * (SCALE * x * (1 + 0.044715 * x.square())).tanh() + 0.5)),
    "sigmoid": ("gelu_tanh", lambda x: x * torch.sigmoid(2 * SCALE * (x + 0.044715 * x**3))),
    "erfc": ("gelu", lambda x: 0.5 * torch.erfc(-x / ROOT) * x),
    "special": ("gelu", lambda x: (torch.special.erf(x * ROOT**-1) + 1) * x / 2),
    "minus": ("gelu", lambda x: 0.5 * x - 0.5 * x * torch.erf(-(x / ROOT))),
    "silu": ("silu", lambda x: x * torch.sigmoid(x)),
    "silu by tanh": ("silu", lambda x: 0.5 * x * (1 + torch.tanh(0.5 * x))),
    "of a product": ("silu", lambda x: (lambda y: torch.sigmoid(y) * y)(x * 3.0)),
    "of a sum": ("gelu", lambda x: ACT2FN["gelu_python"](x + x.flip(0))),
}


def captured(call: Callable[[Tensor], Tensor], x: Tensor, **options: Any) -> Operators:
    """With a loss in which each element counts differently."""

    def loss(x: Tensor) -> Tensor:
        result = call(x)
        return (result * torch.linspace(0.5, 2.0, result.size(-1), dtype=result.dtype)).sum()

    return capture_operators(loss, x=x, **options)


def inputs(dtype: torch.dtype = torch.float64) -> Tensor:
    return (3 * torch.randn(5, 7, dtype=dtype, generator=torch.Generator().manual_seed(0))).requires_grad_()


def fused_calls(graph_module: GraphModule) -> list[Any]:
    return [node for node in graph_module.graph.nodes if node.target in (aten.gelu.default, aten.silu.default)]


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str) -> None:
    kind, call = FORMS[form]
    before = captured(call, inputs())
    assert [(module.kind, module.reason) for module in find_activations(before.graph_module)] == [(kind, "")]
    after = FuseActivations()(before.graph_module)
    (fused,) = fused_calls(after)
    assert (fused.target is aten.silu.default) == (kind == "silu")
    assert dict(fused.kwargs) == ({"approximate": "tanh"} if kind == "gelu_tanh" else {})
    assert not find_activations(after)
    assert_same_gradients(before.graph_module, after, before.inputs, tolerance=1e-12)


def test_rounded_constants_are_the_same_in_fp32_alone() -> None:
    for dtype, count in ((torch.float32, 1), (torch.float64, 0)):
        before = captured(ACT2FN["gelu_fast"], inputs(dtype))
        after = FuseActivations()(before.graph_module)
        assert len(fused_calls(after)) == count
        assert_same_gradients(before.graph_module, after, before.inputs, tolerance=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["gelu_new", "gelu_python"])
def test_computed_wide_and_cast_back(dtype: torch.dtype, name: str) -> None:
    """The fused operator computes in fp32 too: only an output that lies between two numbers may differ."""
    before = captured(lambda x: ACT2FN[name](x.float()).to(x.dtype), inputs(dtype))
    after = FuseActivations()(before.graph_module)
    (fused,) = fused_calls(after)
    assert fused.meta["val"].dtype == dtype
    assert not any(node.target is aten.to.dtype for node in after.graph.nodes)
    assert_same_gradients(before.graph_module, after, before.inputs, tolerance=1e-3)


def test_16_bits_from_step_to_step() -> None:
    before = captured(ACT2FN["gelu_new"], inputs(torch.bfloat16))
    after = FuseActivations()(before.graph_module)
    assert len(fused_calls(after)) == 1
    assert_same_gradients(before.graph_module, after, before.inputs, tolerance=0.02)


def test_symbolic_sizes() -> None:
    before = captured(
        lambda x: x * (1.0 + torch.erf(x * 0.7071067811865476)) * 0.5 * x.size(0), inputs().detach(), dynamic=True
    )
    after = FuseActivations()(before.graph_module)
    assert len(fused_calls(after)) == 1
    (one,), (other,) = (module(*before.inputs) for module in (before.graph_module, after))
    torch.testing.assert_close(one, other, rtol=1e-12, atol=0)


def read_too(x: Tensor) -> Tensor:
    tanh = torch.tanh(0.5 * x)
    return 0.5 * x * (1 + tanh) + tanh


def written_to(x: Tensor) -> Tensor:
    twice = 2 * x
    sigmoid = torch.sigmoid(twice)
    twice.detach().add_(1)
    return twice.detach() * sigmoid


def cast_between(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x.float()).to(x.dtype)


LEFT_ALONE: dict[str, tuple[Callable[[Tensor], Tensor], list[str]]] = {
    "quick GELU": (ACT2FN["quick_gelu"], ["the formula is 0.5 x (1 + tanh(0.851 x)), which is neither GELU nor SiLU"]),
    "another constant": (
        lambda x: 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.044715 * x**3))),
        ["the formula is 0.5 x (1 + tanh(0.8 x + 0.035772 x^3)), which is neither GELU nor SiLU"],
    ),
    "erf of another": (
        lambda x: 0.5 * x * (1 + torch.erf(x)),
        ["the formula is 0.5 x (1 + erf(1 x)), which is neither GELU nor SiLU"],
    ),
    "read too": (read_too, ["tanh is read by add_1 as well"]),
    "cast between": (cast_between, ["the calls to replace differ in dtype"]),
    "another layout": (
        lambda x: (lambda y: 0.5 * (y / ROOT).contiguous().erf().add(1) * y)(x.t()),
        ["the calls to replace differ in memory layout"],
    ),
    "compared": (lambda x: x * torch.sigmoid(x * (x > 0)), []),
    "softcap": (lambda x: 30 * torch.tanh(x / 30), []),
    "a gate of another": (lambda x: x.flip(0) * torch.sigmoid(x), []),
    "a learned slope": (lambda x: x * torch.sigmoid(x * x.mean()), []),
    "tanh gelu of two": (lambda x: 0.5 * x * (1 + torch.tanh(SCALE * (x + 0.044715 * x.detach() ** 3))), []),
    "written to": (written_to, []),
}


@pytest.mark.parametrize("form", LEFT_ALONE)
def test_left_alone_and_said(form: str) -> None:
    call, reasons = LEFT_ALONE[form]
    before = captured(call, inputs(torch.float32 if form != "cast between" else torch.bfloat16)).graph_module
    assert [module.reason for module in find_activations(before)] == reasons
    assert not diff_graphs(before, FuseActivations()(before))


def test_a_write_between() -> None:
    sketch = Sketch()
    x, other = sketch.input("x", 4), sketch.input("other", 4)
    sigmoid = sketch.call(aten.sigmoid.default, x)
    sketch.call(aten.copy_.default, x, other)
    before = sketch.returns(sketch.call(aten.mul.Tensor, x, sigmoid))
    assert [module.reason for module in find_activations(before)] == [
        "copy_ writes to an input of the pattern before its last call"
    ]
    assert not diff_graphs(before, FuseActivations()(before))


T5: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 1, "num_heads": 4,
    "decoder_start_token_id": 0, "use_cache": False, "dropout_rate": 0.0, "feed_forward_proj": "gated-gelu",
}  # fmt: skip
BERT: dict[str, Any] = {"vocab_size": VOCABULARY, "max_position_embeddings": 256, **ENCODER, "num_hidden_layers": 1}
LLAMA: dict[str, Any] = {**DECODER, "intermediate_size": 352, "num_hidden_layers": 2, "hidden_act": "gelu_python"}
MODELS: dict[str, tuple[Callable[..., Any], Callable[..., Any], list[str]]] = {
    "gpt2": (
        library("GPT2", "GPT2LMHeadModel", "ForCausalLM", **{**GPT2, "n_layer": 2, "attn_pdrop": 0.0}),
        causal_batch,
        ["gelu_tanh"] * 2,
    ),
    "llama": (library("Llama", "LlamaForCausalLM", "ForCausalLM", **LLAMA), causal_batch, ["gelu"] * 2),
    "t5": (library("T5", "T5ForConditionalGeneration", **T5), t5_batch, ["gelu_tanh"] * 2),
    "bert, fused by its authors": (library("Bert", "BertForMaskedLM", **BERT), masked_batch, []),
}


@pytest.mark.parametrize("name", [name if name == "gpt2" else slow(name) for name in MODELS])
def test_real_models(name: str) -> None:
    make, batch, kinds = MODELS[name]
    before = capture_operators(make(), **batch("shorter"))
    assert [module.kind for module in find_activations(before.graph_module)] == kinds
    after = FuseActivations()(before.graph_module)
    assert len(fused_calls(after)) == (len(kinds) or len(fused_calls(before.graph_module)))
    assert_same_gradients(before.graph_module, after, before.inputs, tolerance=1e-5, noise=1e-5)


@pytest.mark.parametrize(("form", "count"), [("gelu_new", 4), ("gelu_python", 3), ("silu", 2)])
def test_one_activation_is_saved(form: str, count: int) -> None:
    before = captured(FORMS[form][1], inputs())
    saved: set[int] = set()

    def pack(tensor: Tensor) -> Tensor:
        if tensor.numel() == 35:
            saved.add(tensor.data_ptr())
        return tensor

    counts = []
    for module in (before.graph_module, FuseActivations()(before.graph_module)):
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = module(*before.inputs)
        counts.append(len(saved))
        del loss
    assert counts == [count, 1]
