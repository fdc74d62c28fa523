"""Training loops of all kinds at tight budgets: the plain model's bits, and within the budget or refused."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memopt
from tests.end_to_end import odd_models
from tests.end_to_end.odd_models import CLASSES, ROWS, WIDTH, Layered
from tests.end_to_end.pieces import GIB, Piece, assert_same, call, check, loss, plan, run, same, step, tight
from tests.families import causal_batch, integers, library, normals

GPT2 = library(
    "GPT2", "GPT2LMHeadModel", "ForCausalLM", attn_implementation="sdpa",
    vocab_size=1024, n_positions=160, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
)  # fmt: skip


class Dropping(Layered):
    """Blocks with dropout: a repetition that drew anew would show in every gradient."""

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + F.dropout(block(x), 0.1)
        return x


class Blocks(odd_models.BreakInLoop):
    """Blocks that are captured one by one where the loop over them breaks."""

    body = Layered.body


def make(kind: type[nn.Module] = Dropping) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind().train()


@dataclass(frozen=True)
class Usual:
    """Budgets for a model of `kind` and the usual batch, in GB."""

    kind: type[nn.Module]

    @cached_property
    def plan(self) -> memopt.Plan:
        x, labels = batch()
        return plan(make(self.kind), {"x": x} if self.kind is odd_models.Logits else {"x": x, "labels": labels})

    @cached_property
    def tight(self) -> float:
        """Halfway from the smallest that works to the plain step's peak."""
        assert self.smallest < 0.95 * self.plan.plain_peak_gb, "the test needs a model that recomputation helps"
        return (self.smallest + self.plan.plain_peak_gb) / 2

    @cached_property
    def smallest(self) -> float:
        return self.plan.smallest_gb()

    @property
    def gradients(self) -> float:
        return self.plan.account.gradients / GIB


@cache
def usual(kind: type[nn.Module] = Dropping) -> Usual:
    return Usual(kind)


def batch(rows: int = ROWS, seed: int = 2) -> tuple[Tensor, Tensor]:
    return normals(rows, WIDTH, seed=seed), integers(CLASSES, rows)


def steps(model: nn.Module, *batches: Any) -> list[Tensor]:
    return [step(model, each) for each in batches]


def refusal(model: nn.Module, piece: Piece, budget_gb: float, batch: Any) -> memopt.BudgetError:
    """Assert that a piece of training is refused within the budget."""
    memopt.optimize(model, budget_gb, optimizer=None)
    refused: list[memopt.BudgetError] = []

    def attempt(model: nn.Module) -> None:
        with pytest.raises(memopt.BudgetError) as caught:
            piece(model)
        refused.append(caught.value.with_traceback(None))

    trained = run(model, attempt, batch)
    assert trained.peak_bytes <= budget_gb * GIB
    return refused[0]


# ---- shapes


def test_longer_sequences_then_shorter_ones() -> None:
    middle, longer, shorter = (causal_batch(scale) for scale in ("usual", "longer", "shorter"))
    model = GPT2()
    budget = tight(model, longer)

    def piece(model: nn.Module) -> list[Tensor]:
        losses = []
        for each in (middle, longer, shorter, middle):
            model.zero_grad()
            losses.append(step(model, each))
        return losses

    trained = check(model, piece, budget, longer)
    assert trained.peak_bytes > 0.8 * budget * GIB, "the budget was not tight"


def test_sequences_too_long_for_the_budget_are_refused_before_they_run() -> None:
    model, each, longer = make(), batch(), batch(4 * ROWS)
    budget = usual().tight
    memopt.optimize(model, budget, optimizer=None)
    step(model, each)
    model.zero_grad()
    error = refusal(model, lambda model: step(model, longer), budget, longer)
    check(memopt.remove(model), lambda model: step(model, longer), error.smallest_gb, longer)


def test_more_shapes_than_dynamo_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memopt.torch_compat.RECOMPILE_LIMIT", 2)
    model, lengths = make(), [batch(rows) for rows in (64, 80, 96, 112)]

    def piece(model: nn.Module) -> list[Tensor]:
        losses = steps(model, *lengths)
        model.zero_grad()
        return losses

    check(model, piece, 1.0, lengths[-1])


