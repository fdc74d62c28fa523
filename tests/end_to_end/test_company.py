"""Models that train in company: a teacher, an average of the parameters, a second model, several forwards before a
backward. Everything on the device stays within the budget, with the plain models' bits, or the step is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import GPT2Config, GPT2LMHeadModel, ViTConfig, ViTModel

import memopt
from examples.models.families import integers, normals
from tests.elsewhere import counted

__all__ = ["counted"]

pytestmark = pytest.mark.usefixtures("counted")
EXACT: dict[str, Any] = {"precision": "fp32", "allow": {"recompute", "reinplace"}}
ALL: dict[str, Any] = {**EXACT, "outputs": "all"}
GIB = 1024**3
Step = Callable[[], Tensor]


def gpt2(layers: int = 2, *, tied: bool = True, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=320, n_positions=64, n_embd=96, n_layer=layers, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        bos_token_id=0, eos_token_id=0, use_cache=False, tie_word_embeddings=tied,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    return model.train()


@dataclass
class Trained:
    """The losses of all steps that ran, the peaks of all steps in bytes, the refusals, and the parameters after."""

    losses: list[Tensor]
    peaks: list[int]
    refusals: list[str]
    parameters: list[Tensor]


def train(step: Step, model: nn.Module, steps: int = 3) -> Trained:
    """Run `steps` steps, each metered with everything on the device; a refused one is tried again."""
    done = Trained([], [], [], [])
    while len(done.losses) < steps:
        try:
            with memopt.measure_peak("cpu") as peak:
                done.losses.append(step())
        except memopt.BudgetError as refused:
            done.refusals.append(str(refused))
            assert len(done.refusals) < 3, done.refusals
        done.peaks.append(peak.bytes)
    done.parameters = [parameter.detach().clone() for parameter in model.parameters()]
    return done


def assert_same(trained: Trained, plain: Trained) -> None:
    assert all(map(torch.equal, trained.losses, plain.losses))
    assert all(map(torch.equal, trained.parameters, plain.parameters))


def assert_within(trained: Trained, budget_gb: float) -> None:
    assert max(trained.peaks) <= budget_gb * GIB, f"{[peak / GIB for peak in trained.peaks]} GB exceed {budget_gb}"


def middle(plan: memopt.Plan) -> float:
    return (plan.smallest_gb() + plan.plain_peak_gb) / 2


def bytes_of(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def tokens(seed: int, rows: int = 8) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return torch.randint(0, 320, (rows, 64))


def divergence(outputs: Any, soft: Tensor) -> Tensor:
    return F.kl_div(outputs.logits.log_softmax(-1), soft, reduction="batchmean")


def distilling(student: Any, teacher: Any) -> Step:
    """Training steps with the teacher's soft labels."""
    optimizer = torch.optim.AdamW(student.parameters())
    ids = tokens(1)

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.no_grad():
            soft = teacher(ids).logits.softmax(-1)
        optimized = type(student._compiled_call_impl).__name__ == "PlannedCall"
        loss = memopt.training_loss(student, (ids, soft)) if optimized else divergence(student(ids), soft)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return step


def test_teacher_and_student() -> None:
    teacher = gpt2(3, seed=5).eval()
    student = gpt2()
    twin = copy.deepcopy(student)
    plain = train(distilling(twin, teacher), twin)
    del twin
    options: dict[str, Any] = {**EXACT, "loss_fn": divergence}
    plan = memopt.plan(student, 1, (tokens(1), torch.zeros(8, 64, 320)), **options)
    assert plan.account.elsewhere >= bytes_of(teacher)
    assert "elsewhere" in str(plan)
    budget = middle(plan)
    memopt.optimize(student, budget, **options)
    trained = train(distilling(student, teacher), student)
    assert_same(trained, plain)
    assert_within(trained, budget)


def averaging(model: Any, averages: list[AveragedModel] | None = None) -> Step:
    """Training steps on a batch of text that update an average of the parameters, if there is to be one, which is made
    after the first."""
    optimizer = torch.optim.AdamW(model.parameters())
    batch = {"input_ids": tokens(1), "labels": tokens(1)}

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        if averages is None:
            return loss.detach()
        if not averages:
            averages.append(AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)))
        averages[0].update_parameters(model)
        return loss.detach()

    return step


