"""Outputs on demand: when they are computed, from what, and what works with them."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.compat.operators import TorchDispatchMode
from memopt.run.on_demand import OnDemand
from tests.capture.test_deferred_outputs import CLASSES, ROWS, WIDTH, Model, X
from tests.marks import slow

pytestmark = pytest.mark.plans_always  # the plain steps would fit

EXACT: dict[str, Any] = {"precision": "fp32", "allow": {"recompute", "reinplace"}}
SHAPE = (ROWS, CLASSES)


class Calls(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func not in (torch.ops.aten.detach.default,)
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "an output of the model was read")
        yield


def call(dropout: float = 0.5, **options: Any) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """An optimised model, the loss and the logits of a call, and the plain model's logits."""
    model = Model(dropout=dropout).train()
    torch.manual_seed(1)
    _, expected = model(X)
    memopt.optimize(model, 1.0, **{**EXACT, **options})
    torch.manual_seed(1)
    loss, logits = model(X)
    return model, loss, logits, expected.detach()


def is_computed(logits: Tensor) -> bool:
    assert isinstance(logits, OnDemand)
    return logits._value.later is None


def test_sizes_compute_nothing() -> None:
    _, _, logits, expected = call()
    with Calls() as calls:
        assert logits.shape == logits.size() == SHAPE
        assert (logits.dtype, logits.device, logits.ndim, len(logits)) == (expected.dtype, expected.device, 2, ROWS)
        assert (logits.numel(), logits.stride(), logits.is_contiguous()) == (ROWS * CLASSES, expected.stride(), True)
        assert logits.requires_grad
        assert not logits.detach().requires_grad
        assert isinstance(logits, Tensor)
        assert str(logits.shape) == f"torch.Size([{ROWS}, {CLASSES}])"
    assert calls.count == 0
    assert not is_computed(logits)


@pytest.mark.parametrize("after_backward", [False, True])
def test_the_value_is_that_of_the_forward(after_backward: bool) -> None:
    _, loss, logits, expected = call()
    if after_backward:
        loss.backward()
    state = torch.get_rng_state()
    assert torch.equal(logits, expected)
    assert torch.equal(torch.get_rng_state(), state), "a second forward leaves the generators as they were"
    assert is_computed(logits)


LOOKS = {
    "indexing": lambda logits: logits[3, 5:9],
    "argmax": lambda logits: logits.argmax(-1),
    "cpu": lambda logits: logits.detach().cpu(),
    "numpy": lambda logits: torch.from_numpy(logits.detach().cpu().numpy()),
    "tolist": lambda logits: torch.tensor(logits.tolist()),
    "log_softmax": lambda logits: torch.log_softmax(logits, -1),
    "item": lambda logits: torch.tensor(logits.sum().item()),
    "pickle": lambda logits: pickle.loads(pickle.dumps(logits.detach())),
    "deepcopy": lambda logits: copy.deepcopy(logits.detach()),
    "clone": lambda logits: logits.clone() * 1,
    "stack": lambda logits: torch.stack([logits, logits]),
    "float64": lambda logits: logits.double(),
    "iteration": lambda logits: next(iter(logits)),
    "repr": lambda logits: torch.tensor(len(repr(logits.detach()))),
    "compiled": lambda logits: torch.compile(lambda x: x.argmax(-1) + 1, backend="eager")(logits.detach()),
}


@pytest.mark.parametrize("look", [slow(look) if look == "compiled" else look for look in LOOKS])
def test_works_as_with_a_plain_tensor(look: str) -> None:
    _, _, logits, expected = call(dropout=0.0)
    found = LOOKS[look](logits)
    assert type(found) is Tensor
    assert torch.equal(found, LOOKS[look](expected))


def test_saving() -> None:
    _, _, logits, expected = call()
    file = io.BytesIO()
    torch.save({"logits": logits}, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True)["logits"], expected)


def test_writing_in_place() -> None:
    _, _, logits, expected = call()
    detached = logits.detach()
    detached[0] = 0.0
    detached.mul_(2.0)
    expected[0] = 0.0
    assert torch.equal(logits, expected * 2)


def test_a_look_after_the_step_is_refused() -> None:
    model, loss, logits, _ = call()
    loss.backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    with pytest.raises(memopt.StaleOutputError, match=r"shape \(64, 512\).*before optimizer\.step\(\).*outputs='all'"):
        logits.argmax()
    assert "not computed" in repr(logits)
    assert logits.shape == SHAPE


def test_other_memory_for_a_weight_is_noticed() -> None:
    model, _, logits, _ = call()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    with pytest.raises(memopt.StaleOutputError):
        logits.argmax()


def test_what_was_looked_at_stays() -> None:
    model, loss, logits, expected = call()
    logits.sum()
    loss.backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    assert torch.equal(logits, expected)


def test_outputs_all_returns_and_differentiates_all() -> None:
    model, loss, logits, expected = call(outputs="all")
    assert type(logits) is Tensor
    assert torch.equal(logits, expected)
    (loss + logits.mean()).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_said_once_with_its_bytes() -> None:
    model, _, logits, _ = call()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        logits.sum()
        model(X)[1].sum()
    (warning,) = [str(one.message) for one in said if "was read" in str(one.message)]
    assert "128 kB" in warning
    assert "128 kB of outputs" in " ".join(memopt.plan_of(model).notes)


def test_hidden_states_live_until_the_backward() -> None:
    _, loss, logits, _ = call()
    assert isinstance(logits, OnDemand)
    later = logits._value.later
    assert later is not None
    assert later.start_bytes == 4 * ROWS * WIDTH
    loss.backward()
    assert later.start_bytes == 0


def test_nothing_of_a_call_outlives_its_outputs() -> None:
    """Also where planning it raised errors: their tracebacks would hold the frames that run it."""
    import gc

    model = Model().train()
    least = _smallest_gb(model)
    memopt.optimize(model, 1.01 * least)
    gc.collect()
    gc.disable()
    try:
        loss = model(X)[0]
        alive = [one for one in gc.get_objects() if type(one) is OnDemand]
    finally:
        gc.enable()
    assert loss.requires_grad
    assert not alive


def _smallest_gb(model: nn.Module) -> float:
    with pytest.raises(memopt.BudgetError) as refused:
        memopt.plan(model, 1e-6, (X,))
    return refused.value.smallest_gb
