"""What `ChunkLoss` computes from each row of logits by a program: losses for each token, log probabilities, others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional as F

from passes import ChunkLoss, diff_graphs, find_losses, format_graph
from passes.ops.linear_rows import LINEAR_ROWS
from tests.marks import slow
from tests.passes.capture import Sketch, aten
from tests.passes.operators import assert_same_gradients, capture_operators, norm_error, outputs_and_gradients
from tests.passes.test_chunk_loss import CLASSES, LENGTH, WIDTH, flat, tensors


def test_golden() -> None:
    sketch = Sketch()
    hidden, weight = sketch.input("hidden", 2, 8, 4), sketch.input("weight", 50, 4)
    target = sketch.input("target", 2, 8, 1, dtype=torch.int64)
    logits = sketch.call(aten.linear.default, hidden, weight)
    logarithms = sketch.call(aten.log_softmax.int, sketch.call(aten.mul.Tensor, logits, 0.5), -1)
    before = sketch.returns(sketch.call(aten.gather.default, logarithms, 2, target))
    assert_expected_inline(
        format_graph(ChunkLoss(rows=4)(before)),
        """\
input hidden: f32[2, 8, 4]
input weight: f32[50, 4]
input target: i64[2, 8, 1]
reshape: f32[16, 4] = aten.reshape(hidden, [-1, 4])
reshape_1: i64[16, 1] = aten.reshape(target, [-1, 1])
linear_rows: (f32[16, 1]) = memopt.linear_rows([reshape], [weight], [], [reshape_1], [], [], 'x0, r0: a0 = aten.mul.Tensor(x0, 0.5); a1 = aten.log_softmax.int(a0, -1); del a0; a2 = aten.gather.default(a1, -1, r0); del a1; return [a2]', 4)
getitem: f32[16, 1] = linear_rows[0]
reshape_2: f32[2, 8, 1] = aten.reshape(getitem, [2, 8, 1])
return (reshape_2,)""",  # noqa: E501
    )


def selective_log_softmax(logits: Tensor, index: Tensor) -> Tensor:
    """TRL's, for logits in fp32."""
    selected = torch.gather(logits, -1, index.unsqueeze(-1)).squeeze(-1)
    return selected - torch.stack([torch.logsumexp(sample, -1) for sample in logits])


def selective_log_softmax_in_16_bits(logits: Tensor, index: Tensor) -> Tensor:
    """TRL's, for logits in 16 bits."""
    pairs = zip(logits, index, strict=True)
    return torch.stack([F.log_softmax(one, -1).gather(-1, at.unsqueeze(-1)) for one, at in pairs]).squeeze(-1)


def each_token(x: Tensor, w: Tensor, y: Tensor, b: Tensor) -> Tensor:
    losses = F.cross_entropy(F.linear(x, w, b).permute(0, 2, 1), y, reduction="none", label_smoothing=0.1)
    return (losses * (y != 3)).sum() / (y != 3).sum()


def weighted(x: Tensor, w: Tensor, y: Tensor, b: Tensor) -> Tensor:
    logits, by_class = flat(F.linear(x, w, b)), b.detach().abs() + 0.1
    losses = F.cross_entropy(logits, y.view(-1), by_class, reduction="none", label_smoothing=0.1)
    return (losses * torch.arange(losses.numel())).sum()


def ignored_all(x: Tensor, w: Tensor, y: Tensor, b: Tensor) -> Tensor:
    return F.cross_entropy(flat(F.linear(x, w, b)), torch.full_like(y, -100).view(-1), reduction="none").sum() + b.sum()


def focal(x: Tensor, w: Tensor, y: Tensor, b: Tensor) -> Tensor:
    losses = F.cross_entropy(flat(F.linear(x, w, b)), y.view(-1), reduction="none")
    return ((1 - (-losses).exp()) ** 2 * losses).mean()


