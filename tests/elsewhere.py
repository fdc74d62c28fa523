"""Counts what lies beside a step on its device, in tests that are about it."""

from __future__ import annotations

import gc

import pytest

from memopt.account import elsewhere
from memopt.run.ledger import Ledger

look, company = elsewhere.look, Ledger.others_training
"""The functions themselves, imported before the suite's set-up replaces them."""


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have plans count what lies elsewhere, but for what earlier tests left behind, which meters skip too."""
    gc.collect()
    gc.freeze()
    monkeypatch.setattr(elsewhere, "look", look)
    monkeypatch.setattr(Ledger, "others_training", company)
    monkeypatch.setattr(Ledger, "_by_device", {})
