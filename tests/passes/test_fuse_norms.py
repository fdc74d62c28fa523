from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch.fx import GraphModule

from examples.models.families import DECODER, ENCODER, VOCABULARY, causal_batch, library
from passes import FuseNorms, PassError, diff_graphs, find_norms, format_graph
from tests.marks import slow
from tests.passes.capture import Sketch, aten
from tests.passes.operators import Operators, assert_same_gradients, capture_operators

WIDTH = 12
RMS = "torch traces `rms_norm` into the same calls, so that fusing an RMSNorm saves nothing"


def sketch(*, returned: bool = False) -> GraphModule:
    sketch = Sketch()
    x, weight, bias = sketch.input("hidden", 2, 8), sketch.input("weight", 8), sketch.input("bias", 8)
    mean = sketch.call(aten.mean.dim, x, [-1], True)
    centred = sketch.call(aten.sub.Tensor, x, mean)
    var = sketch.call(aten.add.Tensor, sketch.call(aten.var.dim, x, [-1], False, True), 1e-5)
    normed = sketch.call(aten.mul.Tensor, centred, sketch.call(aten.rsqrt.default, var))
    result = sketch.call(aten.add.Tensor, sketch.call(aten.mul.Tensor, normed, weight), bias)
    return sketch.returns(result, mean) if returned else sketch.returns(result)


def test_golden() -> None:
    assert_expected_inline(
        format_graph(FuseNorms()(sketch())),
        """\
input hidden: f32[2, 8]
input weight: f32[8]
input bias: f32[8]
layer_norm: f32[2, 8] = aten.layer_norm(hidden, [8], weight, bias, 1e-05)
return (layer_norm,)""",
    )


def test_a_part_that_is_returned() -> None:
    before = sketch(returned=True)
    assert not diff_graphs(before, FuseNorms()(before))
    assert [str(module) for module in find_norms(before)] == ["rsqrt: mean is returned as well"]


def test_a_named_norm_that_cannot_be_is_refused() -> None:
    with pytest.raises(PassError, match="returned as well"):
        FuseNorms(norms=frozenset({"rsqrt"}))(sketch(returned=True))
    with pytest.raises(PassError, match="it is no square root by which a norm divides"):
        FuseNorms(norms=frozenset({"sub"}))(sketch())
    assert not diff_graphs(sketch(), FuseNorms(norms=frozenset())(sketch()))


def tensors(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (3, 5, WIDTH), "w": (WIDTH,), "b": (WIDTH,)}
    return {
        name: torch.randn(*shape, dtype=dtype, generator=generator).requires_grad_() for name, shape in shapes.items()
    }


