from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional as F
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

from examples.models.families import BY_NAME
from passes import ChunkLoss, PassError, diff_graphs, find_losses, format_graph
from passes.ops.linear_cross_entropy import LINEAR_CROSS_ENTROPY, _ChunkedCrossEntropy, _LossOptions
from tests.passes.capture import Sketch, aten
from tests.passes.operators import Operators, assert_same_gradients, capture_operators

BATCH, LENGTH, WIDTH, CLASSES = 3, 16, 8, 40


def sketch(*, returned: bool = False) -> GraphModule:
    sketch = Sketch()
    hidden, weight = sketch.input("hidden", 2, 8, 4), sketch.input("weight", 50, 4)
    target = sketch.input("target", 16, dtype=torch.int64)
    linear = sketch.call(aten.linear.default, hidden, weight)
    view = sketch.call(aten.view.default, linear, [-1, 50])
    loss = sketch.call(aten.cross_entropy_loss.default, view, target)
    return sketch.returns(loss, linear) if returned else sketch.returns(loss)


def test_golden() -> None:
    assert_expected_inline(
        format_graph(ChunkLoss()(sketch())),
        """\
input hidden: f32[2, 8, 4]
input weight: f32[50, 4]
input target: i64[16]
reshape: f32[16, 4] = aten.reshape(hidden, [-1, 4])
linear_cross_entropy: f32[] = memopt.linear_cross_entropy(reshape, weight, None, target)
return (linear_cross_entropy,)""",
    )


def test_returned_logits_are_left_alone() -> None:
    before = sketch(returned=True)
    assert not diff_graphs(before, ChunkLoss()(before))
    (found,) = find_losses(before)
    assert str(found) == "cross_entropy_loss: the logits are returned as well"


def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    floats = {"x": torch.randn(BATCH, LENGTH, WIDTH), "w": torch.randn(CLASSES, WIDTH), "b": torch.randn(CLASSES)}
    y = torch.randint(0, CLASSES, (BATCH, LENGTH)).masked_fill_(torch.rand(BATCH, LENGTH) < 0.2, -100)
    return {**{name: tensor.requires_grad_() for name, tensor in floats.items()}, "y": y}


def flat(logits: Tensor) -> Tensor:
    return logits.view(-1, CLASSES)


def nanogpt(x: Tensor, w: Tensor, y: Tensor, b: Tensor) -> Tensor:
    logits = F.linear(x, w)
    return F.cross_entropy(logits.view(-1, logits.size(-1)), y.clamp(min=-1).view(-1), ignore_index=-1) + b.sum()


def shifted(x: Tensor, w: Tensor, y: Tensor, b: Tensor) -> Tensor:
    logits, labels = F.linear(x, w, b)[..., :-1, :].contiguous(), y[..., 1:].contiguous()
    return nn.CrossEntropyLoss()(logits.view(-1, CLASSES), labels.view(-1))


def per_token(x: Tensor, w: Tensor, y: Tensor, b: Tensor) -> Tensor:
    logits = F.linear(x, w, b)[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), y[:, 1:], reduction="sum") / (y != -100).sum()


def softcapped(x: Tensor, w: Tensor, y: Tensor, b: Tensor) -> Tensor:
    """Gemma's."""
    logits = torch.tanh(F.linear(x, w, b) / 5.0) * 5.0
    return ForCausalLMLoss(logits, y, vocab_size=CLASSES)


def in_place(x: Tensor, w: Tensor, y: Tensor, b: Tensor) -> Tensor:
    logits = F.linear(x, w, b)
    logits.div_(0.7)
    return F.cross_entropy(flat(logits), y.flatten())


def gathered(x: Tensor, w: Tensor, y: Tensor, b: Tensor) -> Tensor:
    return -F.linear(x, w, b).log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1).mean()


def of_rows_chosen_once(x: Tensor, w: Tensor, y: Tensor, b: Tensor) -> Tensor:
    chosen = (y.flatten() >= 0).nonzero().squeeze(1)
    return F.cross_entropy(flat(F.linear(x, w, b))[chosen], y.flatten()[chosen])


