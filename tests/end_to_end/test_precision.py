"""Real architectures in 16 bits: finite, within the budget, every parameter with its gradient, the loss near fp32's."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import memopt
from examples.models.families import BY_NAME, FAMILIES, Batch, Family, causal_batch, loss_of, without_dropout
from examples.models.step import restored_buffers, train_step
from memopt.errors import GIB
from memopt.levers import DEFAULT_LEVERS
from passes.graphs.node_facts import module_path
from tests.end_to_end.usual import gpt2

SMALL = Family("gpt2", gpt2, causal_batch)
TIGHT = {"bf16": 0.0, "fp16": 0.4}
"""Precisions, and the share that every run tries with each; `make test-all` tries both shares, and all families."""


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_16_bits(precision: str) -> None:
    train_in_16_bits(SMALL, precision, {"recompute", "reinplace"}, (TIGHT[precision],))


@pytest.mark.slow
@pytest.mark.parametrize("precision", TIGHT)
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_families(family: Family, precision: str) -> None:
    train_in_16_bits(family, precision, {"recompute", "reinplace"})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2-eager", "moe"])
def test_with_all_levers(name: str) -> None:
    train_in_16_bits(BY_NAME[name], "bf16", DEFAULT_LEVERS)


def train_in_16_bits(
    family: Family, precision: str, allow: Collection[str], shares: Collection[float] = (0.4, 0.0)
) -> None:
    """Train within budgets between the smallest that works (share 0) and the plain model's peak (1)."""
    model, batch = family.make(), family.batch("usual")
    with restored_buffers(model):
        plain = train_step(model, batch)
    plan = memopt.plan(model, 1000, batch, optimizer=None, precision=precision, allow=allow)
    smallest = plan.smallest_gb()
    for share in shares:
        budget_gb = smallest + share * (plan.plain_peak_gb - smallest)
        with restored_buffers(model):
            memopt.optimize(model, budget_gb, optimizer=None, precision=precision, allow=allow)
            step = train_step(model, batch)
            made = memopt.plan_of(model)
            memopt.remove(model)
        assert step.peak_bytes <= budget_gb * GIB
        assert step.peak_bytes <= made.predicted_peak_bytes
        assert step.gradients.keys() == plain.gradients.keys()
        assert all(torch.isfinite(gradient).all() for gradient in step.gradients.values())
        assert all(gradient.dtype == torch.float32 for gradient in step.gradients.values())
        assert torch.isclose(step.loss.float(), plain.loss, rtol=0.03)


