"""Marks of the cases of tests."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Return a case that only `make test-all` runs: other cases of its test stand for it in `make test`."""
    return pytest.param(*values, marks=pytest.mark.slow)