FORMS: dict[str, Callable[..., Tensor]] = {
    "flat": lambda x, w, y, b: F.cross_entropy(flat(F.linear(x, w, b)), y.view(-1)),
    "nanogpt": nanogpt,
    "shifted": shifted,
    "channels first": per_token,
    "softcap": softcapped,
    "in place": in_place,
    "causal": lambda x, w, y, b: ForCausalLMLoss(F.linear(x, w, b), y, CLASSES),
    "items": lambda x, w, y, b: ForCausalLMLoss(F.linear(x, w, b), y, CLASSES, num_items_in_batch=(y >= 0).sum()),
    "masked": lambda x, w, y, b: ForMaskedLMLoss(F.linear(x, w) + b, y, CLASSES),
    "smooth": lambda x, w, y, b: F.cross_entropy(flat(F.linear(x, w, b)), y.view(-1), label_smoothing=0.1),
    "weighted": lambda x, w, y, b: F.cross_entropy(flat(F.linear(x, w, b)), y.view(-1), b.detach().abs() + 0.1),
    "scaled": lambda x, w, y, b: F.cross_entropy(flat(0.0625 * F.linear(x, w, b)), y.view(-1)),
    "bias, then scaled": lambda x, w, y, b: F.cross_entropy(flat((F.linear(x, w) + b) / 3), y.view(-1)),
    "nll": lambda x, w, y, b: F.nll_loss(F.log_softmax(flat(F.linear(x, w, b)), -1), y.view(-1), reduction="sum"),
    "nll of three dims": lambda x, w, y, b: F.nll_loss(F.linear(x, w, b).log_softmax(-1).transpose(1, 2), y),
    "matmul": lambda x, w, y, b: F.cross_entropy(flat(x @ w.T + b), y.view(-1)),
    "matmul, stored the other way": lambda x, w, y, b: F.cross_entropy(
        x.flatten(0, 1) @ w.view(WIDTH, -1) + b, y.view(-1)
    ),
    "addmm": lambda x, w, y, b: F.cross_entropy(torch.addmm(b, x.view(-1, WIDTH), w.t()), y.view(-1)),
    "chosen rows": lambda x, w, y, b: F.cross_entropy(F.linear(x, w, b)[y >= 0], y[y >= 0]),
    "rows chosen once": of_rows_chosen_once,
    "last token": lambda x, w, y, b: F.cross_entropy(F.linear(x, w, b)[:, -1], y[:, -1].abs() % CLASSES),
    "permuted": lambda x, w, y, b: F.cross_entropy(F.linear(x, w, b).permute(0, 2, 1), y),
    "cast": lambda x, w, y, b: F.cross_entropy(flat(F.linear(x, w, b)).double(), y.view(-1)),
    "gathered": lambda x, w, y, b: gathered(x, w, y.clamp(min=0), b),
    "gathered, summed, then negated": lambda x, w, y, b: (
        -(torch.gather(F.log_softmax(flat(F.linear(x, w, b)), 1), 1, y.clamp(min=0).view(-1, 1)).sum())
    ),
    "picked by index": lambda x, w, y, b: (
        -F.log_softmax(flat(F.linear(x, w, b)), 1)[torch.arange(y.numel()), y.clamp(min=0).flatten()].mean()
    ),
    "picked from the end": lambda x, w, y, b: (
        -F.log_softmax(flat(F.linear(x, w, b)), 1)[torch.arange(y.numel()), y.clamp(min=-1).flatten()].sum()
    ),
    "one sample": lambda x, w, y, b: F.cross_entropy(F.linear(x[0, 0], w, b), y[0, 0].abs() % CLASSES),
}


def test_the_weight_gradient_in_the_backward() -> None:
    captured = capture_operators(FORMS["causal"], **tensors())
    after = ChunkLoss(weight_in_backward=True)(captured.graph_module)
    assert "weight_in_backward=True" in format_graph(after)
    assert_same_gradients(captured.graph_module, after, captured.inputs)


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str) -> None:
    if form == "chosen rows" and torch.__version__ < "2.13":
        pytest.skip(f"Dynamo of torch {torch.__version__} cannot tell that a mask chooses as many logits as targets")
    captured = capture_operators(FORMS[form], **tensors())
    after = ChunkLoss(rows=5)(captured.graph_module)
    assert LINEAR_CROSS_ENTROPY in {node.target for node in after.graph.nodes}
    text = format_graph(after)
    assert f", {CLASSES}]" not in text.split("return")[0].replace(f"[{WIDTH}, {CLASSES}]", ""), "logits are left"
    assert_same_gradients(captured.graph_module, after, captured.inputs)


