"""Set-up of the end-to-end tests."""

import gc

import pytest
import transformers  # noqa: F401

import memopt  # noqa: F401


@pytest.fixture(scope="session", autouse=True)
def frozen_imports() -> None:
    """Half a million objects of the imports above live on: no garbage collection and no meter need look at them."""
    gc.collect()
    gc.freeze()
