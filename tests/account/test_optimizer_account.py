"""Optimiser accounts against the metered bytes of real steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim

from memopt.account import optimizer_account as optimizer_account_module
from memopt.account.card_state import rounded_bytes
from memopt.account.optimizer_account import OptimizerAccount, optimizer_account
from memopt.meter import measure_peak
from tests.marks import slow

SHAPES = ((256, 512), (1024,), (150, 300), (256, 512), (32, 32, 3, 3), (7,))


def parameters(shapes: tuple[tuple[int, ...], ...] = SHAPES) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]


def with_gradients(made: list[nn.Parameter]) -> list[nn.Parameter]:
    for parameter in made:
        parameter.grad = torch.randn_like(parameter)
    return made


def state_bytes(optimizer: optim.Optimizer) -> int:
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.nbytes for value in tensors if isinstance(value, torch.Tensor))


def measured(optimizer: optim.Optimizer, unmeasured: int = 5) -> tuple[int, int]:
    """State, and temporaries of the first step, which also makes the state, the second, and a later one."""
    before = state_bytes(optimizer)
    peaks = []
    for steps in (0, 0, unmeasured):
        for _ in range(steps):
            optimizer.step()
        with measure_peak("cpu") as peak:
            optimizer.step()
        peaks.append(peak.allocated_bytes)
    return state_bytes(optimizer), max(peaks[0] - (state_bytes(optimizer) - before), *peaks[1:])


class Lion(optim.Optimizer):
    """Chen et al. 2023, as users write it: one momentum, the sign of an interpolation."""

    def __init__(self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                update = state["exp_avg"] * group["betas"][0] + p.grad * (1 - group["betas"][0])
                p.add_(update.sign_(), alpha=-group["lr"])
                state["exp_avg"].lerp_(p.grad, 1 - group["betas"][1])


MATRICES = tuple(shape for shape in SHAPES if len(shape) == 2)
"""Shapes for Muon."""

EXACT: dict[str, Callable[..., optim.Optimizer]] = {
    "adamw": optim.AdamW,
    "adamw-foreach": partial(optim.AdamW, foreach=True),
    "adamw-fused": partial(optim.AdamW, fused=True),
    "adamw-amsgrad": partial(optim.AdamW, amsgrad=True),
    "adamw-amsgrad-foreach": partial(optim.AdamW, amsgrad=True, maximize=True, foreach=True),
    "adam": optim.Adam,
    "adam-decay-foreach": partial(optim.Adam, weight_decay=0.1, foreach=True),
    "sgd": optim.SGD,
    "sgd-foreach": partial(optim.SGD, foreach=True),
    "sgd-fused": partial(optim.SGD, fused=True, momentum=0.9),
    "sgd-momentum": partial(optim.SGD, momentum=0.9),
    "sgd-nesterov": partial(optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd-momentum-foreach": partial(optim.SGD, momentum=0.9, weight_decay=0.1, foreach=True),
    "adafactor": optim.Adafactor,
    "adafactor-foreach": partial(optim.Adafactor, foreach=True),
    "rmsprop": optim.RMSprop,
    "rmsprop-centered": partial(optim.RMSprop, centered=True, momentum=0.9),
    "rmsprop-foreach": partial(optim.RMSprop, foreach=True),
    "adagrad": optim.Adagrad,
    "adagrad-fused": partial(optim.Adagrad, fused=True),
    "nadam": optim.NAdam,
    "radam": optim.RAdam,
    "radam-foreach": partial(optim.RAdam, foreach=True),
    "adadelta": optim.Adadelta,
    "adamax": optim.Adamax,
    "asgd": optim.ASGD,
    "asgd-foreach": partial(optim.ASGD, foreach=True),
    "rprop": optim.Rprop,
    "rprop-foreach": partial(optim.Rprop, foreach=True),
    "muon": optim.Muon,
    "lion": Lion,
}


@pytest.mark.parametrize(
    "make", [slow(make) if make is optim.Muon else make for make in EXACT.values()], ids=EXACT.keys()
)
def test_a_few_megabytes_are_told_to_the_percent_and_never_under(make: Callable[..., optim.Optimizer]) -> None:
    shapes = MATRICES if make is optim.Muon else SHAPES
    account = optimizer_account(make, parameters(shapes))
    state, temporaries = measured(make(with_gradients(parameters(shapes))))
    assert account.state_bytes == state
    assert temporaries <= account.step_temporary_bytes <= 1.01 * temporaries + 256


@pytest.mark.parametrize("name", ["adamw", "adafactor", "asgd", "rprop", "radam", slow("muon")])
def test_16_bits(name: str) -> None:
    shapes = MATRICES if name == "muon" else SHAPES
    some = [nn.Parameter(p.detach().bfloat16()) for p in parameters(shapes)]
    account = optimizer_account(name, some)
    make = next(each for key, each in vars(optim).items() if key.lower() == name)
    state, temporaries = measured(make(with_gradients(some)))
    assert account.state_bytes == state
    assert temporaries <= account.step_temporary_bytes <= 1.01 * temporaries + 256


def test_foreach_holds_a_parameter_size_the_loop_a_few_parameters_fused_nothing() -> None:
    layers, each = 12, 64 * 64 * 4
    some = parameters(((64, 64),) * layers)
    account = {way: optimizer_account(partial(optim.AdamW, **way_of(way)), some) for way in WAYS}
    assert {way: found.name for way, found in account.items()} == {way: f"AdamW ({way})" for way in WAYS}
    assert layers * each <= account["foreach"].step_temporary_bytes <= 1.01 * layers * each
    # The quotient and the root it is made of, and those of the parameter before, which Python's loop lets go of late.
    assert 2 * each <= account["for-loop"].step_temporary_bytes <= 3.01 * each
    assert account["fused"].step_temporary_bytes <= 64


WAYS = ("foreach", "fused", "for-loop")


def way_of(way: str) -> dict[str, bool]:
    return {"foreach": False} if way == "for-loop" else {way: True}


def test_the_first_step_may_hold_more_than_the_late_ones() -> None:
    account = optimizer_account(Lion, parameters())
    assert account == OptimizerAccount(account.state_bytes, account.step_temporary_bytes, "Lion (for-loop)")
    assert account.state_bytes == sum(p.nbytes for p in parameters())


def test_names_and_none() -> None:
    assert optimizer_account("adamw", parameters()) == optimizer_account(optim.AdamW, parameters())
    assert optimizer_account(None, parameters()) == OptimizerAccount(0, 0, "none")
    assert optimizer_account("SGD", []) == OptimizerAccount(0, 0, "SGD")


def test_frozen_parameters_count_nothing() -> None:
    some = parameters()
    some[0].requires_grad_(False)
    assert optimizer_account("adamw", some) == optimizer_account("adamw", some[1:])


def test_meta_parameters_and_narrow_dtypes() -> None:
    with torch.device("meta"):
        large = [nn.Parameter(torch.empty(8192, 1024 * 1024, dtype=torch.bfloat16))]
    account = optimizer_account("adamw", large)
    assert account.state_bytes == 2 * large[0].nbytes + 4
    some = [nn.Parameter(p.detach().bfloat16()) for p in parameters()]
    state, temporaries = measured(optim.AdamW(with_gradients(some)))
    account = optimizer_account("adamw", some)
    assert account.state_bytes == state
    assert account.step_temporary_bytes >= temporaries


@pytest.mark.parametrize(
    ("optimizer", "way"),
    [
        ("adamw", "foreach"),
        ("sgd", "foreach"),
        ("rprop", "foreach"),
        ("adafactor", "for-loop"),  # torch spares memory there
        (partial(optim.AdamW, foreach=False), "for-loop"),
        (partial(optim.AdamW, fused=True), "fused"),
        (partial(optim.AdamW, lr=torch.tensor(1e-3)), "for-loop"),
        (partial(optim.AdamW, lr=torch.tensor(1e-3), capturable=True), "foreach"),
        (Lion, "for-loop"),
    ],
)
def test_on_cuda_the_way_is_the_one_that_torch_takes_there(optimizer: Any, way: str) -> None:
    assert optimizer_account(optimizer, parameters(), "cuda").name.endswith(f"({way})")


def test_on_cuda_the_count_of_steps_lies_with_the_host_unless_it_is_fused() -> None:
    whole = sum(rounded_bytes(p.nbytes) for p in parameters())
    assert optimizer_account("adamw", parameters(), "cuda").state_bytes == 2 * whole
    fused = optimizer_account(partial(optim.AdamW, fused=True), parameters(), "cuda")
    assert fused.state_bytes == 2 * whole + rounded_bytes(4) * len(SHAPES)


def test_the_blocks_of_the_state_on_cuda_come_in_the_order_in_which_they_are_made() -> None:
    moments = [nbytes for parameter in parameters() for nbytes in (parameter.nbytes, parameter.nbytes)]
    assert optimizer_account("adamw", parameters(), "cuda").state_blocks == tuple(moments)
    fused = optimizer_account(partial(optim.AdamW, fused=True), parameters(), "cuda")
    assert sum(map(rounded_bytes, fused.state_blocks)) == fused.state_bytes
    assert fused.state_blocks[:3] == (4, *moments[:2]), "the number of the step first"
    assert optimizer_account("adamw", parameters(), "cpu").state_blocks == ()


def test_what_is_compiled_around_it_changes_nothing() -> None:
    """The first planned call finds its account inside of Dynamo's backend."""
    found = []

    def backend(graph: Any, inputs: Any) -> Any:
        some = with_gradients(parameters())
        found.append(optimizer_account(optim.AdamW(some, foreach=True), []))
        return graph

    torch.compile(torch.neg, backend=backend)(torch.ones(3))
    assert found == [optimizer_account(partial(optim.AdamW, foreach=True), parameters())]