def test_a_picked_target_that_is_no_class_is_refused() -> None:
    captured = capture_operators(gathered, **{**tensors(), "y": tensors()["y"].clamp(min=0)})
    inputs = [tensor.sub(100) if tensor.dtype == torch.int64 else tensor for tensor in captured.inputs]
    for graph_module in (captured.graph_module, ChunkLoss()(captured.graph_module)):
        with pytest.raises(RuntimeError, match="out of bounds"):
            graph_module(*inputs)


def written_to(x: Tensor, w: Tensor, y: Tensor, b: Tensor) -> Tensor:
    hidden = x * 2
    logits = flat(F.linear(hidden.detach(), w, b))
    hidden.add_(1.0)
    return F.cross_entropy(logits, y.view(-1)) + hidden.sum()


LEFT_ALONE: dict[str, tuple[Callable[..., Any], str]] = {
    "written to": (written_to, "add_ writes to an input of the linear layer before the loss is computed"),
    "activations": (
        lambda x, w, y, b: F.cross_entropy(x @ (x * 2).transpose(1, 2), y.clamp(0, 9)) + w.sum() + b.sum(),
        "the logits are a product of two activations",
    ),
    "some classes": (
        lambda x, w, y, b: F.cross_entropy(flat(F.linear(x, w, b))[:, 4:], y.view(-1).clamp(max=9)),
        "slice_1 picks among the classes",
    ),
    "classes apart": (
        lambda x, w, y, b: F.cross_entropy(F.linear(x, w, b).view(-1, CLASSES // 2), y.view(-1).repeat(2).clamp(0, 9)),
        "view splits the classes",
    ),
    "another dimension as classes": (
        lambda x, w, y, b: F.cross_entropy(flat(F.linear(x, w, b)).unsqueeze(1), y.view(-1, 1).expand(-1, CLASSES) * 0),
        "unsqueeze makes the dimension that the loss takes for the classes",
    ),
    "softmax of the rows": (
        lambda x, w, y, b: F.nll_loss(F.log_softmax(flat(F.linear(x, w, b)), 0), y.view(-1)),
        "the log_softmax is not over the classes",
    ),
}


@pytest.mark.parametrize("form", LEFT_ALONE)
def test_left_alone_and_said(form: str) -> None:
    call, reason = LEFT_ALONE[form]
    before = capture_operators(call, **tensors()).graph_module
    (found,) = find_losses(before)
    assert found.reason == reason
    assert not diff_graphs(before, ChunkLoss()(before))


class LossAlone(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Tensor:
        return self.model(**batch).loss


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2-sdpa", "llama", "bert", "t5"])
def test_real_models(name: str) -> None:
    """The tolerance allows for rounding that a whole model amplifies."""
    family = BY_NAME[name]
    captured = capture_operators(LossAlone(family.make()), **family.batch("usual"))
    after = ChunkLoss()(captured.graph_module)
    assert LINEAR_CROSS_ENTROPY in {node.target for node in after.graph.nodes}
    assert_same_gradients(captured.graph_module, after, captured.inputs, 3e-6, noise=1e-6)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.out(self.norm(x))
        shifted = logits[:, :-1].contiguous()
        loss = F.cross_entropy(shifted.view(-1, shifted.size(-1)), y[:, 1:].reshape(-1), reduction="sum")
        return loss / (shifted.size(0) * shifted.size(1))


def test_symbolic_sizes() -> None:
    torch.manual_seed(0)
    captured = capture_operators(Head(), tensors()["x"], tensors()["y"], dynamic=True)
    after = ChunkLoss()(captured.graph_module)
    placeholders = captured.graph_module.graph.find_nodes(op="placeholder")
    assert any(isinstance(node.meta["val"], torch.SymInt) for node in placeholders)
    assert not find_losses(after)
    assert "sym_size.int(linear" not in format_graph(after)
    assert_same_gradients(captured.graph_module, after, captured.inputs)


def in_16_bits(x: Tensor, w: Tensor, y: Tensor, b: Tensor) -> Tensor:
    low = torch.bfloat16
    return ForCausalLMLoss(F.linear(x.to(low), w.to(low), b.to(low)), y, CLASSES)


def test_master_weights_are_read_before_their_cast() -> None:
    captured = capture_operators(in_16_bits, **tensors())
    after = ChunkLoss()(captured.graph_module)
    (call,) = (node for node in after.graph.nodes if node.target is LINEAR_CROSS_ENTROPY)
    assert [node.meta["val"].dtype for node in call.all_input_nodes[:3]] == [
        torch.bfloat16,
        torch.float32,
        torch.float32,
    ]
    assert_same_gradients(captured.graph_module, after, captured.inputs, tolerance=0.02)


def test_a_loss_in_16_bits_stays_so() -> None:
    given = {
        name: tensor.detach().bfloat16().requires_grad_() if name != "y" else tensor
        for name, tensor in tensors().items()
    }
    captured = capture_operators(FORMS["flat"], **given)
    assert_same_gradients(captured.graph_module, ChunkLoss()(captured.graph_module), captured.inputs, tolerance=0.02)


def two_losses(x: Tensor, w: Tensor, y: Tensor, b: Tensor) -> Tensor:
    first, second = (F.cross_entropy(flat(F.linear(item, w, b)), y.view(-1)) for item in (x, x * 2))
    return first + 0.5 * second


def test_only_the_named_loss() -> None:
    captured = capture_operators(two_losses, **tensors())
    after = ChunkLoss(losses=frozenset({"cross_entropy_loss_1"}))(captured.graph_module)
    assert [loss.name for loss in find_losses(after)] == ["cross_entropy_loss"]
    assert_same_gradients(captured.graph_module, after, captured.inputs)


@pytest.mark.parametrize(
    ("name", "problem"), [("cross_entropy_loss", "returned as well"), ("other", "no cross entropy")]
)
def test_a_named_loss_that_cannot_be_is_refused(name: str, problem: str) -> None:
    with pytest.raises(PassError, match=problem):
        ChunkLoss(losses=frozenset({name}))(sketch(returned=True))


def test_rows_must_be_positive() -> None:
    with pytest.raises(ValueError, match="rows=0"):
        ChunkLoss(rows=0)


def test_gradients_accumulate_over_two_steps_under_a_loss_scale() -> None:
    captured: Operators = capture_operators(FORMS["causal"], **tensors())
    after = ChunkLoss()(captured.graph_module)
    sums = []
    for graph_module in (captured.graph_module, after):
        leaves = [tensor for tensor in captured.inputs if tensor.requires_grad]
        for leaf in leaves:
            leaf.grad = None
        for _ in range(2):
            (loss,) = graph_module(*captured.inputs)
            (loss * 1024.0).backward()
        sums.append([leaf.grad for leaf in leaves])
    for expected, found in zip(*sums, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_classes_that_are_padded_change_no_value(dtype: torch.dtype, bias: bool) -> None:
    """On a card products of 16 bits have a multiple of 8 classes."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(24, 16).to(dtype), torch.randn(45, 16)
    given = torch.randn(45) if bias else None
    target = torch.randint(0, 45, (24,)).index_fill(0, torch.tensor([3, 7]), -100)
    found = []
    for padding in (0, 3):
        chunks = _ChunkedCrossEntropy(hidden, weight, given, target, None, _LossOptions(softcap=2.0, rows=10))
        layer = chunks.layer
        layer.padding = padding
        layer.weight, layer.bias = (one if one is None else layer.padded(one) for one in (weight, given))
        loss, _, gradients = chunks.run(hidden=True, weight=True, bias=bias)
        found.append((loss, *gradients))
    for plain, padded in zip(*found, strict=True):
        assert (plain is None and padded is None) or torch.equal(plain, padded)
