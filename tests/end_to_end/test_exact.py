"""Where tracing used to depart from eager mode: loss, gradients, buffers and the next random number, bit by bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memopt
from examples.models.families import FAMILIES, Batch, Family, integers, library, loss_of, normals, seeded

pytestmark = pytest.mark.plans_always  # the plain steps would fit

TOKENS, LENGTH, VOCABULARY = 2, 48, 128
BITWISE: dict[str, Any] = {"precision": "fp32", "allow": {"recompute", "reinplace"}, "optimizer": torch.optim.SGD}

gqa = library(
    "Llama", "LlamaForCausalLM", "ForCausalLM", vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96,
    num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, use_cache=False,
)  # fmt: skip
gpt2 = library(
    "GPT2", "GPT2LMHeadModel", "ForCausalLM", vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=1, n_head=4,
    resid_pdrop=0.3, use_cache=False,
)  # fmt: skip
odd_gpt2 = library(
    "GPT2", "GPT2LMHeadModel", "ForCausalLM", vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=1, n_head=4,
    resid_pdrop=0.15, use_cache=False,
)  # fmt: skip


def broken_gqa() -> nn.Module:
    """A model whose blocks break the graph, as those of FSDP2 do: the mask is made by eager code between regions."""
    model = gqa()
    for block in model.model.layers:  # type: ignore[union-attr]
        block.register_forward_pre_hook(torch.compiler.disable(lambda module, given: None))
    return model


SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
LIBRARY = {
    "Qwen3": library("Qwen3", "Qwen3ForCausalLM", "ForCausalLM", num_key_value_heads=2, head_dim=8, **SMALL),
    "Gemma2": library(
        "Gemma2", "Gemma2ForCausalLM", "ForCausalLM", num_key_value_heads=2, head_dim=8, sliding_window=16, **SMALL
    ),
    "OPT": library("OPT", "OPTForCausalLM", "ForCausalLM", ffn_dim=64, word_embed_proj_dim=32, **SMALL),
    "RoBERTa": library("Roberta", "RobertaForMaskedLM", intermediate_size=64, **SMALL),
    "DistilBERT": library(
        "DistilBert", "DistilBertForMaskedLM", vocab_size=VOCABULARY, dim=32, hidden_dim=64, n_layers=2, n_heads=4
    ),
    "Phi3": library(
        "Phi3", "Phi3ForCausalLM", "ForCausalLM", num_key_value_heads=2, resid_pdrop=0.1, pad_token_id=0, **SMALL
    ),
}
"""Decoders and encoders beside those of `examples/models/families.py`, with the library's own dropout."""


class Upsampled(nn.Module):
    """Interpolation, whose gradient torch.compile sums in another order and with twice the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        wide = F.interpolate(self.encode(x).relu(), scale_factor=4, mode="bilinear")
        return self.decode(F.interpolate(wide, scale_factor=0.5, mode="bicubic")).pow(2).mean()


class DeadDraws(nn.Module):
    """Random numbers that nobody reads, with inputs and without."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        torch.rand(3)
        h = self.layer(x)
        self.dropout(h).relu()
        with torch.no_grad():
            torch.bernoulli(h.sigmoid())
        return self.dropout(h).pow(2).mean()


