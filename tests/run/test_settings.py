from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from memopt.run.settings import Settings


@pytest.fixture
def gpt2() -> GPT2LMHeadModel:
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=50, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config).train()


def test_what_changes_a_step_changes_the_number(gpt2: GPT2LMHeadModel) -> None:
    settings = Settings(gpt2)
    numbers = [settings.number()]
    assert settings.number() == numbers[0]
    gpt2.transformer.h[0].attn.attn_dropout.p = 0.3
    numbers.append(settings.number())
    gpt2.gradient_checkpointing_enable()
    numbers.append(settings.number())
    gpt2.transformer.h[0].eval()
    numbers.append(settings.number())
    gpt2.config.use_cache = False
    numbers.append(settings.number())
    gpt2.transformer.h[1] = nn.Identity()  # type: ignore[assignment]
    numbers.append(settings.number())
    gpt2.forward = lambda x: x  # type: ignore[method-assign,assignment]
    numbers.append(settings.number())
    gpt2.register_forward_hook(lambda *_: None)
    numbers.append(settings.number())
    assert len(set(numbers)) == len(numbers)


def test_a_state_that_comes_back_has_its_number(gpt2: GPT2LMHeadModel) -> None:
    settings = Settings(gpt2)
    first = settings.number()
    gpt2.transformer.drop.p = 0.0
    assert settings.number() != first
    gpt2.transformer.drop.p = 0.1
    assert settings.number() == first


def test_a_counter_is_no_setting(gpt2: GPT2LMHeadModel) -> None:
    settings = Settings(gpt2)
    numbers = []
    for step in range(1, 30):
        gpt2.calls = step
        numbers.append(settings.number())
    assert len(set(numbers[8:])) == 1
    gpt2.calls = 0
    assert settings.number() != numbers[-1]


def test_tensors_are_not_held(gpt2: GPT2LMHeadModel) -> None:
    settings = Settings(gpt2)
    gpt2.auxiliary = 0
    first = settings.number()
    for _ in range(3):
        gpt2.auxiliary = torch.ones(3)
        assert settings.number() != first
    assert not any(isinstance(value, torch.Tensor) for value in settings._latest)


def test_a_name_that_the_model_gives_makes_no_other_state(gpt2: GPT2LMHeadModel) -> None:
    settings = Settings(gpt2)
    assert gpt2.config.problem_type is None
    first = settings.number()
    with settings.naming():
        gpt2.config.problem_type = "regression"
    assert settings.number() == first
    gpt2.config.problem_type = "multi_label_classification"
    assert settings.number() != first


def test_a_name_that_the_user_gives_makes_another_state(gpt2: GPT2LMHeadModel) -> None:
    settings = Settings(gpt2)
    first = settings.number()
    with settings.naming():
        pass
    gpt2.config.problem_type = "regression"
    assert settings.number() != first


def test_a_number_that_the_model_counts_up_makes_another_state(gpt2: GPT2LMHeadModel) -> None:
    gpt2.config.layers_in_use = None
    settings = Settings(gpt2)
    first = settings.number()
    with settings.naming():
        gpt2.config.layers_in_use = 1
    assert settings.number() != first