def test_the_count_of_steps_decides_as_in_a_run() -> None:
    """RAdam's first steps are plain momentum, ASGD averages only after a million."""
    radam = optimizer_account(partial(optim.RAdam, foreach=False), parameters())
    young = optimizer_account(partial(optim.SGD, momentum=0.9, maximize=True), parameters())
    assert radam.step_temporary_bytes > 2 * young.step_temporary_bytes
    assert optimizer_account("asgd", parameters()).step_temporary_bytes <= 256


def test_an_instance_decides_by_its_groups_and_stays_as_it_is() -> None:
    some = with_gradients(parameters())
    some[1].requires_grad_(False)
    some[1].grad = None
    groups = [{"params": some[:2], "amsgrad": True, "lr": torch.tensor(1e-3)}, {"params": some[3:4]}]
    optimizer = optim.AdamW(groups)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1)
    account = optimizer_account(optimizer, parameters())
    assert not optimizer.state
    assert scheduler.get_last_lr()
    assert account.state_bytes == 5 * some[0].nbytes + 2 * 4 + 8  # and two rates: the scheduler keeps a first one
    state, _ = measured(optimizer, unmeasured=0)
    assert state == 5 * some[0].nbytes + 2 * 4
    assert optimizer_account(optimizer, parameters()) == account
    assert int(optimizer.state[some[0]]["step"]) == 3