def likelihoods(x: Tensor, w: Tensor, y: Tensor, b: Tensor) -> Tensor:
    return (F.nll_loss(flat(F.linear(x, w, b)).log_softmax(-1), y.view(-1), reduction="none") ** 2).sum()


def label_smoother(x: Tensor, w: Tensor, y: Tensor, b: Tensor) -> Tensor:
    """transformers' `LabelSmoother`."""
    logits, labels = F.linear(x, w, b)[..., :-1, :].contiguous(), y[..., 1:].contiguous().unsqueeze(-1)
    negative, padding = -F.log_softmax(logits, -1), labels.eq(-100)
    picked = negative.gather(-1, torch.clamp(labels, min=0))
    smoothed = negative.sum(-1, keepdim=True, dtype=torch.float32)
    picked.masked_fill_(padding, 0.0)
    smoothed.masked_fill_(padding, 0.0)
    active = padding.numel() - padding.long().sum()
    return 0.9 * picked.sum() / active + 0.1 * smoothed.sum() / (active * CLASSES)


def z_loss(x: Tensor, w: Tensor, y: Tensor, b: Tensor) -> Tensor:
    logits = flat(F.linear(x, w, b))
    return F.cross_entropy(logits, y.view(-1)) + 0.1 * (logits.logsumexp(-1) ** 2).mean()


def three_losses(x: Tensor, w: Tensor, y: Tensor, b: Tensor) -> Tensor:
    logits, by_class = flat(F.linear(x, w, b)), b.detach().abs() + 0.1
    mean = F.cross_entropy(logits, y.view(-1), weight=by_class, label_smoothing=0.1)
    return mean + F.cross_entropy(logits, y.view(-1), reduction="sum") + logits.logsumexp(1).sum()


def accuracy_too(x: Tensor, w: Tensor, y: Tensor, b: Tensor) -> Any:
    logits = flat(F.linear(x, w, b))
    return F.cross_entropy(logits, y.view(-1)), (logits.argmax(-1) == y.view(-1)).float().mean()


def distilled(x: Tensor, w: Tensor, y: Tensor, b: Tensor) -> Tensor:
    student = F.log_softmax(F.linear(x, w, b) / 2, -1)
    with torch.no_grad():
        teacher = F.softmax(F.linear(x.cos(), w.sin()) / 2, -1)
    return F.kl_div(student, teacher, reduction="batchmean") * 4


def distilled_where_not_masked(x: Tensor, w: Tensor, y: Tensor, b: Tensor) -> Tensor:
    student, teacher = F.log_softmax(F.linear(x, w, b), -1), F.log_softmax(F.linear(x.cos(), w.sin()).detach(), -1)
    divergence = F.kl_div(student, teacher, reduction="none", log_target=True)
    return divergence[y != -100].sum() / (y != -100).sum()


def masked_classes(x: Tensor, w: Tensor, y: Tensor, b: Tensor) -> Tensor:
    seen = (y != -100).unsqueeze(-1)
    teacher = F.softmax(F.linear(x.cos(), w.sin()).detach(), -1)
    losses = -(teacher * F.log_softmax(F.linear(x, w, b), -1)).masked_fill(~seen, 0).sum(-1)
    return losses.sum() / seen.sum()


def soft_targets(x: Tensor, w: Tensor, y: Tensor, b: Tensor) -> Tensor:
    return F.cross_entropy(flat(F.linear(x, w, b)), flat(F.linear(x, w)).detach().softmax(-1))


def squared_softmax_error(x: Tensor, w: Tensor, y: Tensor, b: Tensor) -> Tensor:
    one, other = F.linear(x, w, b).log_softmax(-1), F.linear(x.sin(), w).log_softmax(-1)
    return ((one - other) ** 2).mean() + one.mean() + other.sum((1, 2)).mean()