class Transposed(nn.Module):
    """Batch normalisation and softplus of transposed values, whose kernels lay memory out as torch's fakes do not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(self.norm(x.transpose(1, 2)).transpose(1, 2))
        return (F.softplus(x).transpose(1, 2).cumsum(-1) ** 2).mean()


def tokens(**extra: Any) -> Callable[[], Batch]:
    def batch() -> Batch:
        ids = integers(VOCABULARY, TOKENS, LENGTH)
        return {"input_ids": ids, "labels": ids, **extra}

    return batch


def padding() -> Tensor:
    mask = torch.ones(TOKENS, LENGTH, dtype=torch.int64)
    mask[1, -7:] = 0
    return mask


ALL_ONES = torch.ones(TOKENS, LENGTH, dtype=torch.int64)
COUNTED = torch.arange(LENGTH).expand(TOKENS, LENGTH)
CASES = {
    "gqa": (gqa, tokens(), False),
    "gqa with a mask of ones": (gqa, tokens(attention_mask=ALL_ONES), False),
    "gqa with padding": (gqa, tokens(attention_mask=padding()), False),
    "gqa with positions": (gqa, tokens(position_ids=COUNTED), False),
    "gqa with packed sequences": (gqa, tokens(position_ids=COUNTED % 16), False),
    "gqa with graph breaks": (broken_gqa, tokens(), False),
    "gqa under autocast": (gqa, tokens(), True),
    "dropout of an odd share": (odd_gpt2, tokens(), False),
    "dropout under autocast": (gpt2, tokens(), True),
    "dead draws": (seeded(DeadDraws), lambda: {"x": normals(16, 8)}, False),
    "layouts of kernels": (seeded(Transposed), lambda: {"x": normals(12, 8, 16)}, False),
    "interpolation": (seeded(Upsampled), lambda: {"x": normals(2, 4, 12, 12)}, False),
}


def step(model: nn.Module, batch: Batch, autocast: bool) -> dict[str, Tensor]:
    torch.manual_seed(3)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = loss_of(model(**batch))
    loss.backward()  # type: ignore[no-untyped-call]
    found = {"loss": loss.detach(), "the next random number": torch.rand([])}
    found |= {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found | {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}


def assert_exact(make: Callable[[], nn.Module], batch: Batch, *, autocast: bool = False) -> None:
    """Assert that a step is the plain one's, bit by bit, at a loose budget, at the smallest, and half-way between."""
    model = make()
    plain = step(copy.deepcopy(model), batch, autocast)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        plan = memopt.plan(copy.deepcopy(model), 100, batch, **BITWISE)
    smallest = plan.smallest_gb()
    for budget_gb in (100, (smallest + plan.predicted_peak_gb) / 2, smallest):
        planned = memopt.optimize(copy.deepcopy(model), budget_gb, **BITWISE)
        ours = step(planned, batch, autocast)
        assert ours.keys() == plain.keys()
        differs = [name for name in plain if not torch.equal(ours[name], plain[name])]
        assert not differs, f"at {budget_gb} GB: {differs}"


QUICK = ("dead draws", "layouts of kernels", "interpolation")
"""Cases that every run tries; `make test-all` tries all."""


@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c in QUICK else [pytest.mark.slow]) for c in CASES])
def test_bits_of_the_plain_step(case: str) -> None:
    make, batch, autocast = CASES[case]
    assert_exact(make, batch(), autocast=autocast)


NO_AUTOCAST = ("moe",)
"""Families that mix dtypes, which raises an error in the plain model."""


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", LIBRARY)
def test_library_models(name: str, autocast: bool) -> None:
    assert_exact(LIBRARY[name], tokens()(), autocast=autocast)


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in FAMILIES if family.name not in NO_AUTOCAST], ids=str)
def test_families_under_autocast(family: Family) -> None:
    assert_exact(family.make, family.batch("shorter"), autocast=True)


@pytest.mark.parametrize("share", [0.1, 0.15, 0.3, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_dropout(share: float, dtype: torch.dtype) -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(normals(64, 32).to(dtype))

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(F.dropout(x.t() @ self.weight, share).t(), share).pow(2).mean()

    assert_exact(Dropping, {"x": normals(64, 48).to(dtype)})


@pytest.mark.slow
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_differ_by_rounding_at_most(kind: Any) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = kind(16, 16, num_layers=2, dropout=0.2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x)[0].pow(2).mean()

    model, batch = seeded(Recurrent)(), {"x": normals(2, 6, 16)}
    plain = step(copy.deepcopy(model), batch, autocast=False)
    smallest = memopt.plan(copy.deepcopy(model), 100, batch, **BITWISE).smallest_gb()
    memopt.optimize(model, smallest, **BITWISE)
    ours = step(model, batch, autocast=False)
    for name, value in plain.items():
        torch.testing.assert_close(
            ours[name], value, rtol=1e-5, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}"
        )
    exact = all(torch.equal(ours[name], value) for name, value in plain.items())
    assert exact or any("the same bits as in eager mode" in note for note in memopt.plan_of(model).notes)
