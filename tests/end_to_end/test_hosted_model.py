"""A model whose frozen parameters lie on the host: saved, loaded, copied, evaluated, and given back."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from memopt.errors import GIB
from passes.ops.offload_ops import host_memory
from tests.end_to_end.hosted import GPT2, batch, gpt2, linking, options, trained

pytestmark = pytest.mark.plans_always


@pytest.fixture(scope="module", autouse=True)
def linked_for_all() -> Iterator[None]:
    """The link of `linked`, for as long as a planned model serves several tests."""
    with pytest.MonkeyPatch.context() as patch:
        yield from linking(patch)


@pytest.fixture(scope="module")
def planned(linked_for_all: None) -> Iterator[nn.Module]:
    """A model whose frozen parameters lie on the host; planned once, as that takes seconds."""
    model = GPT2.optimized(0.3)
    assert memopt.plan_of(model).hosted_bytes > 0
    yield model
    memopt.remove(model)


@pytest.fixture
def hosted(planned: nn.Module) -> nn.Module:
    """The planned model as it was made."""
    planned.load_state_dict(gpt2().state_dict())
    planned.zero_grad()
    return planned.train()


@pytest.mark.slow
def test_copies_and_pickles_have_the_values(hosted: nn.Module) -> None:
    for made in (copy.deepcopy(hosted), torch.load(_dumped(hosted), weights_only=False)):
        assert all(map(torch.equal, made.state_dict().values(), gpt2().state_dict().values()))


def _dumped(model: nn.Module) -> io.BytesIO:
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    return saved


@pytest.mark.slow
def test_eval_and_calls_without_gradients(hosted: Any) -> None:
    plain = gpt2()
    with torch.no_grad():
        assert torch.equal(hosted.eval()(**batch()).logits, plain.eval()(**batch()).logits)
    assert host_memory("cpu").leased_bytes > 0, "parameters are brought one by one"
    assert torch.equal(
        hosted.generate(batch()["input_ids"], max_new_tokens=3, do_sample=False, pad_token_id=0),
        plain.generate(batch()["input_ids"], max_new_tokens=3, do_sample=False, pad_token_id=0),
    )
    ours, theirs = hosted(**batch()), plain(**batch())
    ours.loss.backward()
    theirs.loss.backward()
    assert ours.loss == theirs.loss
    for one, other in zip(hosted.parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or other.grad is None or torch.equal(one.grad, other.grad)
    hosted.zero_grad(), plain.zero_grad()
    assert trained(GPT2, hosted.train(), 2).losses == trained(GPT2, plain.train(), 2).losses


def test_outputs_are_computed_on_demand(hosted: nn.Module) -> None:
    plain = gpt2()
    torch.manual_seed(3)
    ours = hosted(**batch())
    torch.manual_seed(3)
    theirs = plain(**batch())
    with pytest.warns(UserWarning, match="an output of the model was read that the plan does not hold"):
        assert torch.equal(ours.logits + 0, theirs.logits)


@pytest.mark.slow
def test_state_is_saved_and_loaded(hosted: nn.Module) -> None:
    plain = gpt2()
    assert all(map(torch.equal, hosted.state_dict().values(), plain.state_dict().values()))
    saved = io.BytesIO()
    torch.save(hosted.state_dict(), saved)
    saved.seek(0)
    loaded = torch.load(saved)
    assert all(map(torch.equal, loaded.values(), plain.state_dict().values()))
    doubled = {name: 2 * value for name, value in loaded.items()}
    hosted.load_state_dict(doubled)
    plain.load_state_dict(doubled)
    ours, theirs = trained(GPT2, hosted, 2), trained(GPT2, plain, 2)
    assert ours.losses == theirs.losses
    hosted.load_state_dict(loaded, assign=True)
    assert trained(GPT2, hosted, 2).losses == trained(GPT2, gpt2(), 2).losses


@pytest.mark.slow
def test_a_second_optimize_remove_and_dropping_leave_nothing_on_the_host() -> None:
    gc.collect()
    others = host_memory("cpu").leased_bytes
    model, plain = GPT2.optimized(0.3), gpt2()
    parameters = list(model.parameters())
    assert trained(GPT2, model, 2).losses == trained(GPT2, plain, 2).losses
    assert host_memory("cpu").leased_bytes > others
    memopt.optimize(model, 1.0, example_inputs=batch(), **options())
    gc.collect()
    assert host_memory("cpu").leased_bytes == others
    assert memopt.plan_of(model).hosted_bytes == 0
    memopt.optimize(model, GPT2.between(0.2), example_inputs=batch(), **options())
    assert memopt.plan_of(model).hosted_bytes > 0
    assert trained(GPT2, model, 2).losses == trained(GPT2, plain, 2).losses
    memopt.remove(model)
    gc.collect()
    assert host_memory("cpu").leased_bytes == others
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert trained(GPT2, model, 2).losses == trained(GPT2, plain, 2).losses
    model = GPT2.optimized(0.3)
    trained(GPT2, model, 1)
    assert host_memory("cpu").leased_bytes > others
    del model
    gc.collect()
    assert host_memory("cpu").leased_bytes == others


@pytest.mark.slow
def test_two_forwards_before_a_backward() -> None:
    roomy, hosted = GPT2.roomy(), gpt2()
    memopt.optimize(hosted, (roomy.smallest_bytes() + 2 * roomy.held_bytes) / GIB, forwards=2, **options())
    plain = gpt2()
    for model in (hosted, plain):
        torch.manual_seed(4)
        first, second = model(**batch()).loss, model(**batch(12)).loss
        (first + second).backward()
    for one, other in zip(hosted.parameters(), plain.parameters(), strict=True):
        assert one.grad is None or torch.equal(one.grad, other.grad)
