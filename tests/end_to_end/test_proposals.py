"""Proposals: named with figures that prove true, used only where `allow` names them, in force when the step runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import memopt
from examples.models.families import BY_NAME, Batch
from memopt import BudgetError, TrainStep
from memopt.errors import GIB
from memopt.levers import DEFAULT_LEVERS
from memopt.meter import measure_peak
from tests.smallest import smallest_gb

pytestmark = pytest.mark.plans_always  # the plain steps would fit

OPTIONS: dict[str, Any] = {"precision": "fp32", "optimizer": torch.optim.AdamW}
BASE = frozenset({"recompute", "reinplace", "microbatch"})
"""The options without the levers on operator graphs, which would each trace the model once more."""
LOW_BIT = BASE | {"low_bit_optimizer"}


def make() -> nn.Module:
    """A model of 7 MB of parameters, whose largest row is the optimiser's state."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=1024, n_positions=32, n_embd=256, n_layer=2, n_head=4, use_cache=False, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"
    return model


def batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 1024, (2, 32), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}


@cache
def refusal(allow: frozenset[str] = BASE) -> BudgetError:
    with pytest.raises(BudgetError) as error:
        memopt.plan(make(), 0.02, batch(), allow=allow, **OPTIONS)
    return error.value.with_traceback(None)


@pytest.mark.slow
def test_a_refusal_names_proposals_that_make_it_fit() -> None:
    plain = refusal().smallest_gb
    error = refusal(allow=LOW_BIT)
    assert error.smallest_gb < 0.8 * plain
    with pytest.raises(BudgetError, match=r"allow=\{'low_bit_optimizer', .*\}\n *Adam's moments in 8 bits") as between:
        memopt.plan(make(), 1.001 * error.smallest_gb, batch(), allow=BASE, **OPTIONS)
    assert between.value.proposals[0] == ("low_bit_optimizer",)
    assert all("low_bit_optimizer" in names for names in between.value.proposals)
    assert between.value.smallest_gb == plain


@pytest.mark.slow
def test_chosen_proposals_are_kept_to() -> None:
    model, budget = make(), 1.001 * refusal(allow=LOW_BIT).smallest_gb
    memopt.optimize(model, budget, example_inputs=batch(), allow=LOW_BIT, **OPTIONS)
    plan = memopt.plan_of(model)
    assert plan.proposals == ("low_bit_optimizer",)
    assert any(note.startswith("low_bit_optimizer: saves ") for note in plan.notes)
    optimizer = memopt.wrap_optimizer(model, torch.optim.AdamW(model.parameters(), 1e-3))
    step = TrainStep(model, optimizer)
    losses = []
    held = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers(), *batch().values()])
    with measure_peak("cpu") as peak:
        losses += [float(step(batch()).loss) for _ in range(4)]
    assert peak.allocated_bytes + held <= budget * GIB
    assert losses[-1] < losses[0]
    assert memopt.plan_of(model).proposals == plan.proposals  # what was planned ahead is what runs
    assert memopt.plan_of(model).account.optimizer_state == plan.account.optimizer_state


@pytest.mark.slow
def test_not_chosen_where_the_step_fits_without() -> None:
    budget = 1.001 * refusal().smallest_gb
    assert memopt.plan(make(), budget, batch(), allow=LOW_BIT, **OPTIONS).proposals == ()