@pytest.mark.parametrize("room", [True, False])
def test_an_average_of_the_parameters_appears(room: bool) -> None:
    """The next forward is planned beside it, or refused before it runs."""
    model = gpt2(1)
    plain = train(averaging(twin := copy.deepcopy(model), []), twin)
    del twin
    plan = memopt.plan(model, 1, {"input_ids": tokens(1), "labels": tokens(1)}, **EXACT)
    budget = middle(plan) if room else plan.smallest_gb() + 0.1 * bytes_of(model) / GIB
    memopt.optimize(model, budget, **EXACT)
    averages: list[AveragedModel] = []
    if room:
        trained = train(averaging(model, averages), model)
        assert_same(trained, plain)
        assert_within(trained, budget)
        assert memopt.plan_of(model).account.elsewhere >= bytes_of(averages[0])
        return
    step = averaging(model, averages)
    step()
    with (
        memopt.measure_peak("cpu") as peak,
        pytest.raises(memopt.BudgetError, match=r"elsewhere [0-9.]+ MB") as refused,
    ):
        step()
    assert "the largest float32 [96, 384]" in str(refused.value)
    assert peak.bytes <= budget * GIB
    averages.clear()
    step()


def test_room_that_becomes_free_is_used() -> None:
    """A checkpoint that is held while the plan is made leaves its room to the steps after it is freed."""
    model = gpt2()
    batch = {"input_ids": tokens(1), "labels": tokens(1)}
    budget = middle(memopt.plan(model, 1, batch, **EXACT))
    checkpoint = [torch.zeros(int(0.3 * budget * GIB) // 4)]
    memopt.optimize(model, budget, **EXACT)
    step = averaging(model)
    step()
    tight = memopt.plan_of(model)
    checkpoint.clear()
    step()
    assert memopt.plan_of(model).added_time < tight.added_time


def preferring(policy: Any, reference: Any) -> Step:
    """Training steps that prefer one answer to another (DPO), with two forwards of the policy before its backward."""
    optimizer = torch.optim.AdamW(policy.parameters())
    answers = tokens(1, 4), tokens(2, 4)

    def probability(model: Any, ids: Tensor) -> Tensor:
        logits = model(input_ids=ids).logits[:, :-1]
        return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).sum((-2, -1))

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.no_grad():
            before = [probability(reference, ids) for ids in answers]
        chosen, rejected = (probability(policy, ids) - old for ids, old in zip(answers, before, strict=True))
        loss = -F.logsigmoid(0.1 * (chosen - rejected)).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return step


@pytest.mark.parametrize("told", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_chosen_and_rejected(told: bool) -> None:
    """A budget that is too tight for two forwards planned by themselves is kept once two are planned for."""
    reference = gpt2(tied=False, seed=5).eval().requires_grad_(False)
    policy = gpt2(tied=False)
    twin = copy.deepcopy(policy)
    plain = train(preferring(twin, reference), twin)
    del twin
    plan = memopt.plan(policy, 1, {"input_ids": tokens(1, 4)}, **ALL)
    budget = plan.plain_peak_gb + 0.3 * (plan.account.gradients + plan.held_bytes) / GIB
    assert budget * GIB < plan.plain.peak_bytes + plan.held_bytes
    memopt.optimize(policy, budget, forwards=2 if told else 1, **ALL)
    trained = train(preferring(policy, reference), policy)
    assert_same(trained, plain)
    assert_within(trained, budget)
    assert len(trained.refusals) <= (0 if told else 1)
    assert all("forwards=2" in text for text in trained.refusals)
    assert memopt.plan_of(policy).account.other_forwards > 0


def contrasting(model: Any) -> Step:
    """Training steps that compare two views of each image (SimCLR)."""
    optimizer = torch.optim.AdamW(model.parameters())
    views = normals(8, 3, 32, 32, seed=1), normals(8, 3, 32, 32, seed=2)

    def step() -> Tensor:
        optimizer.zero_grad()
        one, other = (F.normalize(model(pixel_values=view).pooler_output, dim=-1) for view in views)
        loss = F.cross_entropy(one @ other.T / 0.1, torch.arange(8))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return step


def vit() -> Any:
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256, image_size=32, patch_size=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return ViTModel(config).train()


@pytest.mark.slow
def test_two_views() -> None:
    model = vit()
    twin = copy.deepcopy(model)
    plain = train(contrasting(twin), twin)
    del twin
    plan = memopt.plan(model, 1, {"pixel_values": normals(8, 3, 32, 32, seed=1)}, **ALL)
    budget = plan.plain_peak_gb + 0.2 * plan.held_bytes / GIB
    memopt.optimize(model, budget, **ALL)
    trained = train(contrasting(model), model)
    assert_same(trained, plain)
    assert_within(trained, budget)
    assert len(trained.refusals) == 1
    assert "forwards=2" in trained.refusals[0]
    assert memopt.plan_of(model).account.other_forwards > 0


def generator() -> nn.Module:
    torch.manual_seed(0)
    widths = (16, 96, 64, 32, 3)
    layers: list[nn.Module] = []
    for taken, given in pairwise(widths):
        layers += [nn.ConvTranspose2d(taken, given, 4, 2, 1), nn.Tanh() if given == 3 else nn.ReLU()]
    return nn.Sequential(*layers).train()


def discriminator() -> nn.Module:
    torch.manual_seed(1)
    widths = (3, 32, 64, 96)
    layers: list[nn.Module] = []
    for taken, given in pairwise(widths):
        layers += [nn.Conv2d(taken, given, 4, 2, 1), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(96 * 16, 1)).train()


class Pair(nn.Module):
    """The two halves of a GAN, which train in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.makes, self.judges = generator(), discriminator()


def competing(pair: Pair) -> Step:
    """Training steps of both halves."""
    makes = torch.optim.AdamW(pair.makes.parameters())
    judges = torch.optim.AdamW(pair.judges.parameters())
    noise, real = normals(8, 16, 2, 2, seed=1), normals(8, 3, 32, 32, seed=2)
    yes, no = torch.ones(8, 1), torch.zeros(8, 1)

    def step() -> Tensor:
        judges.zero_grad()
        made = pair.makes(noise)
        judged = F.binary_cross_entropy_with_logits(pair.judges(real), yes)
        judged = judged + F.binary_cross_entropy_with_logits(pair.judges(made.detach()), no)
        judged.backward()  # type: ignore[no-untyped-call]
        judges.step()
        makes.zero_grad()
        fooled = F.binary_cross_entropy_with_logits(pair.judges(made), yes)
        fooled.backward()  # type: ignore[no-untyped-call]
        makes.step()
        return (judged + fooled).detach()

    return step


def test_two_halves_of_a_gan() -> None:
    pair = Pair()
    twin = copy.deepcopy(pair)
    plain = train(competing(twin), twin)
    budget = 1.6 * max(plain.peaks) / GIB
    del twin
    for half in (pair.makes, pair.judges):
        memopt.optimize(half, budget, **ALL)
    trained = train(competing(pair), pair)
    assert_same(trained, plain)
    assert_within(trained, budget)
    plans = [memopt.plan_of(half) for half in (pair.makes, pair.judges)]
    assert plans[0].account.elsewhere >= bytes_of(pair.judges)
    assert plans[1].account.elsewhere >= bytes_of(pair.makes)


@pytest.mark.slow
def test_cached_tensors_that_grow_are_refused_before_the_step() -> None:
    """With default options."""
    model = gpt2()
    batch = {"input_ids": tokens(1), "labels": tokens(1)}
    budget = middle(memopt.plan(model, 1, batch))
    memopt.optimize(model, budget, example_inputs=batch)
    step, cached, peaks = averaging(model), list[Tensor](), list[int]()

    def run() -> None:
        for _ in range(12):
            with memopt.measure_peak("cpu") as peak:
                step()
            peaks.append(peak.bytes)
            cached.append(torch.zeros(int(0.15 * budget * GIB) // 4))

    with pytest.raises(memopt.BudgetError, match="elsewhere"):
        run()
    assert max(peaks) <= budget * GIB
    assert len(peaks) >= 3, "no plan with less room was made"
    assert all(parameter.grad is None for parameter in model.parameters())


def test_plans_for_other_devices_count_nothing_elsewhere_unless_told() -> None:
    model = gpt2()
    cached = torch.zeros(1_000_000)
    batch = {"input_ids": tokens(1), "labels": tokens(1)}
    assert memopt.plan(model, 1, batch, **EXACT).account.elsewhere >= cached.nbytes
    assert memopt.plan(model, 1, batch, device="h100", **EXACT).account.elsewhere == 0
    assert memopt.plan(model, 1, batch, elsewhere_gb=0, **EXACT).account.elsewhere == 0
    told = memopt.plan(copy.deepcopy(model).to("meta"), 1, batch, device="h100", elsewhere_gb=0.25, **EXACT)
    assert told.account.elsewhere == GIB // 4


def test_a_comparison_counts_its_own_copies_nowhere() -> None:
    model = gpt2()
    batch = {"input_ids": integers(320, 8, 64), "labels": integers(320, 8, 64)}
    memopt.optimize(model, middle(memopt.plan(model, 1, batch, **EXACT)), **EXACT)
    assert memopt.compare(model, batch, reference="fp32").bitwise