# ---- accumulation


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_accumulate(set_to_none: bool) -> None:
    model, first, second = make(), batch(), batch(seed=3)
    budget = usual().tight
    held = usual().gradients if not set_to_none else 0.0

    def piece(model: nn.Module) -> list[Tensor]:
        losses = []
        for _ in range(2):
            model.zero_grad(set_to_none=set_to_none)
            losses += steps(model, first, second, first)
        return losses

    check(model, piece, budget + held, first)


def test_gradients_are_added_where_they_are() -> None:
    """Few rows: gradients outweigh activations, and a second set of them would not fit."""
    model, few = make(), batch(rows=4)
    parameters = sum(p.numel() * 4 for p in model.parameters())
    memopt.optimize(model, 1.0, optimizer=None)
    step(model, few)
    before = [p.grad.data_ptr() for p in model.parameters() if p.grad is not None]
    trained = run(model, lambda model: step(model, few), few)
    assert [p.grad.data_ptr() for p in model.parameters() if p.grad is not None] == before
    assert trained.peak_bytes < 2.3 * parameters
    assert trained.peak_bytes <= memopt.plan_of(model).predicted_peak_gb * GIB


def test_the_loss_is_divided_in_place() -> None:
    model, each = make(), batch()

    def piece(model: nn.Module) -> None:
        for _ in range(2):
            value = loss(model, each)
            value /= 4
            value.backward()  # type: ignore[no-untyped-call]

    check(model, piece, usual().tight, each)


def test_a_regulariser_outside_of_the_model() -> None:
    model, each = make(), batch()

    def piece(model: nn.Module) -> None:
        weights: Any = model.get_parameter("head.weight")
        (loss(model, each) + 0.1 * weights.square().sum()).backward()

    check(model, piece, usual().tight + 0.1 / 1024, each)


# ---- other calls in between


def test_eval_and_no_grad_run_plain_in_between() -> None:
    model, each = make(), batch()

    def piece(model: nn.Module) -> list[Any]:
        first = step(model, each)
        with torch.no_grad():
            second = call(model, each)
        model.eval()
        third = loss(model, each)
        third.backward()  # type: ignore[no-untyped-call]
        model.train()
        return [first, second, third.detach(), step(model, each)]

    plain = run(copy.deepcopy(model), piece, each)
    memopt.optimize(model, usual().tight, optimizer=None)
    assert_same(run(model, piece, each), plain)


def test_generation_in_between() -> None:
    model, each = GPT2(), causal_batch("usual")
    prompt = each["input_ids"][:2, :8]

    def piece(model: Any) -> list[Tensor]:
        losses = [step(model, each)]
        model.eval()
        words = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=True)
        model.train()
        return [*losses, words, step(model, each)]

    check(model, piece, tight(model, each), each)


def test_a_dropped_forward_is_forgotten() -> None:
    model, each = make(), batch()

    def piece(model: nn.Module) -> list[Tensor]:
        dropped = loss(model, each).item()
        assert isinstance(dropped, float)
        return [step(model, each), step(model, each)]

    check(model, piece, usual().tight, each)


@pytest.mark.parametrize("kind", [Dropping, odd_models.GraphBreak])
def test_nothing_of_a_step_is_kept(kind: type[nn.Module]) -> None:
    """Neither the inputs nor anything made of them, once compiling has left the field."""
    model = make(kind)
    memopt.optimize(model, 1.0, optimizer=None)
    steps(model, batch(), batch(), batch())
    gc.collect()
    before = resident_bytes()
    each = batch()
    step(model, each)
    inputs = [weakref.ref(tensor) for tensor in each]
    del each
    assert not any(reference() is not None for reference in inputs)
    assert resident_bytes() == before


def resident_bytes() -> int:
    with memopt.measure_peak("cpu") as peak:
        pass
    return peak.resident_bytes


# ---- several forwards


def two_backwards(model: nn.Module, first: Any, second: Any, latest_first: bool) -> None:
    losses = [loss(model, first), loss(model, second)]
    while losses:
        losses.pop(-1 if latest_first else 0).backward()  # type: ignore[no-untyped-call]