def preferred(x: Tensor, w: Tensor, y: Tensor, b: Tensor) -> Tensor:
    """DPO of the first text over the second, with a reference."""

    def log_probabilities(x: Tensor) -> Tensor:
        labels = y[:, 1:].clone()
        mask = labels != -100
        labels[~mask] = 0
        logits = F.linear(x, w, b)[:, :-1]
        return (torch.gather(logits.log_softmax(-1), 2, labels.unsqueeze(2)).squeeze(2) * mask).sum(-1)

    policy = log_probabilities(x)
    with torch.no_grad():
        reference = log_probabilities(x * 0.5)
    return -F.logsigmoid(0.1 * (policy[0] - policy[1] - reference[0] + reference[1]))


def picked_then_masked(x: Tensor, w: Tensor, y: Tensor, b: Tensor) -> Tensor:
    """An index of -1, the last class, where there is no target."""
    targets = y.clamp(min=-1).flatten()
    picked = flat(F.linear(x, w, b)).log_softmax(-1)[torch.arange(y.numel()), targets]
    return -(picked * (targets >= 0)).sum() / (targets >= 0).sum()


def policy_and_entropy(x: Tensor, w: Tensor, y: Tensor, b: Tensor) -> Tensor:
    logits = F.linear(x, w, b)[:, :-1] / 0.9
    logarithms = F.log_softmax(logits, -1)
    entropy = -(logarithms.exp() * logarithms).sum(-1)
    return (selective_log_softmax(logits, y[:, 1:].clamp(min=0)) * torch.arange(LENGTH - 1)).sum() + (entropy**2).mean()


def entropy_of_some_rows_at_a_time(x: Tensor, w: Tensor, y: Tensor, b: Tensor) -> Tensor:
    """TRL's `entropy_from_logits`, beside a loss."""
    logits = F.linear(x, w, b)
    entropies = []
    for chunk in flat(logits).split(13, dim=0):
        logarithms = F.log_softmax(chunk, dim=-1)
        entropies.append(-(torch.exp(logarithms) * logarithms).sum(-1))
    entropy = torch.cat(entropies, dim=0).reshape(x.shape[:2])
    return (entropy * F.cross_entropy(logits.transpose(1, 2), y, reduction="none")).sum()


def in_slices(x: Tensor, w: Tensor, y: Tensor, b: Tensor) -> Tensor:
    logits, labels = flat(F.linear(x, w, b)), y.view(-1, 1).clamp(min=0)
    starts = range(0, logits.shape[0], 20)
    parts = [F.log_softmax(logits[at : at + 20], 1).gather(1, labels[at : at + 20]) for at in starts]
    return torch.cat(parts).square().sum()


def in_halves(x: Tensor, w: Tensor, y: Tensor, b: Tensor) -> Tensor:
    logits = F.linear(x, w, b)
    chosen = F.cross_entropy(logits[:1].flatten(0, 1), y[:1].flatten(), reduction="none").sum()
    rejected = F.cross_entropy(logits[1:].transpose(1, 2), y[1:], reduction="none", weight=b.detach().abs())
    return chosen - (rejected**2).mean()


def written_out(x: Tensor, w: Tensor, y: Tensor, b: Tensor) -> Tensor:
    logits = F.linear(x, w, b)
    largest = logits.amax(-1, keepdim=True)
    sums = largest + (logits - largest).exp().sum(-1, keepdim=True).log()
    by_torch = logits - torch.logsumexp(logits, -1, keepdim=True)
    return (logits - sums).gather(-1, y.clamp(min=0).unsqueeze(-1)).mean() + (by_torch.exp() * by_torch).sum()


def weighted_by_confidence(x: Tensor, w: Tensor, y: Tensor, b: Tensor) -> Tensor:
    """The classes' weights of each row come from its own largest logit, and those of the next loss from that."""
    logits = F.linear(x, w, b)
    largest = logits.amax(-1)
    sure = torch.sigmoid(largest).unsqueeze(-1)
    losses = -(F.log_softmax(logits * sure, -1) * b.sigmoid()).sum(-1)
    return (losses * (logits * losses.detach().unsqueeze(-1)).logsumexp(-1)).sum() + largest.mean()


