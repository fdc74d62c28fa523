"""Which calls of a joint graph decide by values that may be rounded otherwise when they are computed again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from passes import CANONICAL, find_decisions, mark_deciding
from passes.graphs import decisions
from tests.passes.capture import Sketch, aten, capture

WIDTH = 16


class Head(nn.Module):
    """A function of a computed value, and the loss."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x)).square().mean()


def decided(model: nn.Module, *args: Any, **kwargs: Any) -> list[str]:
    """The names of the operators that decide in a model's step, in the graph's order."""
    torch._dynamo.reset()
    graph = CANONICAL(capture(model.train(), *args, **kwargs).graph_module).graph
    found = find_decisions(graph)
    return [str(node.target).split(".")[1] for node in graph.nodes if node in found]


def of(function: Callable[[Tensor], Tensor]) -> list[str]:
    torch.manual_seed(0)
    return decided(Head(function), torch.randn(4, 8, WIDTH))


class SparseAttention(nn.Module):
    """Causal attention to the four keys with the highest scores, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.dropout = nn.Linear(WIDTH, 3 * WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) / 4
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~causal, float("-inf"))
        fourth = scores.topk(4, -1).values[..., -1:]
        chosen = scores.masked_fill(scores < fourth, float("-inf")).softmax(-1)
        return F.leaky_relu(self.dropout(chosen) @ v).square().mean()


class Quantiser(nn.Module):
    """Replaces a value by the nearest entry of a codebook, with a straight-through gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.book = nn.Parameter(torch.randn(12, 8))

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x)
        code = torch.cdist(z, self.book.expand(z.shape[0], -1, -1)).argmin(-1)
        chosen = self.book[code]
        return F.mse_loss(self.decoder(z + (chosen - z).detach()), x) + F.mse_loss(chosen, z.detach())


class Median(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x).tanh() - x).abs().median()


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, attn_implementation="eager",
        attention_dropout=0.1, experts_implementation="batched_mm", use_cache=False,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config)
    model.loss_type = "ForCausalLM"
    return model


@pytest.mark.slow
def test_a_routed_mixture_decides_by_its_routers() -> None:
    ids = torch.randint(0, 64, (2, 8))
    assert decided(mixtral(), input_ids=ids, labels=ids) == ["topk", "topk"]


def test_sparse_attention_decides_by_its_scores() -> None:
    assert decided(SparseAttention(), torch.randn(2, 8, WIDTH)) == ["topk", "lt"]


def test_a_quantiser_decides_by_distances() -> None:
    assert decided(Quantiser(), torch.randn(2, 8, WIDTH)) == ["argmin"]


def test_a_median_is_looked_for_by_equality() -> None:
    assert decided(Median(), torch.randn(8, WIDTH)) == ["abs", "median"]


DECIDING: dict[str, tuple[Callable[[Tensor], Tensor], set[str]]] = {
    "sort": (lambda y: y.sort(-1).values, {"sort"}),
    "max": (lambda y: y.max(-1).values, {"max"}),
    "kthvalue": (lambda y: y.kthvalue(3, -1).values, {"kthvalue"}),
    "cummax": (lambda y: y.cummax(-1).values, {"cummax"}),
    "buckets": (lambda y: y * torch.bucketize(y, torch.linspace(-1, 1, 5)), {"bucketize"}),
    "codes": (lambda y: y * (y * 4).to(torch.int64), {"_to_copy"}),
    "comparison": (lambda y: torch.where(y > 0.5, y, y.exp()), {"gt"}),
    "round": (lambda y: y + (y.round() - y).detach() * y, {"round"}),
    "floor division": (lambda y: y * torch.div(y, 0.5, rounding_mode="floor"), {"div"}),
    "remainder": (lambda y: y * (y % 0.5), {"remainder"}),
    "sign": (lambda y: y * y.sign(), {"sign"}),
    "pooling": (lambda y: F.max_pool2d(y[None], 2), {"max_pool2d_with_indices"}),
    "drawn with computed chances": (lambda y: y * torch.bernoulli(y.detach().sigmoid()), {"bernoulli"}),
    "drawn classes": (lambda y: y[0] * torch.multinomial(y[0].softmax(-1), WIDTH), {"multinomial"}),
    "one after the other": (lambda y: y * (y.round() > y.mean()), {"gt", "round"}),
    "fake quantisation": (lambda y: torch.fake_quantize_per_tensor_affine(y, 0.1, 0, -8, 7), {"fake_quantize"}),
    "nearest sampling": (
        lambda y: F.grid_sample(y[None].exp(), y[None, :, :, :2].tanh(), mode="nearest", align_corners=False),
        {"tanh", "exp", "clone"},
    ),
    "maximum by equality": (lambda y: y.exp().amax(-1), {"exp", "amax"}),
    "largest of all": (lambda y: y.exp().max(), {"exp", "max"}),
    "infinity norm": (lambda y: torch.linalg.vector_norm(y.exp(), float("inf")), {"exp", "linalg_vector_norm"}),
}


