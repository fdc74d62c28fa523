"""Prices of nodes: by the card's table, or timed here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

import memopt
from examples.models.families import BY_NAME
from memopt.device import hardware
from memopt.device.op_call import OpCall
from memopt.device.time_model import node_seconds
from memopt.price import price as price_module
from memopt.price.price import is_scheduled, price_nodes
from tests.planned import region


def test_tables_price_by_the_card() -> None:
    nodes = [node for node in region(2).module.graph.nodes if is_scheduled(node)]
    for name in ("cpu", "h100"):
        prices = price_nodes(nodes, hardware(name))
        assert {node: price.seconds for node, price in prices.items()} == {
            node: node_seconds(node, hardware(name)) for node in nodes
        }


@pytest.mark.slow
def test_timed_prices_are_of_this_machine() -> None:
    nodes = [node for node in region(2).module.graph.nodes if is_scheduled(node)]
    timed = price_nodes(nodes, hardware("cpu"), timed=True)
    assert all(timed[node].seconds > 0 for node in nodes)
    assert any(timed[node].seconds != node_seconds(node, hardware("cpu")) for node in nodes)


def test_the_ops_that_make_up_most_are_timed_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU with what passes between kernels on top, and on a GPU at hand in place of its rates."""
    nodes = [node for node in region(2).module.graph.nodes if is_scheduled(node)]
    asked = []

    def timed(expected: Mapping[OpCall, float], device: torch.device) -> dict[OpCall, float]:
        asked.append((device.type, sum(expected.values())))
        return {call: 7.0 for call in expected if "mm" in str(call.op)}

    monkeypatch.setattr(price_module, "calibrated_seconds", timed)
    for card in (replace(hardware("cpu"), between_seconds=1.0), hardware("h100")):
        prices = price_nodes(nodes, card, timed=True)
        for node in nodes:
            assert (prices[node].seconds == 7.0 + card.between_seconds) is ("mm" in str(node.target))
    assert [device for device, _ in asked] == ["cpu", "cuda"]
    assert asked[1][1] == pytest.approx(sum(node_seconds(node, hardware("h100")) for node in nodes))


@pytest.mark.slow
def test_calibrated_plans_keep_the_budget() -> None:
    family = BY_NAME["unet"]
    plain = memopt.plan(family.make(), 1000, family.batch("usual"), optimizer=None, calibrate=True, precision="fp32")
    table = memopt.plan(family.make(), 1000, family.batch("usual"), optimizer=None, precision="fp32")
    assert plain.step_seconds != table.step_seconds
    assert plain.plain.peak_bytes == table.plain.peak_bytes
    plan = plain.at(0.7 * plain.plain_peak_gb)
    assert plan.predicted_peak_gb <= 0.7 * plain.plain_peak_gb
    assert plan.bound <= plan.added_time


def test_a_named_card_cannot_be_timed_here() -> None:
    family = BY_NAME["unet"]
    with pytest.raises(ValueError, match="calibrate measures the device at hand, not 'h100'"):
        memopt.plan(family.make(), 1000, family.batch("usual"), device="h100", calibrate=True, precision="fp32")
