"""Frozen parameters on the host: the plain model's bits within budgets that the parameters alone exceed."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import memopt
from memopt.errors import GIB
from memopt.planning import terms as model_terms
from memopt.units import size
from passes.ops.offload_ops import host_memory
from tests.linked import linked_cpu

pytestmark = pytest.mark.plans_always  # the plain steps would fit

LEVERS = frozenset({"recompute", "reinplace", "offload_activations", "offload_parameters"})
STEPS = 20
SIZES = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}


class Adapter(nn.Module):
    """A linear layer with a low-rank adapter beside it, as LoRA has it."""

    def __init__(self, inner: nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        self.inner = inner
        self.down, self.up = nn.Linear(inputs, 4, bias=False), nn.Linear(4, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.up(self.down(x))


def adapted(model: nn.Module, names: set[str]) -> nn.Module:
    """Freeze a model, and put adapters around its layers of these names."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, inner in list(module.named_children()):
            if name in names:
                outputs, inputs = inner.weight.shape if isinstance(inner, nn.Linear) else inner.weight.shape[::-1]
                setattr(module, name, Adapter(inner, inputs, outputs))
    return model.train()


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=256, n_positions=32, n_embd=64, n_layer=4, n_head=4)
    return adapted(GPT2LMHeadModel(config), {"c_attn", "c_fc"})


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, intermediate_size=128, max_position_embeddings=32, attn_implementation="eager")
    return adapted(LlamaForCausalLM(config), {"q_proj", "v_proj", "down_proj"})


