"""Models whose Python code looks at values: layers dropped by a random number, masks drawn by numpy."""

from __future__ import annotations

import copy
import gc
import random
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

import memopt
from memopt.account.eager_bytes import ValueIsRead
from memopt.account.plain_count import count_on_values, count_plain_step
from memopt.compat.modules import plain_call
from memopt.device.devices import hardware
from memopt.errors import GIB
from tests.marks import slow

EXACT: dict[str, Any] = {"precision": "fp32", "allow": {"recompute", "reinplace"}, "elsewhere_gb": 0}
Batch = dict[str, torch.Tensor]


def opt() -> tuple[nn.Module, Batch]:
    """OPT, which draws a number before each layer and leaves the layer out where that is below 0.3."""
    config = transformers.OPTConfig(
        vocab_size=64, hidden_size=32, ffn_dim=64, num_hidden_layers=4, num_attention_heads=2, word_embed_proj_dim=32,
        layerdrop=0.3, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(0))
    return transformers.OPTForCausalLM(config).train(), {"input_ids": ids, "labels": ids}


def wav2vec2(layerdrop: float = 0.0) -> tuple[nn.Module, Batch]:
    """Wav2Vec2, whose masks numpy draws."""
    config = transformers.Wav2Vec2Config(
        vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 4), num_feat_extract_layers=2, layerdrop=layerdrop,
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, mask_time_prob=0.3, mask_time_length=4,
    )  # fmt: skip
    draws = torch.Generator().manual_seed(0)
    audio, labels = torch.randn(2, 2000, generator=draws), torch.randint(1, 32, (2, 8), generator=draws)
    return transformers.Wav2Vec2ForCTC(config).train(), {"input_values": audio, "labels": labels}


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def step(model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer, number: int) -> tuple[float, ...]:
    """Train one step; returns the loss and the next random numbers of torch, Python and numpy."""
    seed(number)
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), torch.rand([]).item(), random.random(), float(np.random.rand())


@pytest.mark.plans_always
@pytest.mark.parametrize("make", [opt, slow(wav2vec2)])
def test_every_way_is_planned_when_it_comes_and_right(make: Any) -> None:
    seed(0)
    model, batch = make()
    plain = copy.deepcopy(model)
    memopt.optimize(model, 1.0, **EXACT)
    ours, theirs = (torch.optim.AdamW(one.parameters(), 1e-3) for one in (model, plain))
    regions = []
    for number in range(6):
        assert step(model, batch, ours, number) == step(plain, batch, theirs, number)
        regions.append(len(memopt.plan_of(model).regions))
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)
    assert regions == sorted(regions)  # runs of regions are added, and none is forgotten


@pytest.mark.plans_always
@pytest.mark.slow
def test_a_tight_budget_holds_on_every_way() -> None:
    seed(0)
    model, batch = opt()
    plan = memopt.plan(copy.deepcopy(model), 1, batch, **EXACT)
    budget = 1.5 * plan.smallest_gb()
    memopt.optimize(model, budget, **EXACT)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for number in range(6):
        step(model, batch, optimizer, number)
        seed(number)
        parameters = sum(parameter.nbytes for parameter in model.parameters())
        with memopt.measure_peak() as peak:
            model(**batch).loss.backward()
        optimizer.zero_grad()
        assert 3 * parameters + peak.allocated_bytes <= budget * GIB


@pytest.mark.slow
def test_planning_and_counting_leave_the_random_generators_as_they_are() -> None:
    seed(0)
    model, batch = wav2vec2(layerdrop=0.3)
    seed(1)
    expected = torch.rand([]).item(), random.random(), float(np.random.rand())
    for look in (lambda: memopt.plan(model, 1.0, batch, **EXACT), lambda: count(model, batch)):
        seed(1)
        look()
        assert (torch.rand([]).item(), random.random(), float(np.random.rand())) == expected


def count(model: nn.Module, batch: Batch) -> None:
    with suppress(ValueIsRead):
        count_plain_step(model, plain_call(model), ((), batch), hardware("cpu"), gradients_held=False)


