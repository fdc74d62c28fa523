"""Settings of the whole suite."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from memopt.account.elsewhere import Elsewhere
from memopt.capture.region import RecordedRegion

# The tests run by a user's defaults, whatever is set where they are started.
for name in ("MEMOPT_CACHE", "MEMOPT_PLAN"):
    os.environ.pop(name, None)

# `make test` runs a worker a core: more threads would only wait for each other.
ON_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if ON_WORKER:
    torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Have tests that are marked `plans_always`, with their fixtures of every scope, plan each training call: a step
    that fits the budget would run as the plain model does."""
    with pytest.MonkeyPatch.context() as patch:
        if item.get_closest_marker("plans_always"):
            patch.setenv("MEMOPT_PLAN", "always")
        return (yield)


@pytest.fixture(autouse=True, scope="session")
def frozen_imports() -> None:
    """Freeze the objects of the imports that a worker needs sooner or later, half a million, so that garbage
    collections and meters skip them. A run of a few files is spared the imports."""
    if ON_WORKER:
        import torch._dynamo  # noqa: F401
        import transformers  # noqa: F401

        import memopt.api  # noqa: F401

        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def frozen_remains() -> Iterator[None]:
    """Freeze what a file of tests leaves behind, such as plans and gradients that are kept for several tests: meters
    would count it in the steps of the next file, and after some hundred tests collections and meters would go through
    millions of objects, and take half of the time of each test."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def nothing_elsewhere() -> Iterator[None]:
    """Have plans count nothing beside their step: the tensors of other tests are in the same process, and the figures
    of a plan would depend on them. The tests of what lies elsewhere count it again (`tests.elsewhere`)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memopt.account.elsewhere.look", lambda *_, **__: Elsewhere())
        patch.setattr("memopt.run.ledger.Ledger.others_training", lambda *_: [])
        yield


@pytest.fixture(autouse=True, scope="module")
def own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give each file of tests a cache of its own, which is empty at first: plans come from disk within a file, as in a
    second run of the same job, but do not depend on which other files ran before. The user's cache is not touched."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMOPT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def own_settings_of_accelerate() -> Iterator[None]:
    """Take back the settings that `TrainingArguments(torch_compile=True)` leaves in the environment and in the state
    that all Accelerators of the process share, from where every later one takes them."""
    before = {name: value for name, value in os.environ.items() if name.startswith("ACCELERATE_")}
    yield
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]
    if (state := sys.modules.get("accelerate.state")) is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.update(before)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[RecordedRegion]:
    """The regions that were captured."""
    found: list[RecordedRegion] = []
    record = RecordedRegion.record.__func__  # type: ignore[attr-defined]

    def counted(cls: Any, *args: Any, **kwargs: Any) -> RecordedRegion:
        found.append(record(cls, *args, **kwargs))
        return found[-1]

    monkeypatch.setattr(RecordedRegion, "record", classmethod(counted))
    return found
