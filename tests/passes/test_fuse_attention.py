import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch.fx import GraphModule

from examples.models.families import (
    DECODER,
    ENCODER,
    GPT2,
    VOCABULARY,
    causal_batch,
    image_batch,
    library,
    masked_batch,
    padded_batch,
    t5_batch,
)
from passes import FuseAttention, PassError, diff_graphs, find_attentions, format_graph
from tests.marks import slow
from tests.passes.capture import Sketch, aten
from tests.passes.operators import Operators, assert_same_gradients, capture_operators, outputs_and_gradients

SDPA = aten.scaled_dot_product_attention.default
BATCH, HEADS, LENGTH, WIDTH = 2, 3, 10, 8
INFINITE, LEAST = float("-inf"), torch.finfo(torch.float32).min


def sketch(*, returned: bool = False, masked: bool = False) -> GraphModule:
    sketch = Sketch()
    query, key, value = (sketch.input(name, 2, 4, 8, 16) for name in ("query", "key", "value"))
    scores = sketch.call(aten.matmul.default, query, sketch.call(aten.transpose.int, key, -2, -1))
    scores = sketch.call(aten.mul.Tensor, scores, 0.25)
    if masked:
        scores = sketch.call(aten.add.Tensor, scores, sketch.input("mask", 2, 1, 8, 8))
    else:
        unseen = sketch.call(aten.triu.default, sketch.call(aten.ones.default, [8, 8], dtype=torch.bool), 1)
        scores = sketch.call(aten.masked_fill.Scalar, scores, unseen, INFINITE)
    softmax = sketch.call(aten.softmax.int, scores, -1)
    result = sketch.call(aten.matmul.default, softmax, value)
    return sketch.returns(result, softmax) if returned else sketch.returns(result)


def test_a_mask_that_is_an_input_may_mask_every_score_of_a_row() -> None:
    before = sketch(masked=True)
    assert not diff_graphs(before, FuseAttention()(before))


def test_golden() -> None:
    assert_expected_inline(
        format_graph(FuseAttention()(sketch())),
        """\
input query: f32[2, 4, 8, 16]
input key: f32[2, 4, 8, 16]
input value: f32[2, 4, 8, 16]
ones: b8[8, 8] = aten.ones([8, 8], dtype=b8)
triu: b8[8, 8] = aten.triu(ones, 1)
logical_not: b8[8, 8] = aten.logical_not(triu)
scaled_dot_product_attention: f32[2, 4, 8, 16] = aten.scaled_dot_product_attention(query, key, value, logical_not, scale=0.25)
return (scaled_dot_product_attention,)""",  # noqa: E501
    )


def test_returned_probabilities_are_left_alone() -> None:
    before = sketch(returned=True)
    assert not diff_graphs(before, FuseAttention()(before))
    assert [str(module) for module in find_attentions(before)] == ["softmax: softmax is returned as well"]


def test_a_named_attention_that_cannot_be_is_refused() -> None:
    with pytest.raises(PassError, match="returned as well"):
        FuseAttention(attentions=frozenset({"softmax"}))(sketch(returned=True))
    with pytest.raises(PassError, match="no softmax whose result is multiplied"):
        FuseAttention(attentions=frozenset({"mul"}))(sketch())


def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(BATCH, HEADS, LENGTH, WIDTH, requires_grad=True) for _ in range(3))
    seen = torch.ones(LENGTH, LENGTH).tril().bool()
    padded = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    padded[1, -3:] = False
    return {"q": q, "k": k, "v": v, "seen": seen, "padded": padded}


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))


def weigh(masked: Tensor, v: Tensor) -> Tensor:
    """A loss in which each element of softmax(masked) V counts differently."""
    result = masked.softmax(-1) @ v
    return (result * torch.linspace(0.5, 2.0, result.numel()).view_as(result)).sum()


def nanogpt(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, padded: Tensor) -> Tensor:
    attention = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    attention = attention.masked_fill(seen[None, None] == 0, float("-inf"))
    attention = torch.nn.functional.softmax(attention, dim=-1)
    attention = torch.nn.functional.dropout(attention, 0.0)
    return (attention @ v).transpose(1, 2).contiguous().view(BATCH, LENGTH, HEADS * WIDTH).square().sum()


def single_head(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, padded: Tensor) -> Tensor:
    q, k, v = (item.flatten(0, 1) for item in (q, k, v))
    weights = torch.bmm(q, k.transpose(1, 2)).masked_fill(~seen, INFINITE).softmax(2)
    return torch.bmm(weights, v).square().sum()


def relative(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, padded: Tensor) -> Tensor:
    """A bias that gets a gradient, in a sum the other way round."""
    return weigh((q * 0.1) @ q.mT + scores(q, k).masked_fill(~seen, INFINITE), v)