def batch(length: int = 16) -> dict[str, Tensor]:
    tokens = torch.randint(0, 256, (2, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}


@pytest.fixture(autouse=True)
def linked(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let plans for this CPU offload, and count the host memory in use from here on."""
    monkeypatch.setattr(model_terms, "hardware_of", linked_cpu)
    gc.collect()
    assert host_memory("cpu").leased_bytes == 0, "an earlier test left values on the host"
    host_memory("cpu").most_leased_bytes = 0
    yield
    gc.collect()
    assert host_memory("cpu").leased_bytes == 0


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    trained: list[Any]
    """The parameters that are trained, as arrays: tensors would lie beside later steps."""
    peaks: list[int]


def trained(model: nn.Module, steps: int = STEPS) -> Trained:
    """Train for some steps, each with other random numbers."""
    own = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses, peaks = torch.optim.AdamW(own, lr=1e-2), [], []
    torch.manual_seed(2)
    for _ in range(steps):
        with memopt.measure_peak() as peak:
            loss = model(**batch()).loss
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        peaks.append(peak.bytes)
        del loss
    return Trained(losses, [parameter.detach().numpy().copy() for parameter in own], peaks)


def options(**further: Any) -> dict[str, Any]:
    return {"precision": "fp32", "allow": LEVERS, "effort": "fast", "elsewhere_gb": 0, **further}


@pytest.fixture(scope="module", params=[gpt2, llama], ids=lambda make: make.__name__)
def family(request: pytest.FixtureRequest) -> tuple[Callable[[], nn.Module], Trained]:
    return request.param, trained(request.param())


def between(make: Callable[[], nn.Module], share: float) -> float:
    """A budget that lies so far between the smallest that works and the plain peak."""
    with torch.device("meta"):
        model = make()
    roomy = memopt.plan(model, 1000, batch(), **options())
    least = roomy.smallest_bytes()
    return (1.01 * least + share * (roomy.plain.peak_bytes - least)) / GIB


@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 0.5, 0.8])
def test_twenty_steps_have_the_plain_bits(family: tuple[Callable[[], nn.Module], Trained], share: float) -> None:
    make, plain = family
    budget_gb = between(make, share)
    model = memopt.optimize(make(), budget_gb, example_inputs=batch(), **options())
    ours, plan = trained(model), memopt.plan_of(model)
    assert ours.losses == plain.losses
    assert all(map(np.array_equal, ours.trained, plain.trained))
    assert max(ours.peaks) <= plan.predicted_peak_bytes <= budget_gb * GIB
    host = host_memory("cpu")
    assert plan.hosted_bytes <= host.leased_bytes
    assert host.most_leased_bytes <= plan.host_bytes / 0.8 + 4096 * 200
    frozen = sum(one.nbytes for one in model.parameters() if not one.requires_grad)
    if share == 0:
        assert plan.hosted_bytes > 0.9 * frozen
        assert budget_gb * GIB < sum(one.nbytes for one in model.parameters()), "the parameters alone exceed it"
        assert plan.brought_bytes > plan.hosted_bytes, "some are brought twice"
    if share == 0.8:
        assert plan.hosted_bytes == 0, "what fits is not moved"
    assert ("offload_parameters" in plan.levers) == (plan.hosted_bytes > 0)
    memopt.remove(model)


def test_without_the_lever_it_does_not_fit() -> None:
    budget_gb = between(gpt2, 0.1)
    with pytest.raises(memopt.BudgetError) as refused:
        memopt.plan(gpt2(), budget_gb, batch(), **options(allow=LEVERS - {"offload_parameters"}))
    assert "offload_parameters" in str(refused.value)


def test_a_budget_below_the_smallest_is_refused() -> None:
    budget_gb = between(gpt2, 0.0)
    with pytest.raises(memopt.BudgetError) as refused:
        memopt.plan(gpt2(), 0.9 * budget_gb, batch(), **options())
    assert refused.value.smallest_bytes <= budget_gb * GIB


@pytest.fixture
def hosted() -> Iterator[nn.Module]:
    """A model whose frozen parameters lie on the host."""
    budget_gb = between(gpt2, 0.1)
    model = memopt.optimize(gpt2(), budget_gb, example_inputs=batch(), **options())
    assert memopt.plan_of(model).hosted_bytes > 0
    yield model
    memopt.remove(model)


def test_state_is_saved_and_loaded(hosted: nn.Module) -> None:
    plain = gpt2()
    assert all(map(torch.equal, hosted.state_dict().values(), plain.state_dict().values()))
    saved = io.BytesIO()
    torch.save(hosted.state_dict(), saved)
    saved.seek(0)
    loaded = torch.load(saved)
    assert all(map(torch.equal, loaded.values(), plain.state_dict().values()))
    doubled = {name: 2 * value for name, value in loaded.items()}
    hosted.load_state_dict(doubled)
    plain.load_state_dict(doubled)
    ours, theirs = trained(hosted, 2), trained(plain, 2)
    assert ours.losses == theirs.losses
    hosted.load_state_dict(loaded, assign=True)
    assert trained(hosted, 2).losses == trained(gpt2(), 2).losses


def test_copies_and_pickles_have_the_values(hosted: nn.Module) -> None:
    for made in (copy.deepcopy(hosted), torch.load(_dumped(hosted), weights_only=False)):
        assert all(map(torch.equal, made.state_dict().values(), gpt2().state_dict().values()))


def _dumped(model: nn.Module) -> io.BytesIO:
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    return saved


def test_eval_and_calls_without_gradients(hosted: nn.Module) -> None:
    plain = gpt2()
    with torch.no_grad():
        assert torch.equal(hosted.eval()(**batch()).logits, plain.eval()(**batch()).logits)
    assert host_memory("cpu").leased_bytes > 0, "parameters are brought one by one"
    assert torch.equal(
        hosted.generate(batch()["input_ids"], max_new_tokens=3, do_sample=False, pad_token_id=0),
        plain.generate(batch()["input_ids"], max_new_tokens=3, do_sample=False, pad_token_id=0),
    )
    ours, theirs = hosted(**batch()), plain(**batch())
    ours.loss.backward()
    theirs.loss.backward()
    assert ours.loss == theirs.loss
    for one, other in zip(hosted.parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or other.grad is None or torch.equal(one.grad, other.grad)
    hosted.zero_grad(), plain.zero_grad()
    assert trained(hosted.train(), 2).losses == trained(plain.train(), 2).losses


def test_remove_gives_the_parameters_back(hosted: nn.Module) -> None:
    parameters = list(hosted.parameters())
    memopt.remove(hosted)
    gc.collect()
    assert host_memory("cpu").leased_bytes == 0
    assert all(map(torch.equal, hosted.state_dict().values(), gpt2().state_dict().values()))
    assert all(one is other for one, other in zip(parameters, hosted.parameters(), strict=True))
    assert trained(hosted, 2).losses == trained(gpt2(), 2).losses


def test_a_model_that_is_dropped_leaves_nothing() -> None:
    model = memopt.optimize(gpt2(), between(gpt2, 0.1), example_inputs=batch(), **options())
    trained(model, 2)
    assert host_memory("cpu").leased_bytes > 0
    del model
    gc.collect()
    assert host_memory("cpu").leased_bytes == 0


def test_a_second_optimize(hosted: nn.Module) -> None:
    memopt.optimize(hosted, 1.0, example_inputs=batch(), **options())
    gc.collect()
    assert host_memory("cpu").leased_bytes == 0
    assert memopt.plan_of(hosted).hosted_bytes == 0
    budget_gb = between(gpt2, 0.2)
    memopt.optimize(hosted, budget_gb, example_inputs=batch(), **options())
    assert memopt.plan_of(hosted).hosted_bytes > 0
    assert trained(hosted, 2).losses == trained(gpt2(), 2).losses


def test_planned_at_the_first_call_and_for_other_lengths() -> None:
    budget_gb = between(gpt2, 0.3)
    model, plain = memopt.optimize(gpt2(), budget_gb, **options()), gpt2()
    for length in (16, 8, 16, 12):
        torch.manual_seed(length)
        ours = model(**batch(length)).loss
        ours.backward()
        torch.manual_seed(length)
        theirs = plain(**batch(length)).loss
        theirs.backward()
        assert torch.equal(ours, theirs)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad is None or torch.equal(one.grad, other.grad)


def test_outputs_are_computed_on_demand(hosted: nn.Module) -> None:
    plain = gpt2()
    torch.manual_seed(3)
    ours = hosted(**batch())
    torch.manual_seed(3)
    theirs = plain(**batch())
    with pytest.warns(UserWarning, match="looked at"):
        assert torch.equal(ours.logits + 0, theirs.logits)


def test_two_forwards_before_a_backward(hosted: nn.Module) -> None:
    roomy = memopt.plan(gpt2(), 1000, batch(), **options())
    memopt.optimize(hosted, (roomy.smallest_bytes() + 2 * roomy.held_bytes) / GIB, forwards=2, **options())
    plain = gpt2()
    for model in (hosted, plain):
        torch.manual_seed(4)
        first, second = model(**batch()).loss, model(**batch(12)).loss
        (first + second).backward()
    for one, other in zip(hosted.parameters(), plain.parameters(), strict=True):
        assert one.grad is None or torch.equal(one.grad, other.grad)


def test_a_tied_or_trained_parameter_stays() -> None:
    model = gpt2()
    model.transformer.wte.weight.requires_grad_(True)  # and with it lm_head.weight, which is the same one
    plan = memopt.plan(model, 1000, batch(), **options())
    least = plan.at(plan.smallest_gb())
    frozen = sum(one.nbytes for one in model.parameters() if not one.requires_grad)
    assert 0 < least.hosted_bytes <= frozen


def test_the_host_has_a_budget() -> None:
    budget_gb, frozen = between(gpt2, 0.1), sum(one.nbytes for one in gpt2().parameters() if not one.requires_grad)
    plan = memopt.plan(gpt2(), budget_gb, batch(), **options(host_gb=2 * frozen / GIB))
    assert plan.host_bytes <= 2 * frozen
    assert plan.host_room_bytes == 2 * frozen
    assert f" of {size(2 * frozen)}" in str(plan)
    with pytest.raises(memopt.BudgetError, match="host_gb") as refused:
        memopt.plan(gpt2(), budget_gb, batch(), **options(host_gb=0.2 * frozen / GIB))
    assert refused.value.smallest_bytes > budget_gb * GIB
    with pytest.raises(TypeError, match="host_gb"):
        memopt.plan(gpt2(), budget_gb, batch(), **options(host_gb="all"))
