"""Models most of whose parameters are frozen, and budgets within which some of these lie on the host."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import memopt
from memopt.errors import GIB
from memopt.planning import terms as model_terms
from passes.ops.offload_ops import host_memory
from tests.linked import linked_cpu

LEVERS = frozenset({"recompute", "reinplace", "offload_activations", "offload_parameters"})
STEPS = 20


class Adapter(nn.Module):
    """A linear layer with a low-rank adapter beside it, as LoRA has it."""

    def __init__(self, inner: nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        self.inner = inner
        self.down, self.up = nn.Linear(inputs, 4, bias=False), nn.Linear(4, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x) + self.up(self.down(x))
        return result


def adapted(model: nn.Module, names: set[str]) -> nn.Module:
    """Freeze a model, and put adapters around its layers of these names."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, inner in list(module.named_children()):
            if name in names:
                weight: Any = inner.weight
                outputs, inputs = weight.shape if isinstance(inner, nn.Linear) else weight.shape[::-1]
                setattr(module, name, Adapter(inner, inputs, outputs))
    return model.train()


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=256, n_positions=32, n_embd=64, n_layer=2, n_head=4)
    return adapted(GPT2LMHeadModel(config), {"c_attn", "c_fc"})


def llama() -> nn.Module:
    """A Llama with the adapters of PEFT."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, intermediate_size=128, max_position_embeddings=32, attn_implementation="eager")
    projections = ["q_proj", "v_proj", "down_proj"]
    adapters = peft.LoraConfig(r=4, target_modules=projections, lora_dropout=0.1, task_type="CAUSAL_LM")
    model: nn.Module = peft.get_peft_model(LlamaForCausalLM(config), adapters).train()
    return model


def qwen3_moe() -> nn.Module:
    """A mixture of experts whose weights are stacked, with the adapters of PEFT on its attention."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    config = Qwen3MoeConfig(**sizes, **experts, num_key_value_heads=2, max_position_embeddings=32, use_cache=False)
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model: nn.Module = peft.get_peft_model(Qwen3MoeForCausalLM(config), adapters).train()
    return model


def nf4() -> nn.Module:
    """A Llama whose frozen layers are 4-bit weights of bitsandbytes with quantised scales, with adapters of PEFT."""
    bitsandbytes, peft = pytest.importorskip("bitsandbytes"), pytest.importorskip("peft")
    sizes = {"vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, intermediate_size=256, max_position_embeddings=32, use_cache=False)
    with torch.device("cpu"):  # nothing is quantised on "meta"
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        for layer in list(model.model.layers.modules()):
            for name, inner in list(layer.named_children()):
                if isinstance(inner, nn.Linear):
                    kind = {"bias": False, "compute_dtype": torch.float32, "quant_type": "nf4"}
                    packed = bitsandbytes.nn.Linear4bit(inner.in_features, inner.out_features, **kind)
                    packed.load_state_dict(inner.state_dict())
                    setattr(layer, name, packed.to("cpu"))
        adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
        adapted: nn.Module = peft.get_peft_model(model, adapters).train()
        return adapted


class Packed(nn.Module):
    """A frozen linear layer of 4-bit values, two in a byte, with a scale for each row, as quantised bases have it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        values = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8)
        self.weight = nn.Parameter(values, requires_grad=False)
        self.register_buffer("scale", torch.rand(outputs, 1) / 64)
        self.register_buffer("levels", torch.linspace(-1, 1, 16))

    def forward(self, x: Tensor) -> Tensor:
        values = torch.stack([self.weight & 15, self.weight >> 4], -1).flatten(1)
        return nn.functional.linear(x, self.levels[values.long()] * self.scale)


class Quantised(nn.Module):
    """Adapters on a base of 4-bit weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 128).requires_grad_(False)
        self.layers = nn.ModuleList(Adapter(Packed(128, 128), 128, 128) for _ in range(6))
        self.head = nn.Linear(128, 256).requires_grad_(False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def quantised() -> nn.Module:
    torch.manual_seed(0)
    return Quantised().train()


class Mixture(nn.Module):
    """A mixture of frozen experts, of which a router that is trained weighs the two best for each token."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(count)
        )
        self.experts.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        best = scores >= scores.topk(2, -1).values[..., 1:]
        weights = torch.where(best, scores, 0.0)
        outputs = [expert(x) * weights[..., number, None] for number, expert in enumerate(self.experts)]
        return x + torch.stack(outputs).sum(0)


class Experts(nn.Module):
    """Mixtures of experts between a frozen embedding and a frozen head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = (
            nn.Embedding(256, 64).requires_grad_(False),
            nn.Linear(64, 256).requires_grad_(False),
        )
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(64), Mixture(64, 4)) for _ in range(2))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def experts() -> nn.Module:
    torch.manual_seed(0)
    return Experts().train()