def test_adagrads_instance_brings_its_state_along() -> None:
    optimizer = optim.Adagrad(parameters())
    assert optimizer_account(optimizer, []).state_bytes == state_bytes(optimizer)


class Needy(optim.Optimizer):
    def __init__(self, params: Any, rate: float) -> None:
        super().__init__(params, {"rate": rate})


def test_an_optimizer_for_sparse_gradients_is_estimated() -> None:
    """Its step cannot be tried without values; its state is as large as that of Adam."""
    account = optimizer_account(optim.SparseAdam(parameters()), parameters())
    assert "SparseAdam does not support dense gradients" in account.guess
    assert account.state_bytes == 2 * sum(4 * one.numel() for one in parameters())


def test_refusals() -> None:
    with pytest.raises(ValueError, match="LBFGS evaluates the model inside its step"):
        optimizer_account("lbfgs", parameters())
    with pytest.raises(ValueError, match="LBFGS"):
        optimizer_account(optim.LBFGS(parameters()), parameters())
    with pytest.raises(ValueError, match="no optimizer 'adamv'; it has adadelta, "):
        optimizer_account("adamv", parameters())
    with pytest.raises(ValueError, match="Needy cannot be made from the parameters alone"):
        optimizer_account(Needy, parameters())
    with pytest.raises(ValueError, match="returns a list, not a"):
        optimizer_account(list, parameters())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not 3"):
        optimizer_account(3, parameters())  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["adam", "adamw", "nadam", "radam", "sgd"])
def test_parameters_that_are_stepped_singly_are_tried_once_for_each_kind(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = [(30, 7), *[(5,), (30, 17), (17, 30)] * 6, ()]
    parameters = [torch.nn.Parameter(torch.empty(shape)) for shape in shapes]
    parameters.append(torch.nn.Parameter(torch.empty(9, dtype=torch.bfloat16)))
    parameters.append(torch.nn.Parameter(torch.empty(17, 30).t()))
    parameters += [torch.nn.Parameter(torch.empty(rows, 300)) for rows in (7, 100, 7, 999, 101) * 4]
    by_kinds = optimizer_account(name, parameters)
    monkeypatch.setattr("memopt.account.optimizer_account._SINGLY", ())
    optimizer_account_module._account_of_class.cache_clear()
    assert by_kinds == optimizer_account(name, parameters)


@pytest.mark.parametrize("name", ["adam", "adamw", "nadam", "radam", "sgd"])
def test_trials_on_meta_count_what_those_on_fakes_of_the_cpu_do(name: str) -> None:
    for shapes in ((256, 512),), ((7,), (7,)), ((64, 64), (256, 64)):
        made = parameters(shapes)
        on_meta, on_fakes = (optimizer_account_module._tried(name, made, "cpu", home=home) for home in ("meta", "cpu"))
        assert on_meta == on_fakes


@pytest.mark.parametrize("name", ["adam", "adamw", "nadam", "radam"])
def test_equal_parameters_that_follow_each_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A temporary of one lives on in the step of the next one."""
    parameters = [torch.nn.Parameter(torch.empty(shape)) for shape in ((500, 64), (500, 64), *[(5,), (30, 17)] * 9)]
    by_kinds = optimizer_account(name, parameters)
    monkeypatch.setattr("memopt.account.optimizer_account._SINGLY", ())
    optimizer_account_module._account_of_class.cache_clear()
    assert by_kinds == optimizer_account(name, parameters)


def test_parameters_of_sizes_between_two_others_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        tried.append(len(args[1]))
        return original(*args, **kwargs)

    original = optimizer_account_module._tried
    monkeypatch.setattr(optimizer_account_module, "_tried", counted)
    parameters = [torch.nn.Parameter(torch.empty(3 + size, 77)) for size in (*range(20), *range(20)) * 4]
    optimizer_account("adamw", parameters)
    assert tried.count(1) == 2
