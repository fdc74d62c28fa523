from __future__ import annotations

from collections import OrderedDict, UserDict
from typing import Any

import pytest
import torch
from torch import nn

from memopt.capture.inputs import as_call, call_signature, check_device, fake_call, on_meta, tensors_in
from memopt.compat.fakes import FakeTensor, new_fake_mode

x, y = torch.zeros(2, 3), torch.zeros(4)
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (x, ((x,), {})),
        ((x, y), ((x, y), {})),
        ([x], ((x,), {})),
        ((), ((), {})),
        ({"a": x, "b": 3}, ((), {"a": x, "b": 3})),
        (OrderedDict(a=x), ((), {"a": x})),
        (UserDict(a=x), ((), {"a": x})),
    ],
)
def test_a_batch_becomes_a_call(given: Any, expected: Any) -> None:
    call = as_call(given, with_targets=False)
    assert list(map(id, tensors_in(call))) == list(map(id, tensors_in(expected)))
    assert (len(call[0]), list(call[1])) == (len(expected[0]), list(expected[1]))


@pytest.mark.parametrize("given", [(x, y), [x, y], ({"a": x}, y), ((x, y), None)])
def test_with_a_loss_function_a_batch_is_a_pair(given: Any) -> None:
    assert as_call(given, with_targets=True) == (tuple(given), {})


@pytest.mark.parametrize(
    ("given", "kind"), [(x, "a Tensor"), ((x,), "a tuple of 1"), ([x, y, x], "a list of 3"), ({"a": x}, "a dict")]
)
def test_a_batch_that_is_not_a_pair_is_refused(given: Any, kind: str) -> None:
    with pytest.raises(TypeError, match=rf"must be a pair \(inputs, targets\), not {kind}; put the inputs"):
        as_call(given, with_targets=True)


@pytest.mark.parametrize(("given", "kind"), [(None, "a NoneType"), ("text", "a str"), (3, "a int"), ({x}, "a set")])
def test_values_that_are_not_a_batch_are_refused(given: Any, kind: str) -> None:
    with pytest.raises(TypeError, match=f"example_inputs must be a tuple .* not {kind}$"):
        as_call(given, with_targets=False)


def test_tensors_are_found_however_nested() -> None:
    call = ((x, [y, {"deep": (x, None)}]), {"b": 3, "c": y})
    assert list(map(id, tensors_in(call))) == list(map(id, (x, y, x, y)))


def test_signatures_differ_where_captures_can() -> None:
    signature = call_signature(((x, 1), {"flag": True}))
    assert signature == call_signature(((torch.ones(2, 3), 1), {"flag": True}))
    for other in (
        torch.zeros(3, 2),
        torch.zeros(3, 2).t(),
        torch.zeros(2, 3, dtype=torch.float16),
        torch.zeros(2, 3, device="meta"),
        torch.zeros(2, 3, requires_grad=True),
    ):
        assert signature != call_signature(((other, 1), {"flag": True}))
    assert signature != call_signature(((x, 2), {"flag": True}))
    assert signature != call_signature(((x, 1), {"flag": False}))
    assert signature != call_signature(((x, 1), {"flags": True}))


def test_inputs_must_be_where_the_model_is() -> None:
    model = nn.Linear(3, 3)
    with new_fake_mode():
        elsewhere, scalar = torch.zeros(2, 3, device="cuda"), torch.zeros((), device="cuda")
    check_device(((x, scalar), {}), model)
    with pytest.raises(ValueError, match=r"an input of shape \(2, 3\) is on cuda:0, but the model is on cpu; move one"):
        check_device(((), {"x": [elsewhere]}), model)


def test_calls_that_are_only_planned_may_be_on_meta() -> None:
    model, shapes_only = nn.Linear(3, 3), nn.Linear(3, 3, device="meta")
    pairs = [(torch.zeros(2, 3, device="meta"), model), (x, shapes_only)]
    for given, to in pairs:
        check_device(((given,), {}), to, meta_allowed=True)
        with pytest.raises(ValueError, match="move one of them"):
            check_device(((given,), {}), to)


def test_a_fake_call_has_fakes_like_its_tensors() -> None:
    mode = new_fake_mode()
    strided = torch.zeros(3, 2, dtype=torch.float16).t()
    meta = torch.zeros(5, device="meta", requires_grad=True)
    (first, again, rest), options = fake_call(((strided, strided, [meta, "text"]), {"n": 3}), mode, CPU)
    assert isinstance(first, FakeTensor)
    assert first is again, "one fake for a tensor given twice"
    assert (first.shape, first.stride(), first.dtype) == (strided.shape, strided.stride(), strided.dtype)
    assert rest[0].device == CPU, "a meta tensor gets a fake on the planned device"
    assert rest[0].requires_grad
    assert (rest[1], options) == ("text", {"n": 3})


def test_hollow_arguments_require_gradients_where_the_given_ones_do() -> None:
    """A step with second derivatives by its inputs, as of a gradient penalty, is counted on them."""
    given, labels = torch.randn(3, 4, requires_grad=True), torch.arange(3)
    (hollow, again), kwargs = on_meta(((given, given), {"y": labels}))
    assert hollow is again
    assert hollow.is_meta
    assert hollow.requires_grad
    assert not kwargs["y"].requires_grad