def original(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """As in the first BERT: Devlin et al. in TensorFlow's words."""
    u = x.mean(-1, keepdim=True)
    s = (x - u).pow(2).mean(-1, keepdim=True)
    return w * ((x - u) / torch.sqrt(s + 1e-12)) + b


def cohere(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    dtype = x.dtype
    x = x.to(torch.float64)
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).pow(2).mean(-1, keepdim=True)
    x = (x - mean) * torch.rsqrt(variance + 1e-5)
    return (w.to(torch.float64) * x).to(dtype) + b


def of_statistics(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    variance, mean = torch.var_mean(x, -1, keepdim=True, correction=0)
    return (x - mean) / (variance + 1e-5) ** 0.5 * w + b


def weight_first(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    std, mean = torch.std_mean(x, 2, keepdim=True, correction=0)
    return w * (x - mean) / std + b


def inverted(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    d = x - x.mean((-1,), keepdim=True)
    inverse = 1 / torch.sqrt(torch.tensor(1e-5, dtype=x.dtype) + (d * d).mean(-1, keepdim=True))
    return d * inverse


def of_two_dimensions(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    d = x - x.mean((1, 2), keepdim=True)
    return d * ((d.square()).mean((-2, -1), keepdim=True) + 1e-5) ** -0.5 * w


FORMS: dict[str, tuple[Callable[..., Tensor], bool, bool]] = {
    "original": (original, True, True),
    "cohere": (cohere, True, True),
    "var": (
        lambda x, w, b: b + w * ((x - x.mean(-1, True)) * torch.rsqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-5)),
        True,
        True,
    ),
    "var_mean": (of_statistics, True, True),
    "weight first": (weight_first, True, True),
    "inverted, with the weight of the loss": (inverted, True, False),
    "two dimensions": (of_two_dimensions, False, False),
    "a weight of another shape": (lambda x, w, b: original(x, w[None], b), False, False),
}
"""With whether the weight and the bias go into the operator."""


def captured(call: Callable[..., Tensor], given: dict[str, Tensor], **options: Any) -> Operators:
    """With a loss in which each element counts differently."""

    def loss(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        result = call(x, w, b)
        return (result * torch.linspace(0.5, 2.0, WIDTH, dtype=result.dtype)).square().sum()

    return capture_operators(loss, **given, **options)


def norms(graph_module: GraphModule) -> list[Any]:
    return list(graph_module.graph.find_nodes(op="call_function", target=aten.layer_norm.default))


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str) -> None:
    call, has_weight, has_bias = FORMS[form]
    before = captured(call, tensors())
    assert [module.reason for module in find_norms(before.graph_module)] == [""]
    after = FuseNorms()(before.graph_module)
    (norm,) = norms(after)
    assert [argument is not None for argument in norm.args[2:4]] == [has_weight, has_bias]
    assert not find_norms(after)
    assert_same_gradients(before.graph_module, after, before.inputs, tolerance=1e-12)


def test_16_bits_with_a_norm_in_fp32() -> None:
    """The author's casts stay: what is normed, and what is multiplied, is of the same dtype as before."""

    def call(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        wide = x.float()
        d = wide - wide.mean(-1, keepdim=True)
        normed = d * torch.rsqrt(d.pow(2).mean(-1, keepdim=True) + 1e-5)
        return w * normed.to(x.dtype) + b

    before = captured(call, tensors(torch.bfloat16))
    after = FuseNorms()(before.graph_module)
    (norm,) = norms(after)
    assert norm.meta["val"].dtype == torch.float32
    assert norm.args[2:4] == (None, None)
    assert_same_gradients(before.graph_module, after, before.inputs, tolerance=5e-3)


def test_symbolic_sizes() -> None:
    given = {name: tensor.detach() for name, tensor in tensors().items()}

    def call(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return original(x.view(-1, WIDTH), w, b) * x.size(1)

    for name in "wb":
        torch._dynamo.mark_static(given[name])
    before = capture_operators(call, **given, dynamic=True)
    after = FuseNorms()(before.graph_module)
    assert len(norms(after)) == 1
    (one,), (other,) = (module(*before.inputs) for module in (before.graph_module, after))
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def rms(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def written_to(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = 2 * x.detach()
    d = y - y.mean(-1, keepdim=True)
    y.add_(x)
    return d * torch.rsqrt(d.pow(2).mean(-1, keepdim=True) + 1e-5) + y


def cast_between(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    d = x - x.mean(-1, keepdim=True, dtype=torch.float64)
    return d * torch.rsqrt(d.pow(2).mean(-1, keepdim=True) + 1e-5)


def channels_first(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    d = x - x.mean(1, keepdim=True)
    return d / torch.sqrt(d.pow(2).mean(1, keepdim=True) + 1e-6)


LEFT_ALONE: dict[str, tuple[Callable[..., Tensor], list[str]]] = {
    "RMSNorm": (rms, [RMS]),
    "over others": (channels_first, ["the norm is over dimension 1 of 3, not the last"]),
    "annotated transformer": (
        lambda x, w, b: w * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) + b,
        ["the variance is divided by n - 1, not by n"],
    ),
    "eps outside": (
        lambda x, w, b: (
            w * (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True).sqrt() + 1e-6) + b
        ),
        ["eps is added to the standard deviation, not to the variance"],
    ),
    "written to": (written_to, ["add_ writes to an input of the pattern before its last call"]),
    "transposed": (
        lambda x, w, b: original(x.transpose(0, 1), w, b).transpose(0, 1),
        ["the result of the norm is not contiguous"],
    ),
    "weight of another shape first": (
        lambda x, w, b: x[:1, :1] * (x - x.mean(-1, True)) / torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-5),
        ["the weight differs in shape from the normalised dimensions, or in dtype from the input"],
    ),
    "cast between": (cast_between, ["the calls to replace differ in dtype"]),
    "centred by another": (
        lambda x, w, b: (x - x.mean(1, keepdim=True)) * torch.rsqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-5),
        [],
    ),
    "a distance": (lambda x, w, b: torch.sqrt((x - w).pow(2).mean(-1, keepdim=True)) + x, []),
}


@pytest.mark.parametrize("form", LEFT_ALONE)
def test_left_alone_and_said(form: str) -> None:
    call, reasons = LEFT_ALONE[form]
    before = captured(call, tensors(torch.float32)).graph_module
    assert [module.reason for module in find_norms(before)] == reasons
    assert not diff_graphs(before, FuseNorms()(before))


T5: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 1, "num_heads": 4,
    "decoder_start_token_id": 0, "use_cache": False, "dropout_rate": 0.0,
}  # fmt: skip
SHALLOW: dict[str, Any] = {**DECODER, "intermediate_size": 352, "num_hidden_layers": 1}
BERT: dict[str, Any] = {"vocab_size": VOCABULARY, "max_position_embeddings": 256, **ENCODER, "num_hidden_layers": 1}
MODELS: dict[str, tuple[Callable[..., Any], int, list[str]]] = {
    "cohere": (library("Cohere", "CohereForCausalLM", "ForCausalLM", **SHALLOW), 2, []),
    "llama": (library("Llama", "LlamaForCausalLM", "ForCausalLM", **SHALLOW), 0, [RMS] * 3),
    "t5": (library("T5", "T5ForConditionalGeneration", **T5), 0, [RMS] * 7),
    "bert, fused by its authors": (library("Bert", "BertForMaskedLM", **BERT), 4, []),
}


@pytest.mark.parametrize("name", [name if name == "cohere" else slow(name) for name in MODELS])
def test_real_models(name: str) -> None:
    make, count, reasons = MODELS[name]
    before = capture_operators(make(), **causal_batch("shorter"))
    assert [module.reason for module in find_norms(before.graph_module) if module.reason] == reasons
    after = FuseNorms()(before.graph_module)
    assert len(norms(after)) == count
    assert_same_gradients(before.graph_module, after, before.inputs, tolerance=1e-5)


@pytest.mark.parametrize("form", ["original", "var", "var_mean"])
def test_one_activation_is_saved(form: str) -> None:
    before = captured(FORMS[form][0], tensors())
    saved: set[int] = set()

    def pack(tensor: Tensor) -> Tensor:
        if tensor.numel() == 3 * 5 * WIDTH:
            saved.add(tensor.data_ptr())
        return tensor

    counts = []
    for module in (before.graph_module, FuseNorms()(before.graph_module)):
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = module(*before.inputs)
        counts.append(len(saved))
        del loss
    assert counts == [4, 2]  # the loss saves one of them