FORMS: dict[str, Callable[..., Tensor]] = {
    "no mask": lambda q, k, v, seen, padded: weigh(scores(q, k), v),
    "nanogpt": nanogpt,
    "single head": single_head,
    "relative": relative,
    "least fill": lambda q, k, v, seen, padded: weigh(scores(q, k).masked_fill(~seen, LEAST), v),
    "where": lambda q, k, v, seen, padded: weigh(torch.where(seen, scores(q, k), -1e9), v),
    "where, a tensor": lambda q, k, v, seen, padded: weigh(
        torch.where(seen, scores(q, k), torch.full([], LEAST, dtype=torch.float32)), v
    ),
    "in place": lambda q, k, v, seen, padded: weigh(scores(q, k).masked_fill_(~seen, INFINITE), v),
    "two masks": lambda q, k, v, seen, padded: weigh(
        scores(q, k).masked_fill(~seen, INFINITE).masked_fill(~padded[:, None, None], INFINITE), v
    ),
    "scaled query": lambda q, k, v, seen, padded: weigh((q * 0.3) @ k.permute(0, 1, 3, 2), v),
    "upcast": lambda q, k, v, seen, padded: (
        (torch.softmax(scores(q, k), -1, dtype=torch.float32).to(q.dtype) @ v).square().sum()
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str) -> None:
    captured = capture_operators(FORMS[form], **tensors())
    after = FuseAttention()(captured.graph_module)
    targets = [node.target for node in after.graph.nodes]
    assert SDPA in targets
    assert aten.softmax.int not in targets
    assert_same_gradients(captured.graph_module, after, captured.inputs, tolerance=1e-5)


def _number(captured: Operators, name: str) -> int:
    """An input's position among those that require a gradient."""
    nodes = captured.graph_module.graph.find_nodes(op="placeholder")
    pairs = zip(nodes, captured.inputs, strict=True)
    return [str(node.target) for node, value in pairs if value.requires_grad].index(name)


@pytest.mark.parametrize("number", [LEAST, -1e9])
@pytest.mark.parametrize("where", [False, True])
def test_a_row_that_is_masked_whole_with_a_number(number: float, where: bool) -> None:
    """It gives all values the same weight, and its scores get no gradient."""

    def call(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, padded: Tensor) -> Tensor:
        rows = padded[:, None, :, None]
        return weigh(torch.where(rows, scores(q, k), number) if where else scores(q, k).masked_fill(~rows, number), v)

    captured = capture_operators(call, **tensors())
    after = FuseAttention()(captured.graph_module)
    assert_same_gradients(captured.graph_module, after, captured.inputs, tolerance=1e-5)
    _, gradients = outputs_and_gradients(after, captured.inputs)
    of_queries = gradients[_number(captured, "k_q")]
    assert of_queries is not None
    assert (of_queries[1, :, -3:] == 0).all()


def test_a_row_that_is_masked_whole_with_infinity_is_zeros_rather_than_nan() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, padded: Tensor, **_: Tensor) -> Tensor:
        return scores(q, k).masked_fill(~padded[:, None, :, None], INFINITE).softmax(-1) @ v

    captured = capture_operators(call, **tensors())
    (plain,), (fused,) = (
        module(*captured.inputs) for module in (captured.graph_module, FuseAttention()(captured.graph_module))
    )
    assert torch.equal(plain.isnan(), fused == 0)
    torch.testing.assert_close(fused, plain.nan_to_num(0.0))


def dropped(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, padded: Tensor) -> Tensor:
    return (torch.nn.functional.dropout(scores(q, k).softmax(-1), 0.25) @ v).square().sum()


def test_dropout_is_left_alone() -> None:
    captured = capture_operators(dropped, **tensors())
    before = captured.graph_module
    assert not diff_graphs(before, FuseAttention()(before))
    assert find_attentions(before)[0].reason == "dropout in the fused attention would draw other random numbers"


def read_too(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, padded: Tensor) -> Any:
    probabilities = scores(q, k).softmax(-1)
    return (probabilities @ v).sum(), probabilities.amax()


def written_to(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, padded: Tensor) -> Tensor:
    twice = (q * 2).detach()
    probabilities = scores(twice, k).softmax(-1)
    twice.zero_()
    return (probabilities @ v).sum() + twice.sum() + q.sum()