PAIRS: dict[str, Callable[..., Any]] = {
    "the latest first": lambda model, a, b: two_backwards(model, a, b, True),
    "in order": lambda model, a, b: two_backwards(model, a, b, False),
    "their sum": lambda model, a, b: (loss(model, a) + loss(model, b)).backward(),
    "their sum, accumulated": lambda model, a, b: [(loss(model, a) + loss(model, b)).backward() for _ in range(2)],
}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_two_forwards_before_their_backwards(pair: Callable[..., Any]) -> None:
    model, first, second = make(), batch(), batch(seed=3)

    def piece(model: nn.Module) -> None:
        pair(model, first, second)

    error = refusal(model, piece, usual().tight, first)
    check(memopt.remove(model), piece, error.smallest_gb, first)


def test_a_second_forward_that_fits_is_planned_beside_the_first() -> None:
    model, small, large = make(), batch(ROWS // 4), batch()
    roomy = plan(model, small)
    budget = max(usual().tight + roomy.held_bytes / GIB, roomy.plain_peak_gb + 1.1 * roomy.account.gradients / GIB)

    def piece(model: nn.Module) -> None:
        two_backwards(model, small, large, latest_first=True)

    check(model, piece, budget, large)
    assert memopt.plan_of(model).added_time > 0


def test_a_retained_graph_is_gone_through_twice() -> None:
    model, each = make(), batch()

    def piece(model: nn.Module) -> None:
        value = loss(model, each)
        value.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        value.backward()  # type: ignore[no-untyped-call]

    error = refusal(model, piece, usual().tight, each)
    assert "retain_graph" in str(error)
    assert all(parameter.grad is None for parameter in model.parameters())
    check(memopt.remove(model), piece, error.smallest_gb, each)


# ---- other ways to ask for gradients


def test_autograd_grad_of_all_and_of_some_parameters() -> None:
    model, each = make(), batch()

    def piece(model: nn.Module) -> list[Tensor]:
        some = [model.get_parameter("head.weight"), model.get_parameter("blocks.1.1.bias")]
        first = torch.autograd.grad(loss(model, each), list(model.parameters()))
        del first
        return [*torch.autograd.grad(loss(model, each), some)]

    check(model, piece, usual().tight, each)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_autograd_grad_beside_held_gradients() -> None:
    model, each = make(), batch()

    def piece(model: nn.Module) -> Any:
        step(model, each)
        return torch.autograd.grad(loss(model, each), list(model.parameters()))

    error = refusal(model, piece, usual().tight, each)
    model.zero_grad()
    check(memopt.remove(model), piece, error.smallest_gb, each)


def test_backward_into_some_inputs() -> None:
    model, each = make(), batch()

    def piece(model: nn.Module) -> None:
        some = [model.get_parameter("head.weight"), model.get_parameter("blocks.1.1.bias")]
        loss(model, each).backward(inputs=some)  # type: ignore[no-untyped-call]
        step(model, each)
        loss(model, each).backward(inputs=some)  # type: ignore[no-untyped-call]

    check(model, piece, usual().tight, each)


def test_a_gradient_into_the_inputs() -> None:
    model, each = make(), batch()
    each[0].requires_grad_()

    def piece(model: nn.Module) -> Tensor | None:
        each[0].grad = None
        step(model, each)
        return each[0].grad

    check(model, piece, usual().tight, each)


def test_frozen_parameters_and_thawed_ones() -> None:
    model, each = make(odd_models.LowRank), batch()

    def piece(model: nn.Module) -> None:
        steps(model, each, each)
        model.get_submodule("blocks.0").requires_grad_(True)
        step(model, each)

    check(model, piece, plan(copy.deepcopy(model).requires_grad_(True), each).plain_peak_gb, each)
    assert model.get_parameter("blocks.1.1.weight").grad is None


# ---- hooks


def record(seen: list[Any]) -> Callable[..., None]:
    return lambda *arguments: seen.append(len(arguments))


def scale_output(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 1.5 * output


def scale_input(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (args[0] * 0.5, *args[1:])


def scale_gradient(module: nn.Module, to_inputs: Any, to_outputs: Any) -> Any:
    return tuple(None if gradient is None else 0.5 * gradient for gradient in to_inputs)


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda model: model.get_submodule("blocks.1").register_forward_hook(scale_output),
    "forward of the model": lambda model: model.register_forward_hook(scale_output),
    "forward pre": lambda model: model.get_submodule("blocks.1").register_forward_pre_hook(scale_input),
}


@pytest.mark.parametrize("early", [True, False], ids=["before optimize", "after a step"])
@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_hooks_on_modules(hook: Callable[[nn.Module], Any], early: bool) -> None:
    model, each = make(), batch()
    budget = usual().tight + 0.3 / 1024

    def piece(model: nn.Module) -> list[Tensor]:
        if early:
            return [step(model, each)]
        first = step(model, each)
        model.zero_grad()
        handle = hook(model)
        second = step(model, each)
        handle.remove()
        model.zero_grad()
        return [first, second, step(model, each)]

    if early:
        hook(model)
    check(model, piece, budget, each)


@pytest.mark.parametrize("early", [True, False], ids=["before optimize", "after a step"])
def test_a_full_backward_hook_breaks_the_graph(early: bool) -> None:
    """Dynamo does not take modules with such hooks: they run eagerly, and count as what is between the regions."""
    model, each = make(Blocks), batch()

    def piece(model: nn.Module) -> list[Tensor]:
        if early:
            return [step(model, each)]
        first = step(model, each)
        model.zero_grad()
        model.get_submodule("blocks.1").register_full_backward_hook(scale_gradient)
        return [first, step(model, each)]

    if early:
        model.get_submodule("blocks.1").register_full_backward_hook(scale_gradient)
    check(model, piece, 1.2 * usual(Blocks).plan.plain_peak_gb, each)
    assert len(memopt.plan_of(model).regions) > 1


@pytest.mark.parametrize("early", [True, False], ids=["before optimize", "after a step"])
def test_hooks_on_parameters(early: bool) -> None:
    """A hook sees, and may change, the gradient of each backward, not the sum that is held."""
    model, each = make(), batch()

    def piece(model: nn.Module) -> None:
        if not early:
            step(model, each)
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))  # type: ignore[no-untyped-call]
        steps(model, each, each)

    check(model, piece, usual().tight + 2.5 * usual().gradients, each)


