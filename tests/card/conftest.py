"""Tests on a CUDA card: `make test-card` runs them, with a stand-in where there is no card."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.card.card import forget


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    no_card = pytest.mark.skip(reason="no CUDA card, and no stand-in for one: make test-card")
    for item in items:
        if "tests/card/" in item.nodeid:
            item.add_marker(pytest.mark.card)
            if not torch.cuda.is_available():
                item.add_marker(no_card)


@pytest.fixture(autouse=True)
def _clean_card() -> Iterator[None]:
    yield
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(1.0)
        forget()