@pytest.mark.parametrize("name", DECIDING)
def test_decides(name: str) -> None:
    function, expected = DECIDING[name]
    found = of(function)
    assert found
    assert all(any(operator.startswith(one) for one in expected) for operator in found), found


def masked(y: Tensor) -> Tensor:
    at = torch.arange(y.shape[-2])
    near = (at[:, None] - at).abs() <= 2
    return (y @ y.transpose(-1, -2)).masked_fill(~near, float("-inf")).softmax(-1)


NOT_DECIDING: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda y: F.dropout(y, 0.3),
    "a mask drawn by hand": lambda y: y * (torch.rand_like(y) > 0.3),
    "a mask drawn by chance": lambda y: y * torch.bernoulli(torch.full_like(y, 0.7)),
    "masks of positions": masked,
    "attention": lambda y: F.scaled_dot_product_attention(y[None], y[None], y[None], dropout_p=0.1, is_causal=True),
    "kinks": lambda y: F.leaky_relu(y) + y.relu() + y.abs() + F.hardtanh(y) + F.smooth_l1_loss(y, y.exp()),
    "the larger one": lambda y: torch.maximum(y.exp(), y.cos()) + y.clamp(-1, 1),
    "normalisation": lambda y: F.batch_norm(y, None, None, training=True),
    "chosen by positions": lambda y: y.gather(-1, torch.arange(WIDTH).flip(0).expand_as(y)),
}


@pytest.mark.parametrize("name", NOT_DECIDING)
def test_does_not_decide(name: str) -> None:
    assert of(NOT_DECIDING[name]) == []


def test_comparisons_of_inputs_are_exact() -> None:
    class Exact(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(WIDTH))

        def forward(self, x: Tensor, length: Tensor) -> Tensor:
            wide = x.double().abs()[..., torch.randperm(WIDTH)]
            return (self.scale.exp() * (wide > 0.5) * (self.scale > 0) * x.argmax(-1, True) * (length > 2)).sum()

    assert decided(Exact(), torch.randn(4, WIDTH), torch.tensor([1, 2, 3, 4])[:, None]) == []


class MaskedTwice(torch.autograd.Function):
    """A mask that is computed in the forward, and from the saved value in the backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.save_for_backward(value)
        return torch.where(value > 0.5, value, value * value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (value,) = ctx.saved_tensors
        return torch.where(value > 0.5, gradient, gradient * 2 * value)


class LargestTwice(MaskedTwice):
    """The largest two of each row, found in the forward and in the backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.save_for_backward(value)
        return value * (value >= value.topk(2, -1).values[..., -1:])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (value,) = ctx.saved_tensors
        return torch.zeros_like(value).scatter(-1, value.sort(-1, descending=True).indices[..., :2], 1.0) * gradient


@pytest.mark.parametrize(("function", "expected"), [(MaskedTwice, ["gt"]), (LargestTwice, ["topk", "ge", "sort"])])
def test_a_backward_of_the_author_s_decides_in_the_forward(function: Any, expected: list[str]) -> None:
    """Calls there that depend on no gradient are part of the forward, and run once."""
    assert of(lambda y: function.apply(y.exp())) == expected


@pytest.fixture
def no_marks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(decisions, "MARKED", set())
    return


@pytest.mark.usefixtures("no_marks")
def test_operators_may_be_marked() -> None:
    assert of(lambda y: y.softmax(-1)) == []
    mark_deciding(torch.ops.aten._softmax.default)
    mark_deciding(torch.ops.aten.logsumexp)
    assert of(lambda y: y.softmax(-1)) == ["_softmax"]
    assert torch.ops.aten.logsumexp.default in decisions.MARKED
    with pytest.raises(TypeError, match="mark_deciding takes an operator, such as"):
        mark_deciding(torch.softmax)


def test_rounding_in_16_bits_leaves_other_bits_in_a_kernel() -> None:
    """A kernel may go on with all bits of what is rounded, so that a cast of the result decides once more."""
    for dtype, expected in ((torch.float32, {"round"}), (torch.bfloat16, {"round", "_to_copy"})):
        sketch = Sketch()
        value = sketch.call(aten.exp.default, sketch.input("primals_1", 4, dtype=dtype))
        rounded = sketch.call(aten.round.default, value)
        sketch.returns(sketch.call(aten._to_copy.default, rounded, dtype=torch.int64))
        assert {str(node.target).split(".")[1] for node in find_decisions(sketch.graph)} == expected