LEFT_ALONE: dict[str, tuple[Callable[..., Any], str]] = {
    "read too": (read_too, "softmax is read by matmul_1, amax, not by one call alone"),
    "written to": (written_to, "zero_ writes to an input of the attention before its last call"),
    "softmax of the queries": (
        lambda q, k, v, seen, padded: (scores(q, k).softmax(-2) @ v).sum(),
        "the softmax of attention is not over the keys",
    ),
    "softcap": (
        lambda q, k, v, seen, padded: weigh(scores(q, k).tanh(), v),
        "the attention scores come from tanh, not from a product of queries and keys",
    ),
    "no real mask": (
        lambda q, k, v, seen, padded: weigh(scores(q, k).masked_fill(~seen, -5.0), v),
        "masked scores are set to -5, which still gives them weight in the softmax",
    ),
    "masks of numbers": (
        lambda q, k, v, seen, padded: weigh(
            scores(q, k).masked_fill(~seen, -1e9).masked_fill(~padded[:, None, None], -1e9), v
        ),
        "the attention mask may mask every score of a row",
    ),
    "shared keys": (
        lambda q, k, v, seen, padded: weigh(q @ k[:, :1].mT, v),
        "queries, keys and values differ in batch or heads",
    ),
    "larger mask": (
        lambda q, k, v, seen, padded: weigh(scores(q[:1], k[:1]) + torch.zeros(BATCH, 1, 1, LENGTH), v[:1]),
        "the attention mask has more elements than the scores",
    ),
    "scores too": (
        lambda q, k, v, seen, padded: weigh(one := scores(q, k), v) + one.mean(),
        "div is read by softmax, mean, not by one call alone",
    ),
}


@pytest.mark.parametrize("form", LEFT_ALONE)
def test_left_alone_and_said(form: str) -> None:
    call, reason = LEFT_ALONE[form]
    before = capture_operators(call, **tensors()).graph_module
    assert [module.reason for module in find_attentions(before)] == [reason]
    assert not diff_graphs(before, FuseAttention()(before))


def test_a_softmax_that_weighs_nothing_is_no_attention() -> None:
    before = capture_operators(lambda q, **_: q.softmax(-1).square().sum(), **tensors()).graph_module
    assert find_attentions(before) == ()


def eager(kind: str, head: str, loss_type: str | None = None, **config: Any) -> Callable[..., Any]:
    return library(kind, head, loss_type, attn_implementation="eager", **config)


STILL: dict[str, Any] = {
    **ENCODER, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_hidden_layers": 2
}  # fmt: skip
PICTURES: dict[str, Any] = {
    "image_size": 64, "patch_size": 8, "num_labels": 10, "problem_type": "single_label_classification"
}  # fmt: skip
TEXTS: dict[str, Any] = {"vocab_size": VOCABULARY, "max_position_embeddings": 256}
T5: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 128, "d_kv": 32, "d_ff": 512, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0, "use_cache": False, "dropout_rate": 0.0,
}  # fmt: skip
gpt2 = eager("GPT2", "GPT2LMHeadModel", "ForCausalLM", **{**GPT2, "n_layer": 2, "attn_pdrop": 0.0})
llama = eager("Llama", "LlamaForCausalLM", "ForCausalLM", intermediate_size=352, **{**DECODER, "num_hidden_layers": 2})
bert = eager("Bert", "BertForMaskedLM", **TEXTS, **STILL)
vit = eager("ViT", "ViTForImageClassification", "ForSequenceClassification", **PICTURES, **STILL)
MODELS: dict[str, tuple[Callable[..., Any], Callable[..., Any], int, int]] = {
    "gpt2": (gpt2, causal_batch, 2, 2),
    "gpt2, padded": (gpt2, padded_batch, 0, 2),
    "llama": (llama, causal_batch, 2, 2),
    "bert": (bert, masked_batch, 0, 2),
    "vit": (vit, image_batch, 2, 2),
    "t5": (eager("T5", "T5ForConditionalGeneration", **T5), t5_batch, 2, 6),
}
"""Model, batch, how many attentions are fused, and how many where rows may be masked whole by an input."""


@pytest.mark.parametrize("name", [name if name in ("gpt2, padded", "llama") else slow(name) for name in MODELS])
def test_real_models(name: str) -> None:
    make, batch, count, all_of_them = MODELS[name]
    captured = capture_operators(make(), **batch("usual"))
    reasons = [module.reason for module in find_attentions(captured.graph_module)]
    assert reasons.count("") == count
    assert reasons.count("the attention mask may mask every score of a row") == all_of_them - count
    after = FuseAttention()(captured.graph_module)
    assert [node.target for node in after.graph.nodes].count(SDPA) == count
    assert_same_gradients(captured.graph_module, after, captured.inputs, tolerance=1e-5, noise=1e-5)


def test_a_mask_that_is_known_is_not_looked_through() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, **_: Tensor) -> Tensor:
        unseen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        return weigh(scores(q, k).masked_fill(unseen, -1e9), v)

    captured = capture_operators(call, **tensors())
    after = FuseAttention()(captured.graph_module)
    assert "amax" not in format_graph(after)
    assert_same_gradients(captured.graph_module, after, captured.inputs, tolerance=1e-5)


def test_probabilities_are_not_saved() -> None:
    length = 128
    q, k, v = (torch.randn(1, 2, length, 16, requires_grad=True) for _ in range(3))
    captured = capture_operators(lambda q, k, v: weigh(scores(q, k), v), q=q, k=k, v=v)
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    counts = []
    for module in (captured.graph_module, FuseAttention()(captured.graph_module)):
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            module(*captured.inputs)
        counts.append(max(saved))
    assert counts == [2 * length**2, 2 * length * 16]
