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
from tests.end_to_end.hosted import GPT2, batch, gpt2, linked, options, trained

__all__ = ["linked"]
pytestmark = [pytest.mark.plans_always, pytest.mark.usefixtures("linked")]


@pytest.fixture
def hosted() -> Iterator[nn.Module]:
    """A model whose frozen parameters lie on the host."""
    model = GPT2.optimized(0.1)
    assert memopt.plan_of(model).hosted_bytes > 0
    yield model
    memopt.remove(model)


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


def test_copies_and_pickles_have_the_values(hosted: nn.Module) -> None:
    for made in (copy.deepcopy(hosted), torch.load(_dumped(hosted), weights_only=False)):
        assert all(map(torch.equal, made.state_dict().values(), gpt2().state_dict().values()))


def _dumped(model: nn.Module) -> io.BytesIO:
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    return saved


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


def test_remove_gives_the_parameters_back(hosted: nn.Module) -> None:
    parameters = list(hosted.parameters())
    memopt.remove(hosted)
    gc.collect()
    assert host_memory("cpu").leased_bytes == 0
    assert all(map(torch.equal, hosted.state_dict().values(), gpt2().state_dict().values()))
    assert all(one is other for one, other in zip(parameters, hosted.parameters(), strict=True))
    assert trained(GPT2, hosted, 2).losses == trained(GPT2, gpt2(), 2).losses


def test_a_model_that_is_dropped_leaves_nothing() -> None:
    model = GPT2.optimized(0.1)
    trained(GPT2, model, 2)
    assert host_memory("cpu").leased_bytes > 0
    del model
    gc.collect()
    assert host_memory("cpu").leased_bytes == 0


def test_a_second_optimize(hosted: nn.Module) -> None:
    memopt.optimize(hosted, 1.0, example_inputs=batch(), **options())
    gc.collect()
    assert host_memory("cpu").leased_bytes == 0
    assert memopt.plan_of(hosted).hosted_bytes == 0
    budget_gb = GPT2.between(0.2)
    memopt.optimize(hosted, budget_gb, example_inputs=batch(), **options())
    assert memopt.plan_of(hosted).hosted_bytes > 0
    assert trained(GPT2, hosted, 2).losses == trained(GPT2, gpt2(), 2).losses


def test_outputs_are_computed_on_demand(hosted: nn.Module) -> None:
    plain = gpt2()
    torch.manual_seed(3)
    ours = hosted(**batch())
    torch.manual_seed(3)
    theirs = plain(**batch())
    with pytest.warns(UserWarning, match="looked at"):
        assert torch.equal(ours.logits + 0, theirs.logits)


def test_two_forwards_before_a_backward(hosted: nn.Module) -> None:
    roomy = GPT2.roomy()
    memopt.optimize(hosted, (roomy.smallest_bytes() + 2 * roomy.held_bytes) / GIB, forwards=2, **options())
    plain = gpt2()
    for model in (hosted, plain):
        torch.manual_seed(4)
        first, second = model(**batch()).loss, model(**batch(12)).loss
        (first + second).backward()
    for one, other in zip(hosted.parameters(), plain.parameters(), strict=True):
        assert one.grad is None or torch.equal(one.grad, other.grad)
