"""Prices of nodes: by the card's table, or timed here."""

from __future__ import annotations

import pytest

import memopt
from memopt.pricing import hardware
from memopt.pricing.node_prices import price_nodes
from memopt.pricing.price import is_scheduled
from memopt.pricing.time_model import node_seconds
from tests.families import BY_NAME
from tests.planned import region


def test_tables_price_by_the_card() -> None:
    nodes = [node for node in region(2).module.graph.nodes if is_scheduled(node)]
    for name in ("cpu", "h100"):
        prices = price_nodes(nodes, hardware(name))
        assert {node: price.seconds for node, price in prices.items()} == {
            node: node_seconds(node, hardware(name)) for node in nodes
        }


def test_timed_prices_are_of_this_machine() -> None:
    nodes = [node for node in region(2).module.graph.nodes if is_scheduled(node)]
    timed = price_nodes(nodes, hardware("cpu"), timed=True)
    assert all(timed[node].seconds > 0 for node in nodes)
    assert any(timed[node].seconds != node_seconds(node, hardware("cpu")) for node in nodes)


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
