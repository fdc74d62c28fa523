"""Models that train in threads of their own: each call is planned and runs as in one thread."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.capture import dynamo
from memopt.compat import check
from memopt.errors import TorchNamesError
from memopt.run import session
from memopt.run.status import State
from passes.compat import private

pytestmark = pytest.mark.plans_always
MB = 2**20


class Deep(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(4))
        drawn = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=drawn) / 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh() + x
        return x


def losses(seed: int, budget_gb: float | None, begun: threading.Barrier | None = None) -> list[float]:
    """The losses of three steps, the first of them as soon as all threads are there."""
    model = Deep(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if budget_gb is not None:
        memopt.optimize(model, budget_gb=budget_gb, optimizer=optimizer, precision="fp32", allow={"recompute"})
    drawn = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(3):
        batch = torch.randn(512, 48, generator=drawn)
        if begun is not None and not found:
            begun.wait()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    if budget_gb is not None:
        assert memopt.status(model).plan is not None
    return found


def in_threads(*work: Callable[[], object]) -> list[object]:
    """The result of each function in a thread of its own, or the error that it raises."""
    results: list[object] = [None] * len(work)

    def run(number: int) -> None:
        try:
            results[number] = work[number]()
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_two_models_that_are_planned_in_two_threads_at_once() -> None:
    plain = [losses(seed, None) for seed in (1, 2)]
    begun = threading.Barrier(2)
    planned = in_threads(*(lambda seed=seed: losses(seed, 2.2 * MB / 2**30, begun) for seed in (1, 2)))
    assert planned == plain


def test_a_call_waits_for_what_another_thread_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch knows that something is being compiled, and memopt that a call is being captured, but not in which thread:
    the call would run as a part of that one, beside the budget."""
    model = Deep(1)
    memopt.optimize(model, budget_gb=0.1, optimizer="sgd", precision="fp32", allow={"recompute"})
    compiling, called = threading.Event(), threading.Event()

    def compile_something() -> None:
        with session._IN_TURN:
            monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
            monkeypatch.setattr(dynamo, "_captures", 1)
            compiling.set()
            called.wait()
            time.sleep(0.2)  # the other thread is at the lock by then
            monkeypatch.setattr(torch.compiler, "_is_compiling_flag", False)
            monkeypatch.setattr(dynamo, "_captures", 0)

    def call() -> None:
        compiling.wait()
        called.set()
        model(torch.randn(16, 48)).sum().backward()

    assert in_threads(compile_something, call) == [None, None]
    assert memopt.status(model).state is State.PLANNED


def test_modules_of_torch_that_a_thread_imports_are_checked_later(monkeypatch: pytest.MonkeyPatch) -> None:
    half = ModuleType("torch.half_imported")
    half.__spec__ = ModuleSpec(half.__name__, None)
    monkeypatch.setattr(half.__spec__, "_initializing", True, raising=False)
    monkeypatch.setitem(sys.modules, half.__name__, half)
    monkeypatch.setattr(check, "_checked", set())
    monkeypatch.setattr(check, "_known", [0])
    monkeypatch.setattr("memopt.compat.dynamo.PRIVATE_NAMES", (*private(f"{half.__name__}: name"),))
    check.check()
    monkeypatch.setattr(half.__spec__, "_initializing", False)
    monkeypatch.setattr(check, "_known", [0])
    with pytest.raises(TorchNamesError, match="half_imported"):
        check.check()