def time_first(x: Tensor, w: Tensor, y: Tensor, b: Tensor) -> Any:
    logits = F.linear(x, w, b).transpose(0, 1)
    seen = (y.t() != -100).unsqueeze(-1)
    sums = torch.where(seen, logits, b * 2).logsumexp(-1)
    return (sums**2).sum(), sums


def adapted(x: Tensor, w: Tensor, y: Tensor, b: Tensor) -> Tensor:
    """LoRA on the layer."""
    low = F.linear(F.linear(F.dropout(x, 0.5), w[:3]), w[:, :3])
    return (F.cross_entropy(flat(F.linear(x, w, b) + 2.0 * low), y.view(-1), reduction="none") ** 2).mean()


def in_place(x: Tensor, w: Tensor, y: Tensor, b: Tensor) -> Tensor:
    logits = F.linear(x, w, b)
    logits /= 0.7
    return (logits.log_softmax(-1).gather(-1, y.clamp(min=0)[..., None])[..., 0] * (y > 0)).mean()


FORMS: dict[str, tuple[int, Callable[..., Any]]] = {
    "each token": (1, each_token),
    "weighted": (1, weighted),
    "ignored": (1, ignored_all),
    "focal": (1, focal),
    "likelihoods": (1, likelihoods),
    "label smoother": (1, label_smoother),
    "z-loss": (1, z_loss),
    "three losses": (1, three_losses),
    "accuracy too": (1, accuracy_too),
    "distilled": (1, distilled),
    "distilled where not masked": (1, distilled_where_not_masked),
    "masked": (1, masked_classes),
    "soft targets": (1, soft_targets),
    "squared error": (1, squared_softmax_error),
    "preferred": (2, preferred),
    "halves": (2, in_halves),
    "written out": (2, written_out),
    "in place": (1, in_place),
    "confidence": (3, weighted_by_confidence),
    "time first": (1, time_first),
    "adapted": (1, adapted),
    "TRL's": (1, lambda x, w, y, b: (selective_log_softmax(F.linear(x, w, b), y.clamp(min=0)) ** 2).sum()),
    "TRL's in 16 bits": (
        1,
        lambda x, w, y, b: (selective_log_softmax_in_16_bits(F.linear(x, w, b), y.clamp(min=0)) ** 2).sum(),
    ),
    "picked, then masked": (1, picked_then_masked),
    "policy and entropy": (1, policy_and_entropy),
    "entropy of some rows at a time": (1, entropy_of_some_rows_at_a_time),
    "slices": (1, in_slices),
    "detached": (1, lambda x, w, y, b: F.cross_entropy(flat(F.linear(x, w, b).detach()), y.view(-1)) + x.sum()),
    "tanh twice": (1, lambda x, w, y, b: F.cross_entropy(flat(F.linear(x, w, b)).tanh().tanh(), y.view(-1))),
    "bias behind tanh": (1, lambda x, w, y, b: F.cross_entropy(flat(F.linear(x, w)).tanh() + b, y.view(-1))),
    "two biases": (1, lambda x, w, y, b: F.cross_entropy(flat(F.linear(x, w, b)) + b, y.view(-1))),
    "temperature": (1, lambda x, w, y, b: F.cross_entropy(flat(F.linear(x, w)) * b[0], y.view(-1))),
    "no softmax": (1, lambda x, w, y, b: F.nll_loss(flat(F.linear(x, w, b)), y.view(-1))),
    "scaled likelihoods": (1, lambda x, w, y, b: F.nll_loss(flat(F.linear(x, w, b)).log_softmax(-1) * 2, y.view(-1))),
    "picked, and read too": (
        1,
        lambda x, w, y, b: (
            -(one := flat(F.linear(x, w, b)).log_softmax(1).gather(1, y.clamp(min=0).view(-1, 1))).mean() + one.amax()
        ),
    ),
}  # fmt: skip