def test_a_hook_that_comes_late_is_refused_where_its_gradients_do_not_fit() -> None:
    model, each = make(), batch()
    budget = usual().smallest + 0.55 / 1024

    def piece(model: nn.Module) -> None:
        step(model, each)
        value = loss(model, each)
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: None)  # type: ignore[no-untyped-call]
        value.backward()  # type: ignore[no-untyped-call]

    refusal(model, piece, budget, each)


def test_a_hook_that_comes_late_sees_the_gradient_of_its_backward() -> None:
    model, each = make(), batch()

    def piece(model: nn.Module) -> None:
        step(model, each)
        value = loss(model, each)
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))  # type: ignore[no-untyped-call]
        value.backward()  # type: ignore[no-untyped-call]

    check(model, piece, 1.0, each)


def test_an_optimiser_in_the_backward() -> None:
    model, each = make(), batch()

    def piece(model: nn.Module) -> list[Tensor]:
        for parameter in model.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1)

            def update(parameter: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(update)
        return [*steps(model, each, each), *(parameter.detach().clone() for parameter in model.parameters())]

    plain = run(copy.deepcopy(model), piece, each)
    memopt.optimize(model, usual().tight, optimizer=None)
    assert_same(run(model, piece, each), plain)


# ---- odd models


CAPTURED = [odd for odd in odd_models.ODD_MODELS if odd.model is not odd_models.NumpyInLoop and odd.capture != "none"]


@pytest.mark.parametrize("odd", CAPTURED, ids=str)
def test_odd_models_accumulate_within_the_budget(odd: odd_models.OddModel) -> None:
    model, each = odd.make(), odd.inputs()

    def piece(model: nn.Module) -> list[Tensor]:
        losses = []
        for _ in range(2):
            value = loss(model, each).float().square().mean()
            value.backward()  # type: ignore[no-untyped-call]
            losses.append(value.detach())
            gc.collect()
        return losses

    budgets = usual(odd.model)
    check(model, piece, budgets.tight + budgets.gradients, each)


class Printing(Blocks):
    """Says what it does in the middle, as people do when they look for a mistake."""

    def body(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = x + block(x)
            if number == 1:
                print("half way", x.shape)
        return x


class ScalarAtTheBreak(Layered):
    """An auxiliary loss of the first half is alive where the graph breaks."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](x))
        auxiliary = x.square().mean()
        torch._dynamo.graph_break()
        return self.loss(self.blocks[2](x), labels) + 0.1 * auxiliary


class SharedAcrossABreak(Layered):
    """One block on both sides of the break: autograd sums its gradients before it adds them to what is held."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.body(x)
        torch._dynamo.graph_break()
        return self.loss(self.body(x), labels)


class EagerMiddle(Layered):
    """Breaks around code that its author forbids to compile, which holds activations of its own."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def eager(self, x: Tensor) -> Tensor:
        for _ in range(6):
            x = torch.sin(torch.tanh(x))
        return x

    def body(self, x: Tensor) -> Tensor:
        x = x + self.blocks[1](self.blocks[0](x))
        return self.blocks[2](self.eager(x))


@pytest.mark.parametrize("kind", [Printing, ScalarAtTheBreak, EagerMiddle])
def test_breaks_in_the_middle_at_the_smallest_budget(kind: type[nn.Module]) -> None:
    model, each = make(kind), batch()
    check(model, lambda model: step(model, each), usual(kind).smallest, each)
    assert len(memopt.plan_of(model).regions) > 1


def test_a_block_on_both_sides_of_a_break_accumulates() -> None:
    model, each = make(SharedAcrossABreak), batch()
    budgets = usual(SharedAcrossABreak)
    check(model, lambda model: steps(model, each, each), budgets.tight + budgets.gradients, each)
    assert len(memopt.plan_of(model).regions) > 1


class OtherWay(Layered):
    """Takes another way where its input is large."""

    def body(self, x: Tensor) -> Tensor:
        deep = bool(x.detach().sum() > 0)
        for block in self.blocks if deep else self.blocks[:1]:
            x = x + block(x)
        return x


def test_a_way_that_was_not_planned_is_refused_or_runs_plain() -> None:
    model, (x, labels) = make(OtherWay), batch()
    plain = run(copy.deepcopy(model), lambda model: step(model, (x, labels)), (x, labels))
    memopt.optimize(model, 1.0, optimizer=None)
    with pytest.raises(memopt.CaptureError, match="'plain' to allow"):
        step(model, (x, labels))
    memopt.optimize(model, 1.0, optimizer=None, allow={"recompute", "plain"})
    assert_same(run(model, lambda model: step(model, (x, labels)), (x, labels)), plain)


# ---- losses and outputs


def test_a_loss_outside_of_the_model() -> None:
    model, (x, labels) = make(odd_models.Logits), batch()

    def piece(model: nn.Module) -> Tensor:
        value = F.cross_entropy(model(x), labels)
        value.backward()  # type: ignore[no-untyped-call]
        return value.detach()

    extra = 4 * ROWS * CLASSES * 4 / GIB  # the loss's own activations and gradients, outside of the plan
    check(model, piece, usual(odd_models.Logits).tight + extra, (x, labels))


def test_a_gradient_into_another_output_needs_outputs_all() -> None:
    model, each = make(odd_models.LossAndLogits), batch()

    def piece(model: nn.Module) -> None:
        value, logits = call(model, each)
        (value + 0.1 * logits.square().mean()).backward()

    memopt.optimize(model, 1.0, optimizer=None)
    with pytest.raises(memopt.UnplannedGradientError, match=r"shape \(256, 16\).*outputs='all'"):
        piece(model)
    assert all(parameter.grad is None for parameter in model.parameters())
    extra = 4 * ROWS * CLASSES * 4 / GIB
    check(memopt.remove(model), piece, tight(model, each, outputs="all") + extra, each, outputs="all")


def squared_error(output: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(output, targets)


def test_training_loss_is_one_region_with_the_loss() -> None:
    model = make(odd_models.Logits)
    pair = ((normals(ROWS, WIDTH),), normals(ROWS, CLASSES, seed=3))

    def plain_piece(model: nn.Module) -> Tensor:
        value = squared_error(model(*pair[0]), pair[1])
        value.backward()  # type: ignore[no-untyped-call]
        return value.detach()

    def piece(model: nn.Module) -> Tensor:
        value = memopt.training_loss(model, pair)
        value.backward()  # type: ignore[no-untyped-call]
        return value.detach()

    plain = run(copy.deepcopy(model), plain_piece, pair)
    budget = tight(model, pair, loss_fn=squared_error)
    memopt.optimize(model, budget, loss_fn=squared_error, optimizer=None)
    trained = run(model, piece, pair)
    assert_same(trained, plain)
    assert trained.peak_bytes <= budget * GIB
    assert same(memopt.training_loss(model.eval(), pair).detach(), trained.returned)