class Choosing(nn.Module):
    """Leaves layers out by a random number, in a loop in which torch.compile captures nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if not (torch.rand([]) < 0.3):
                x = x + layer(x).relu()
        return x.pow(2).mean()


def test_a_model_of_which_nothing_can_be_captured_runs_plain_where_it_surely_fits() -> None:
    seed(0)
    model, x = Choosing().train(), torch.randn(2048, 64)
    plain = copy.deepcopy(model)
    seed(1)
    with memopt.measure_peak() as peak:
        plain(x).backward()
    held = sum(parameter.nbytes for parameter in plain.parameters())
    plain.zero_grad()
    memopt.optimize(model, (2 * peak.allocated_bytes + 4 * held) / GIB, **EXACT)
    for number in range(3):
        for one in (model, plain):
            one.zero_grad()
            seed(number)
            one(x).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert (ours.grad is None and theirs.grad is None) or torch.equal(ours.grad, theirs.grad)
    with pytest.raises(memopt.CaptureError, match="cannot be shown"):
        memopt.plan_of(model)
    tight = memopt.optimize(copy.deepcopy(plain), (peak.allocated_bytes + 4 * held) / GIB, **EXACT)
    with pytest.raises(
        memopt.BudgetError, match=r"the plain step\n(.*\n)*.*branching.*move the loop into its own function"
    ):
        tight(x)


class ChoosingApart(Choosing):
    """The same with its loop in a function of its own, as the error advises, and a layer before it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loop(self.first(x).relu()).pow(2).mean()

    def loop(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if not (torch.rand([]) < 0.3):
                x = x + layer(x).relu()
        return x


@pytest.mark.plans_always
def test_the_advice_for_a_model_of_which_nothing_can_be_captured() -> None:
    seed(0)
    model, x = ChoosingApart().train(), torch.randn(256, 64)
    plain = copy.deepcopy(model)
    memopt.optimize(model, 1.0, **EXACT)
    for one in (model, plain):
        seed(1)
        one(x).backward()
    assert memopt.plan_of(model).predicted_peak_gb < 1
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None and theirs.grad is None) or torch.equal(ours.grad, theirs.grad)


def test_a_count_does_not_choose_a_branch() -> None:
    model = Choosing().train()
    call = (torch.randn(8, 64),), {}
    with pytest.raises(ValueIsRead):
        count_plain_step(model, plain_call(model), call, hardware("cpu"), gradients_held=False)
    found = count_on_values(model, plain_call(model), call, hardware("cpu"), 1 << 30)
    assert found is not None
    assert found.depends_on_values
    assert count_on_values(model, plain_call(model), call, hardware("cpu"), found.peak_bytes // 4) is None
    assert all(parameter.grad is None for parameter in model.parameters())


class Between(nn.Module):
    """Uses parameters in eager code between two regions, before a branch on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.layers[0](x).relu()
        torch._dynamo.graph_break()
        x = x + torch._dynamo.disable(self.layers[1])(x).relu()
        if x.sum() > 1e9:
            x = x * 2
        return self.layers[2](x).pow(2).mean()


@pytest.mark.parametrize("kind", [Between, Choosing])
@pytest.mark.parametrize("always", [False, pytest.param(True, marks=pytest.mark.plans_always)])
def test_hooks_see_the_gradients_of_training_steps_alone(kind: type[nn.Module], always: bool) -> None:
    """A hook may step the optimiser or exchange gradients: a trial step of the planning must not reach it."""
    seed(0)
    model = kind().train()
    plain = copy.deepcopy(model)
    memopt.optimize(model, 1.0, **EXACT | {"allow": EXACT["allow"] | {"plain"}})
    seen: dict[nn.Module, list[tuple[str, torch.Tensor]]] = {model: [], plain: []}
    for one, notes in seen.items():
        for name, parameter in one.named_parameters():
            parameter.register_hook(lambda grad, name=name, notes=notes: notes.append((name, grad.clone())))
            parameter.register_post_accumulate_grad_hook(
                lambda leaf, name=name, notes=notes: notes.append((name, leaf.grad.clone()))
            )
        one.layers[1].register_full_backward_hook(  # type: ignore[union-attr, operator]
            lambda module, grads, outputs, notes=notes: notes.append(("layer", outputs[0].clone()))
        )
    x = torch.randn(8, 64)
    for number in range(2):
        for one in (model, plain):
            seed(number)
            one(x).backward()
    assert len(seen[plain]) > 0
    assert sorted(name for name, _ in seen[model]) == sorted(name for name, _ in seen[plain])
    for name in {name for name, _ in seen[plain]}:
        ours, theirs = ([grad for other, grad in seen[one] if other == name] for one in (model, plain))
        assert all(map(torch.equal, ours, theirs))


class Counting(nn.Module):
    """Scales by numbers that Python takes from its activations."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        positive = int((h.detach() > 0).sum())
        h = h.tanh() + positive / h.numel()
        h = self.second(h * h.detach().mean().item()) + positive
        return h.tanh().pow(2).mean()


@pytest.mark.plans_always
def test_a_hook_on_an_activation_between_graph_breaks() -> None:
    """The regions of a broken call are first run without gradients, where a tensor takes no hook."""
    seed(0)
    plain, batch = opt()
    for layer in plain.model.decoder.layers:  # type: ignore[union-attr, operator]
        layer.fc1.register_forward_hook(halve_gradient)  # type: ignore[union-attr, operator]
    model = copy.deepcopy(plain)
    memopt.optimize(model, 1.0, **EXACT)
    for number in range(2):
        results = []
        for one in (plain, model):
            seed(number)
            one.zero_grad()
            loss = one(**batch).loss
            loss.backward()
            results.append((loss.item(), [parameter.grad for parameter in one.parameters()]))
        assert results[0][0] == results[1][0]
        for expected, found in zip(results[0][1], results[1][1], strict=True):
            assert found is None if expected is None else torch.equal(expected, found)


def halve_gradient(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient / 2)


def test_numbers_from_activations_are_factors_of_any_kind() -> None:
    seed(0)
    model = Counting().train()
    plain, x = copy.deepcopy(model), torch.randn(256, 64)
    roomy = memopt.plan(copy.deepcopy(model), 1.0, x, **EXACT)
    memopt.optimize(model, roomy.smallest_gb(), example_inputs=x, **EXACT)
    for number in range(2):
        losses = []
        for one in (model, plain):
            one.zero_grad()
            seed(number)
            loss = one(x)
            loss.backward()
            losses.append(float(loss.detach()))
            del loss
        assert losses[0] == losses[1]
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]


