"""Set-up of the end-to-end tests."""

import gc

import pytest
import transformers  # noqa: F401

import memopt  # noqa: F401


@pytest.fixture(scope="session", autouse=True)
def more_frozen_imports() -> None:
    """Freeze the half million objects that the imports above made, so that garbage collections and meters skip them."""
    gc.collect()
    gc.freeze()
