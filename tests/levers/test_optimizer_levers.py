"""Levers on the optimiser together: put on in the right order, all that fit, and priced one on top of the other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn, optim

from memopt.device.devices import hardware
from memopt.levers import levers_named
from memopt.levers.lever import Lever, OptimizerChange
from memopt.levers.optimizer_levers import PricedLevers, TrainingFacts, _TrainingPrice, changes_of, price_training
from memopt.meter import measure_peak, resident_cpu_blocks
from memopt.optimizers import (
    BF16ParametersOptimizer,
    LowBitOptimizer,
    OffloadedOptimizer,
    OptimizerInBackward,
    parameterwise,
)
from tests.marks import slow
from tests.optimizers.pieces import Choice, same, saved_and_loaded, values

SINGLE = (
    Choice(bf16_parameters=True),
    Choice(low_bit_optimizer=True),
    Choice(offload_optimizer=True),
    Choice(optimizer_in_backward=True),
)


def merged(left: Choice, right: Choice) -> Choice:
    return Choice(**dict.fromkeys((*left.names, *right.names), True))


PAIRS = [merged(left, right) for left, right in itertools.combinations(SINGLE, 2)]
ALL = [Choice(True, True, True, True)]


def label(proposals: Choice) -> str:
    return "+".join(proposals.names)


def deep() -> nn.Module:
    """21 MB, and next to no activations for a batch of one."""
    torch.manual_seed(0)
    wide = [layer for _ in range(10) for layer in (nn.Linear(512, 512), nn.ReLU())]
    return nn.Sequential(*wide, nn.Linear(512, 5000, bias=False), nn.Linear(5000, 32, bias=False))


SOME = [pytest.param(pair, marks=[pytest.mark.slow] * (number % 3 > 0)) for number, pair in enumerate(PAIRS)]
"""Every third pair in each run: the bytes of each proposal alone are tested beside it."""


@pytest.mark.parametrize("proposals", [*SOME, *map(slow, ALL)], ids=label)
def test_bytes_are_told_of_every_pair(proposals: Choice) -> None:
    found = price_training(TrainingFacts.of(deep(), "adamw", hardware("cpu")), changes_of(proposals.levers))
    before = sum(resident_cpu_blocks().values())
    model = deep()
    optimizer = proposals.apply(model, optim.AdamW(model.parameters()))
    example = torch.ones(1, 512, dtype=torch.bfloat16 if proposals.bf16_parameters else torch.float32)
    peaks = []
    for _ in range(2):
        with measure_peak("cpu") as peak:
            model(example).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        peaks.append(peak.bytes - before)
    activations = 256 * 1024
    assert max(peaks) > 20 * 1024**2
    assert max(peaks) <= found.total + found.host_bytes + activations
    assert found.total + found.host_bytes <= 1.02 * max(peaks)


@pytest.mark.parametrize("proposals", [*SOME, *ALL], ids=label)
def test_every_pair_learns(proposals: Choice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And goes on bitwise from its state, in pieces as well as whole."""

    def model() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(64, 210), nn.GELU(), nn.Linear(210, 64))

    def train(model: nn.Module, optimizer: optim.Optimizer, steps: Sequence[int]) -> list[float]:
        found = []
        for step in steps:
            x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
            dtype = next(model.parameters()).dtype
            loss = (model(x.to(dtype)).float() - x.roll(1, 1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    def run(piece_elements: int) -> tuple[list[float], list[torch.Tensor]]:
        monkeypatch.setattr(parameterwise, "PIECE_ELEMENTS", piece_elements)
        trained = model()
        optimizer = proposals.apply(trained, optim.AdamW(trained.parameters(), lr=3e-3))
        found = train(trained, optimizer, range(20))
        saved = saved_and_loaded({"o": optimizer.state_dict(), "m": trained.state_dict()}, tmp_path / "state.pt")
        other = model()
        resumed = proposals.apply(other, optim.AdamW(other.parameters(), lr=3e-3))
        other.load_state_dict(saved["m"])
        resumed.load_state_dict(saved["o"])
        rest = train(trained, optimizer, range(20, 24))
        assert train(other, resumed, range(20, 24)) == rest
        assert same(values(other.parameters()), values(trained.parameters()))
        return found + rest, values(trained.parameters())

    plain = model()
    expected = train(plain, optim.AdamW(plain.parameters(), lr=3e-3), range(24))
    found, weights = run(2**21)
    assert expected[-1] < 0.7 * expected[0]
    assert found[-1] == pytest.approx(expected[-1], abs=0.05 * (expected[0] - expected[-1]))
    in_pieces, weights_in_pieces = run(4096)
    assert in_pieces == found
    assert same(weights_in_pieces, weights)


@pytest.mark.slow
def test_a_receipt_adds_up() -> None:
    facts = TrainingFacts.of(deep(), "adamw", hardware("h100"))
    names = ("bf16_parameters", "low_bit_optimizer", "offload_optimizer", "optimizer_in_backward")
    everything = levers_named(names)
    receipt = PricedLevers.of(facts, everything).each
    assert PricedLevers.of(facts, everything[:1:-1]).names == names[2:], "the last is put around all others"
    assert tuple(lever.name for one in receipt for lever in one.levers) == names
    assert receipt[0].before == price_training(facts, ())
    assert all(one.after == following.before for one, following in itertools.pairwise(receipt))
    last = price_training(facts, changes_of(everything))
    assert receipt[-1].after == last
    assert sum(one.host_bytes for one in receipt) == last.host_bytes
    assert sum(one.saved_bytes for one in receipt) == receipt[0].before.total - last.total
    # What each is for, and what it costs elsewhere.
    narrow, low, offloaded, in_backward = receipt
    assert narrow.after.parameters == narrow.before.parameters // 2
    assert low.after.optimizer_state < 0.3 * low.before.optimizer_state
    assert offloaded.after.optimizer_state == 0
    assert offloaded.host_bytes >= low.after.optimizer_state
    assert in_backward.after.gradients < 0.6 * in_backward.before.gradients
    assert PricedLevers.of(facts, ()).each == ()


def test_without_an_optimizer_there_is_no_state_to_save() -> None:
    facts = TrainingFacts.of(deep(), None, hardware("h100"))
    found = PricedLevers.of(facts, levers_named({"bf16_parameters"}))
    assert found.saved_bytes == found.after.parameters + found.after.gradients
    assert found.before.optimizer_state == found.after.optimizer_state == 0


def test_an_instance_is_priced_by_its_own_groups() -> None:
    model = deep()
    groups = [{"params": model[0].parameters(), "amsgrad": True}, {"params": [*model.parameters()][2:]}]
    changes = changes_of(levers_named({"low_bit_optimizer"}))
    instance = price_training(TrainingFacts.of(model, optim.AdamW(groups), hardware("h100")), changes)
    plain = price_training(TrainingFacts.of(model, "adamw", hardware("h100")), changes)
    matrix, bias = 512 * 512, 512
    assert instance.optimizer_state - plain.optimizer_state == matrix + matrix // 256 * 4 + bias * 4


def test_how_a_proposal_reads() -> None:
    lever = Lever("x", "a", "bitwise", "b", optimizer=OptimizerChange(optim.AdamW, "what changes", "how exactly"))
    before = _TrainingPrice(2**30, 2**30, 2**31, 0, 0, 0.5)
    found = PricedLevers((lever,), before, _TrainingPrice(2**29, 2**29, 2**31, 2**25, 0, 0.5125))
    assert str(found) == "x: saves 992 MB, +12.5 ms a step; what changes; how exactly"
    worse = PricedLevers(
        (lever,), _TrainingPrice(2**29, 2**29, 2**31, 2**25, 0, 1.0), replace(before, host_bytes=2**20)
    )
    assert str(worse) == "x: costs 992 MB, -500 ms a step, 1 MB on the host; what changes; how exactly"


def test_the_order_is_from_the_inside_out() -> None:
    model = deep()
    optimizer = Choice(True, True, True, True).apply(model, optim.AdamW(model.parameters()))
    kinds = []
    while not isinstance(optimizer, optim.AdamW):
        kinds.append(type(optimizer))
        optimizer = optimizer.inner  # type: ignore[attr-defined]
    assert kinds == [OptimizerInBackward, OffloadedOptimizer, LowBitOptimizer, BF16ParametersOptimizer]


def test_refusals_leave_model_and_optimizer_alone() -> None:
    everything = Choice(True, True, True, True)
    model = deep()
    before = values(model.parameters())
    for optimizer, why in (
        (optim.SGD(model.parameters()), "Adam and AdamW in 8 bits, not the state of SGD"),
        (optim.LBFGS(model.parameters()), "LBFGS evaluates the model"),
    ):
        with pytest.raises(ValueError, match=why):
            everything.apply(model, optimizer)
        assert not optimizer.state
    assert same(values(model.parameters()), before)
    model(torch.ones(1, 512)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_sparse_gradient_is_refused() -> None:
    model = nn.Embedding(10, 4, sparse=True)
    optimizer = OffloadedOptimizer(optim.SGD(model.parameters()))
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match=r"parameter of shape \(10, 4\) is sparse, which offload_optimizer"):
        optimizer.step()


def test_an_empty_parameter_is_stepped_too() -> None:
    model = nn.ParameterList([torch.zeros(0, 3), torch.ones(2)])
    optimizer = Choice(True, True, True, False).apply(model, optim.AdamW(model.parameters(), lr=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert model[0].shape == (0, 3)
    assert model[1].max() < 1