def holds_logits(graph_module: GraphModule) -> bool:
    """Whether a call makes rows of classes, which weights and their transposes are not."""
    values = [node.meta.get("val") for node in graph_module.graph.nodes if node.op == "call_function"]
    shapes = [[str(size) for size in value.shape] for value in values if isinstance(value, Tensor) and value.dim() > 1]
    return any(str(CLASSES) in shape[1:] and str(WIDTH) not in shape for shape in shapes)


CHANGING = ("weighted", "distilled where not masked", "halves", "slices")
"""The forms that `make test` captures with symbols for sizes, too."""


@pytest.mark.parametrize(
    ("form", "dynamic"),
    [*((form, False) for form in FORMS), *((form, True) if form in CHANGING else slow(form, True) for form in FORMS)],
)
def test_forms(form: str, dynamic: bool) -> None:
    programs, call = FORMS[form]
    given = {name: nn.Parameter(one.detach()) if name in "wb" else one for name, one in tensors().items()}
    captured = capture_operators(call, **given, dynamic=dynamic)
    after = ChunkLoss(rows=5)(captured.graph_module)
    assert not any(loss.reason for loss in find_losses(captured.graph_module))
    assert [node.target for node in after.graph.nodes].count(LINEAR_ROWS) == programs
    assert not holds_logits(after)
    assert_same_gradients(captured.graph_module, after, captured.inputs, 2e-6)


def trained_teacher(x: Tensor, w: Tensor, y: Tensor, b: Tensor) -> Tensor:
    targets = (x @ x.transpose(1, 2)).mean(-1, keepdim=True) * b
    return F.cross_entropy(F.linear(x, w).transpose(1, 2), targets.softmax(-1).transpose(1, 2), label_smoothing=0.1)


def test_a_teacher_that_is_trained() -> None:
    captured = capture_operators(trained_teacher, **tensors())
    after = ChunkLoss(rows=5)(captured.graph_module)
    assert LINEAR_ROWS in {node.target for node in after.graph.nodes}
    assert_same_gradients(captured.graph_module, after, captured.inputs, 2e-6)


def test_no_target_at_all() -> None:
    """The mean is NaN, and its gradients are zeros."""
    given = {**tensors(), "y": tensors()["y"].fill_(-100)}
    for form in (z_loss, three_losses):
        captured = capture_operators(form, **given)
        after = ChunkLoss(rows=5)(captured.graph_module)
        (one, *_), expected = outputs_and_gradients(captured.graph_module, captured.inputs)
        (other, *_), found = outputs_and_gradients(after, captured.inputs)
        assert one.isnan()
        assert other.isnan()
        torch.testing.assert_close(found, expected)


def written_between_turns(x: Tensor, w: Tensor, y: Tensor, b: Tensor) -> Tensor:
    logits = F.linear(x, w, b) * 1.0
    sums = [sample.logsumexp(-1) for sample in logits.detach()]
    logits.mul_(2.0)
    return torch.stack(sums).sum() + (logits.log_softmax(-1)[..., 3] ** 2).sum()


def test_a_loop_whose_logits_are_written_to_is_not_rolled_up() -> None:
    captured = capture_operators(written_between_turns, **tensors())
    after = ChunkLoss(rows=5)(captured.graph_module)
    assert_same_gradients(captured.graph_module, after, captured.inputs, 2e-6)


BROADCAST: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "number": lambda sample, number, row: sample.logsumexp(-1) * number,
    "temperature": lambda sample, number, row: (sample / number).logsumexp(-1),
    "row": lambda sample, number, row: (sample + row).logsumexp(-1),
    "over all": lambda sample, number, row: sample.logsumexp(-1) - sample.logsumexp(-1).mean(dim=None) * number,
}