def batch(length: int = 16, seed: int = 1) -> dict[str, Tensor]:
    tokens = torch.randint(0, 256, (2, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "labels": tokens}


@dataclass(frozen=True)
class Frozen:
    """A kind of model, and its batches."""

    make: Callable[[], nn.Module]
    batch: Callable[..., dict[str, Tensor]] = batch

    def loss(self, model: nn.Module, given: dict[str, Tensor]) -> Tensor:
        result: Any = model(**given)
        loss: Tensor = result if isinstance(result, Tensor) else result.loss
        return loss

    def roomy(self) -> memopt.Plan:
        """The plan for more than is needed, which knows the smallest budget."""
        with torch.device("meta"):
            model = self.make()
        return memopt.plan(model, 1000, self.batch(), **options())

    @functools.cached_property
    def _ends(self) -> tuple[int, int]:
        """The smallest budget and the plain peak, in bytes."""
        roomy = self.roomy()
        return roomy.smallest_bytes(), roomy.plain.peak_bytes

    def between(self, share: float) -> float:
        """A budget that lies so far between the smallest that works and the plain peak."""
        least, plain = self._ends
        return (1.01 * least + share * (plain - least)) / GIB

    @functools.cached_property
    def plain(self) -> Trained:
        """The plain model's training result."""
        return trained(self, self.make())

    def optimized(self, share: float, **further: Any) -> nn.Module:
        """A model that is planned for the budget at that share."""
        model = self.make()
        memopt.optimize(model, self.between(share), example_inputs=self.batch(), **options(**further))
        return model


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    values: list[Any]
    """The parameters that are trained, as arrays: tensors would lie beside later steps."""
    peaks: list[int]


def trained(family: Frozen, model: nn.Module, steps: int = STEPS) -> Trained:
    """Train for some steps, each with other random numbers."""
    own = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses, peaks = torch.optim.AdamW(own, lr=1e-2), [], []
    torch.manual_seed(2)
    gc.collect()  # weights of bitsandbytes are parts of reference cycles
    for _ in range(steps):
        with memopt.measure_peak() as peak:
            loss = family.loss(model, family.batch())
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        peaks.append(peak.bytes)
        del loss
    return Trained(losses, [parameter.detach().numpy().copy() for parameter in own], peaks)


def assert_same(ours: Trained, plain: Trained) -> None:
    """Assert that two runs have the same bits."""
    assert ours.losses == plain.losses
    assert all(map(np.array_equal, ours.values, plain.values))


def options(**further: Any) -> dict[str, Any]:
    return {"precision": "fp32", "allow": LEVERS, "effort": "fast", "elsewhere_gb": 0, **further}


def frozen_bytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters() if not parameter.requires_grad)


def linking(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let plans for this CPU use a link to the host, and count the host memory in use from here on."""
    patch.setattr(model_terms, "hardware_of", linked_cpu)
    gc.collect()
    assert host_memory("cpu").leased_bytes == 0, "an earlier test left values on the host"
    host_memory("cpu").most_leased_bytes = 0
    yield
    gc.collect()
    assert host_memory("cpu").leased_bytes == 0


@pytest.fixture
def linked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As `linking`, for one test."""
    yield from linking(monkeypatch)


GPT2, LLAMA, EXPERTS = Frozen(gpt2), Frozen(llama), Frozen(experts)
QWEN3_MOE, QUANTISED, NF4 = Frozen(qwen3_moe), Frozen(quantised), Frozen(nf4)