class Steep(Counting):
    """Has a factor from its activations where autograd asks whether it is 1."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return torch.add(h.tanh(), h, alpha=int((h.detach() > 0).sum())).pow(2).mean()


@pytest.mark.plans_always
def test_what_cannot_be_traced_is_refused_with_its_line_or_runs_plain() -> None:
    x = torch.randn(256, 64)
    with pytest.raises(
        memopt.CaptureError, match=r"Steep cannot be captured as a graph: .*test_values_in_python.py:\d+"
    ):
        memopt.optimize(Steep().train(), 1.0, example_inputs=x, **EXACT)
    model = Steep().train()
    plain = copy.deepcopy(model)
    memopt.optimize(model, 1.0, **EXACT | {"allow": EXACT["allow"] | {"plain"}})
    with pytest.warns(UserWarning, match="trains without a plan from now on"):
        model(x).backward()
    plain(x).backward()
    assert torch.equal(model.first.weight.grad, plain.first.weight.grad)  # type: ignore[arg-type]


class Words(nn.Module):
    """Two recurrent layers, whose kernels save more for their backward than fakes of their results tell."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(500, 64), nn.Linear(64, 500)
        self.rnn = nn.LSTM(64, 64, 2, dropout=0.2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return nn.functional.log_softmax(self.head(self.rnn(self.embedding(words))[0]).view(-1, 500), dim=1)


@pytest.mark.slow
def test_a_recurrent_layer_that_may_hold_more_than_is_left_is_not_run_to_be_counted() -> None:
    torch.manual_seed(0)
    words, targets = torch.randint(0, 500, (35, 40)), torch.randint(0, 500, (1400,))

    def step(model: nn.Module) -> int:
        with memopt.measure_peak() as peak:
            nn.functional.nll_loss(model(words), targets).backward()
        return peak.bytes

    gc.collect()  # models of other tests
    model = Words().train()
    step(model)  # it allocates the gradients
    plain = step(model)
    model.zero_grad()
    memopt.optimize(model, 0.65 * plain / GIB, optimizer=None, **{**EXACT, "elsewhere_gb": None})
    assert step(model) <= 0.65 * plain
