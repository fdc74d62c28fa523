"""Settings of the whole suite."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from memopt.account.elsewhere import Found
from memopt.capture.region import RecordedRegion

# Plans that an earlier run kept would hide what planning does now; the tests of the cache switch it on.
os.environ["MEMOPT_CACHE"] = "0"

# A step that fits runs as the plain model does; tests of plans want plans, and test_plain_calls.py switches it off.
os.environ["MEMOPT_PLAN"] = "always"

# `make test` runs a worker a core: more threads would only wait for each other.
ON_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if ON_WORKER:
    torch.set_num_threads(1)


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
    """Freeze what a file of tests leaves behind, such as plans that are kept for several tests: after some hundred
    tests, collections and meters would go through millions of objects, and take half of the time of each test."""
    yield
    if ON_WORKER:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def nothing_elsewhere() -> Iterator[None]:
    """Have plans count nothing beside their step: the tensors of other tests are in the same process, and the figures
    of a plan would depend on them. The tests of what lies elsewhere count it again (`tests.elsewhere`)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memopt.account.elsewhere.look", lambda *_, **__: Found())
        patch.setattr("memopt.run.ledger.Ledger.company", lambda *_: [])
        yield


@pytest.fixture(autouse=True, scope="session")
def own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the tests away from the user's cache: nothing is read from it or written to it."""
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
