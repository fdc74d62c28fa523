"""A step reads nothing from the device but the values that `GradScaler` itself reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from memopt import TrainStep
from tests.train import pieces
from tests.train.pieces import points, regression

aten = torch.ops.aten
READS = {
    aten._local_scalar_dense.default,
    aten.item.default,
    aten.nonzero.default,
    aten.equal.default,
    aten.is_nonzero.default,
}
"""Calls that wait for a GPU: `.item()`, `bool(…)`, `float(…)`, `if tensor`, and data-dependent shapes."""


class Reads(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in READS
        return func(*args, **(kwargs or {}))


def reads_in(run: Callable[[], Any]) -> int:
    with Reads() as reads:
        run()
    return reads.count


def test_the_meter_sees_reads() -> None:
    x = torch.ones(2)
    assert reads_in(lambda: [x.sum().item(), bool(x.sum() > 1), float(x[0]), x.nonzero()]) == 4


def sgd(model: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)]


def two_sgd(model: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.body, model.head)]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("make", "reads"), [(sgd, 1), (two_sgd, 2)])
def test_one_flag_an_optimizer_and_effective_batch(make: Callable[..., Any], reads: int, scaled: bool) -> None:
    """With microbatches, accumulation, clipping and a scheduler: GradScaler's own reads, by hand as many."""
    model = regression()
    optimizers = make(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizers[0], 0.9)
    scaler = torch.amp.GradScaler("cpu") if scaled else None
    step = TrainStep(model, optimizers, 1.0, scheduler, accumulate=2, scaler=scaler, microbatches=2)
    results = []
    for _ in range(2):
        assert reads_in(lambda: results.append(step(points()))) == 0
        assert reads_in(lambda: results.append(step(points()))) == reads
    assert reads_in(lambda: [result.skipped for result in results]) == 0, "the host knows that already"
    assert reads_in(lambda: float(results[-1].loss)) == 1
    assert scheduler.last_epoch == 2


def test_as_many_as_by_hand() -> None:
    theirs, ours = regression(), regression()
    optimizer, scaler = sgd(theirs)[0], torch.amp.GradScaler("cpu")

    def by_hand() -> None:
        scaler.scale(theirs(*points())).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    step = TrainStep(ours, sgd(ours), scaler=torch.amp.GradScaler("cpu"))
    assert reads_in(lambda: step(points())) == reads_in(by_hand) == 1


def test_counting_tokens_reads_nothing() -> None:
    """Over what the model itself reads."""
    model, batch = pieces.gpt2(), pieces.uneven_text()
    own = reads_in(lambda: model(**batch).loss.backward())
    step = TrainStep(model, sgd(model), microbatches=2)
    assert reads_in(lambda: step(batch)) == 2 * own + 1


def test_fused_optimizers_read_the_flag_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flag remains on the GPU: schedulers step in the next call."""
    monkeypatch.setattr("memopt.train.scaling._Verdict.on_host", False)
    model = regression()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    step = TrainStep(model, optimizer, 1.0, scheduler)
    assert reads_in(lambda: step(points())) == 0
    assert scheduler.last_epoch == 0
    assert reads_in(lambda: step(points())) == 1, "the flag of the first call, which has arrived by now"
    assert scheduler.last_epoch == 1
    step.settle()
    assert scheduler.last_epoch == 2


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("scaled", [False, True])
def test_a_fused_optimizer_on_cuda_never_waits(scaled: bool) -> None:
    model = regression().cuda()
    batch = tuple(tensor.cuda() for tensor in points())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    scaler = torch.amp.GradScaler("cuda") if scaled else None
    step = TrainStep(model, optimizer, 1.0, scheduler, accumulate=2, scaler=scaler, microbatches=2)
    step(batch), step(batch)
    with no_waiting():
        for _ in range(4):
            step(batch)
    step.settle()
    assert scheduler.last_epoch == 3