def gradients(model: nn.Module, batch: Batch, *, low: bool = False) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        loss = loss_of(model(**batch))
    model.zero_grad()
    loss.backward()
    return torch.cat(
        [parameter.grad.flatten().double() for parameter in model.parameters() if parameter.grad is not None]
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2-eager", "bert", "t5"])
def test_gradients_are_as_exact_as_autocasts(name: str) -> None:
    model = without_dropout(BY_NAME[name].make())
    batch = BY_NAME[name].batch("usual")
    exact = gradients(model.double(), batch)
    model.float()
    autocast = (gradients(model, batch, low=True) - exact).norm()
    memopt.optimize(model, 1000, optimizer=None, precision="bf16")
    assert (gradients(model, batch) - exact).norm() <= 1.15 * autocast


@pytest.mark.slow
def test_the_users_autocast_gives_way_to_a_precision_and_goes_before_auto() -> None:
    family = BY_NAME["gpt2-sdpa"]
    model, batch = without_dropout(family.make()), family.batch("usual")
    found = {}
    for precision in ("fp32", "bf16", "auto"):
        for around in (False, True):
            memopt.optimize(model, 1000, optimizer=None, precision=precision)
            found[precision, around] = gradients(model, batch, low=around)
            memopt.remove(model)
    assert torch.equal(found["bf16", True], found["bf16", False])
    assert torch.equal(found["auto", True], found["fp32", True])
    assert torch.equal(found["auto", True], gradients(model, batch, low=True))


@pytest.mark.slow
def test_the_plan_shows_the_precision_of_every_operator_and_why() -> None:
    model, batch = gpt2("eager"), SMALL.batch("usual")
    rules = {"default": "bf16", "lm_head": "fp32", "transformer.h.0.mlp": "fp32", "softmax": "fp32"}
    plan = memopt.plan(model, 1000, batch, optimizer=None, precision=rules)
    text = str(plan.diff("precision"))
    for reason in ("# fp32: rule 'lm_head'", "# fp32: rule 'softmax'", "# bf16: as under torch.autocast"):
        assert reason in text
    after = plan.graphs["rewritten"][0]
    types = {node.meta["val"].dtype for node in after.graph.nodes if "h.0.mlp" in module_path(node) and node.users}
    assert types <= {torch.float32}
    assert any("ops in bf16" in note for note in plan.notes)
    with pytest.raises(ValueError, match="'lm_haed' matches no operator, module or node of GPT2LMHeadModel"):
        memopt.plan(model, 1000, batch, optimizer=None, precision={"default": "bf16", "lm_haed": "fp32"})


@pytest.mark.slow
def test_what_is_wished_in_fp32_is_not_rounded_for_the_backward_either() -> None:
    family = BY_NAME["bert"]
    model, batch = family.make(), family.batch("usual")
    counts = []
    for rules in ({"default": "bf16"}, {"default": "bf16", "layer_norm": "fp32"}):
        joint = memopt.plan(model, 1000, batch, optimizer=None, precision=rules).graphs["captured"][0]
        readers = joint.graph.find_nodes(op="call_function", target=torch.ops.aten.native_layer_norm_backward.default)
        counts.append(sum(node.args[1].name.startswith("wide") for node in readers))
    assert counts == [len(readers) - 1, 0], "the norm of the head reads 16 bits anyway"


@pytest.mark.slow
def test_a_rotation_of_parts_of_a_fused_projection() -> None:
    """ModernBERT widens queries and keys, which are strided views of one product, and narrows them into new memory."""
    config = transformers.ModernBertConfig(
        vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
    )  # fmt: skip
    ids = torch.randint(3, 256, (2, 32), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = transformers.ModernBertForMaskedLM(config).train()
    with torch.no_grad():
        exact = float(model(input_ids=ids, labels=ids).loss)
    memopt.optimize(model, 1.0, optimizer=None, precision="bf16")
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    assert float(loss.detach()) == pytest.approx(exact, rel=0.02)
    assert all(parameter.grad is not None for parameter in model.parameters())


class HookedValue(nn.Module):
    """Halves the gradient of a value by a hook, one that was read before the hook was there, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        value = self.first(x)
        before = value.sigmoid()
        value.register_hook(lambda gradient: gradient / 2)
        return (self.last(value.relu()) * before).pow(2).mean()


class Halves(torch.autograd.Function):
    """Returns its input, and halves the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 0.5


class OwnFunction(nn.Module):
    """Gives a function of its own a value with other strides once that is computed in 16 bits and cast back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 128), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        part = self.first(x).chunk(2, dim=-1)[0]
        return self.last(Halves.apply(part)).pow(2).mean()  # type: ignore[no-untyped-call]


class Turned(nn.Module):
    """Normalises transposed values; the kernels return contiguous ones, whatever the strides of their input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.scale = nn.Linear(64, 64), nn.InstanceNorm1d(64, affine=True), nn.Linear(64, 64)
        self.batch_norm = nn.BatchNorm1d(64)

    def forward(self, x: Tensor) -> Tensor:
        value = self.first(x).view(4, 4, 64)
        for norm in (self.batch_norm, self.norm):
            value = self.first(norm(value.transpose(1, 2)).transpose(1, 2) * self.scale.weight[0])
        return self.scale(value).pow(2).mean()


class WritesBehindAutograd(nn.Module):
    """Writes a parameter and a value through `data`, and reads both there (Gemma 3n clamps a weight so)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.first.weight.data.clamp_(-0.1, 0.1)
        self.last.weight.data.mul_(0.9)
        value = self.first(x)
        early = self.last(value)  # saves `value`, and computes its gradient with what is written below
        value.data.mul_(2)
        return (self.last(value.tanh()) * value.data * self.first.weight.data.abs().mean() + early).pow(2).mean()


@pytest.mark.parametrize("kind", [HookedValue, OwnFunction, Turned, WritesBehindAutograd])
def test_gradients_in_bf16_are_near_those_in_fp32(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = kind().train(), torch.randn(16, 64)
    before = copy.deepcopy(model.state_dict())
    model(x).backward()
    exact = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}  # type: ignore[union-attr]
    written = copy.deepcopy(model.state_dict())
    model.zero_grad()
    model.load_state_dict(before)
    memopt.optimize(model, 1.0, example_inputs=x, optimizer=None, precision="bf16")
    model(x).backward()
    for name, value in model.state_dict().items():
        assert torch.allclose(value, written[name], rtol=0.02, atol=1e-3)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert (parameter.grad - exact[name]).norm() <= 0.05 * max(exact[name].norm(), torch.tensor(1e-3))