@pytest.mark.slow
def test_an_optimizer_that_is_not_wrapped() -> None:
    model = make()
    budget = 1.001 * refusal(allow=LOW_BIT).smallest_gb
    memopt.optimize(model, budget, example_inputs=batch(), allow=LOW_BIT, **OPTIONS)
    with pytest.raises(ValueError, match=r"counts on low_bit_optimizer: give TrainStep memopt\.wrap_optimizer"):
        TrainStep(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises((TypeError, ValueError), match="Adam"):
        memopt.wrap_optimizer(model, torch.optim.SGD(model.parameters(), 0.1))


def test_without_proposals_the_optimizer_stays() -> None:
    model = make()
    memopt.optimize(model, 1, **OPTIONS)
    optimizer = torch.optim.AdamW(model.parameters())
    assert memopt.wrap_optimizer(model, optimizer) is optimizer
    with pytest.raises(ValueError, match=r"is not optimised; call memopt\.optimize first"):
        memopt.wrap_optimizer(make(), optimizer)


def test_proposals_are_decided_before_the_first_step() -> None:
    with pytest.raises(ValueError, match=r"'low_bit_optimizer' in allow changes .*: give example_inputs"):
        memopt.optimize(make(), 1, allow=LOW_BIT, **OPTIONS)


@pytest.mark.slow
def test_nothing_is_chosen_once_the_optimizer_is_made() -> None:
    """A larger batch cannot use a proposal later: the optimiser that exists holds its state in full."""
    large = {name: tokens.repeat(8, 1) for name, tokens in batch().items()}
    least, model = refusal().smallest_gb, make()
    budget = 0.98 * smallest_gb(make(), large, allow=BASE, **OPTIONS)
    assert least < budget
    memopt.optimize(model, budget, example_inputs=batch(), allow=LOW_BIT, **OPTIONS)
    assert memopt.plan_of(model).proposals == ()
    with pytest.raises(BudgetError) as error:
        model(**large)
    assert ("low_bit_optimizer",) in error.value.proposals


BF16: dict[str, Any] = {"precision": "bf16", "optimizer": torch.optim.AdamW}
NARROW = BASE | {"bf16_parameters"}


def resnet() -> nn.Module:
    """A model with BatchNorm, whose parameters remain in fp32, and fp32 images."""
    return BY_NAME["resnet"].make()


@pytest.mark.parametrize(
    ("make", "inputs"),
    [(make, batch), (resnet, lambda: BY_NAME["resnet"].batch("usual"))],
)
@pytest.mark.slow
def test_bf16_parameters_are_kept_to(make: Callable[[], nn.Module], inputs: Callable[[], Batch]) -> None:
    least = smallest_gb(make(), inputs(), allow=NARROW, **BF16)
    assert least < smallest_gb(make(), inputs(), allow=BASE, **BF16)
    model, budget = make(), 1.001 * least
    memopt.optimize(model, budget, example_inputs=inputs(), allow=NARROW, **BF16)
    plan = memopt.plan_of(model)
    assert plan.proposals == ("bf16_parameters",)
    optimizer = memopt.wrap_optimizer(model, torch.optim.AdamW(model.parameters(), 1e-3))
    assert any(parameter.dtype is torch.bfloat16 for parameter in model.parameters())
    step, given = TrainStep(model, optimizer), inputs()
    held = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers(), *given.values()])
    with measure_peak("cpu") as peak:
        losses = [float(step(given).loss) for _ in range(4)]
    assert peak.allocated_bytes + held <= budget * GIB
    assert losses[-1] < losses[0]
    assert memopt.plan_of(model).account.parameters == plan.account.parameters
    assert memopt.plan_of(model).account.optimizer_state == plan.account.optimizer_state
    model.eval()
    model(**inputs())  # inputs are turned here too


@pytest.mark.slow
def test_training_before_the_parameters_are_turned() -> None:
    model = make()
    budget = 1.001 * smallest_gb(make(), batch(), allow=NARROW, **BF16)
    memopt.optimize(model, budget, example_inputs=batch(), allow=NARROW, **BF16)
    with pytest.raises(ValueError, match=r"assumes parameters in bf16, .*memopt\.wrap_optimizer\(model, optimizer\)"):
        model(**batch())


def test_bf16_parameters_need_a_step_in_bf16() -> None:
    with pytest.raises(ValueError, match=r"'bf16_parameters' in allow needs a step in bf16, .*'fp32'"):
        memopt.plan(make(), 1, batch(), allow=NARROW, **OPTIONS)


@pytest.mark.slow
def test_a_card_has_a_host_to_go_to() -> None:
    """The CPU has no other memory: moving state into its own saves nothing."""
    assert all("offload_optimizer" not in names for names in refusal().proposals)
    with torch.device("meta"):
        model = make()
    with pytest.raises(BudgetError) as refused:
        memopt.plan(model, 0.1, batch(), device="t4", **OPTIONS)
    budget = refused.value.smallest_gb - 0.01
    with pytest.raises(BudgetError) as error:
        memopt.plan(model, budget, batch(), device="t4", **OPTIONS)
    assert ("offload_optimizer",) in error.value.proposals
    allow = {*DEFAULT_LEVERS, "offload_optimizer"}
    plan = memopt.plan(model, budget, batch(), device="t4", allow=allow, **OPTIONS)
    assert plan.proposals == ("offload_optimizer",)
    assert plan.account.optimizer_state < 1024