@pytest.mark.parametrize("samples", [LENGTH, LENGTH - 1])
@pytest.mark.parametrize("form", BROADCAST)
def test_what_a_turn_broadcasts_is_not_aligned_with_other_rows(form: str, samples: int) -> None:
    """With as many samples as tokens the shapes would fit all the same."""

    def loss(x: Tensor, w: Tensor, numbers: Tensor, rows: Tensor) -> Tensor:
        logits = F.linear(x, w)
        turns = [BROADCAST[form](logits[at], numbers[at], rows[at]) for at in range(samples)]
        return (torch.stack(turns) ** 2).sum()

    torch.manual_seed(0)
    x, w = torch.randn(samples, LENGTH, WIDTH, requires_grad=True), torch.randn(CLASSES, WIDTH, requires_grad=True)
    captured = capture_operators(loss, x, w, torch.rand(samples) + 0.5, torch.rand(samples, CLASSES))
    after = ChunkLoss(rows=5)(captured.graph_module)
    assert_same_gradients(captured.graph_module, after, captured.inputs, 2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["each token", "TRL's in 16 bits", "z-loss", "distilled"])
def test_16_bits_are_no_worse_than_the_plain_loss(form: str, dtype: torch.dtype) -> None:
    """With weights in fp32 that are cast, as autocast does."""
    _, call = FORMS[form]

    def low(x: Tensor, w: Tensor, y: Tensor, b: Tensor) -> Any:
        return call(x.to(dtype), w.to(dtype), y, b.to(dtype))

    captured = capture_operators(low, **tensors())
    after = ChunkLoss(rows=5)(captured.graph_module)
    assert LINEAR_ROWS in {node.target for node in after.graph.nodes}
    wide = capture_operators(call, **tensors())
    _, exact = outputs_and_gradients(wide.graph_module, wide.inputs)
    _, plain = outputs_and_gradients(captured.graph_module, captured.inputs)
    _, found = outputs_and_gradients(after, captured.inputs)
    for reference, expected, one in zip(exact, plain, found, strict=True):
        assert one is not None
        assert norm_error(one, reference) <= 1.2 * norm_error(expected, reference) + torch.finfo(dtype).eps / 4


LEFT_ALONE: dict[str, tuple[Callable[..., Any], str]] = {
    "sorted": (
        lambda x, w, y, b: F.linear(x, w, b).log_softmax(-1).topk(3).values.sum(),
        "log_softmax is read by topk as well",
    ),
    "returned": (
        lambda x, w, y, b: ((z := F.linear(x, w, b)).logsumexp(-1).sum(), z),
        "the logits are returned as well",
    ),
    "dropped at random": (
        lambda x, w, y, b: F.dropout(F.linear(x, w, b), 0.5).logsumexp(-1).sum(),
        "the logits come from dropout, not from a linear layer",
    ),
    "turned": (
        lambda x, w, y, b: (w @ x[0].t()).transpose(0, 1).log_softmax(-1).gather(1, y[:1].clamp(min=0).t()).sum(),
        "the classes of the loss are not the last dimension of the logits matmul",
    ),
    "turned, cross entropy": (
        lambda x, w, y, b: F.cross_entropy((w @ x[0].t()).transpose(0, 1), y[0]),
        "the classes of the loss are not the last dimension of the logits matmul",
    ),
    "some classes": (
        lambda x, w, y, b: F.linear(x, w, b)[..., 3:].logsumexp(-1).sum(),
        "the logits come from slice, not from a linear layer",
    ),
}


@pytest.mark.parametrize("form", LEFT_ALONE)
def test_left_alone_and_said(form: str) -> None:
    call, reason = LEFT_ALONE[form]
    before = capture_operators(call, **tensors()).graph_module
    assert [loss.reason for loss in find_losses(before)] == [reason]
    assert not diff_graphs(before, ChunkLoss()(before))
