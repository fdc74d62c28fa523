"""transformers, traced by Dynamo, makes the choices about masks that its eager model makes."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    masking_utils,
)

import memopt
from memopt.compat.eager_mode import eager_mask_branches
from tests.marks import slow

LENGTH = 6


def graph_of(call: Callable[..., Any], *args: Tensor) -> list[torch.fx.GraphModule]:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph_module: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph_module)
        return graph_module.forward

    with eager_mask_branches(args, {}):
        torch.compile(call, backend=keep, fullgraph=True, dynamic=False)(*args)
    return graphs


def is_packed(positions: Tensor) -> Tensor:
    return positions + (0 if masking_utils.find_packed_sequence_indices(positions) is None else 100)


def counted(x: Tensor) -> Tensor:
    return is_packed((torch.arange(LENGTH) + 3).unsqueeze(0).expand(2, -1)) + x


def given(x: Tensor) -> Tensor:
    return is_packed(x)


def strided(x: Tensor) -> Tensor:
    return is_packed(torch.arange(0, 2 * LENGTH, 2)[None]) + x


def repeated(x: Tensor) -> Tensor:
    return is_packed(torch.arange(LENGTH).unsqueeze(-1).expand(-1, LENGTH)) + x.sum()


@pytest.mark.parametrize(("call", "packed"), [(counted, False), (given, True), (strided, True), (repeated, True)])
def test_positions_that_plainly_count_up_are_one_sequence(call: Callable[[Tensor], Tensor], packed: bool) -> None:
    (graph,) = graph_of(call, torch.zeros(2, LENGTH, dtype=torch.int64))
    assert any(node.target is torch.diff for node in graph.graph.nodes) is packed


IDLE = {
    "ones": ({"attention_mask": torch.ones(2, LENGTH)}, True),
    "padding": ({"attention_mask": torch.ones(2, LENGTH).tril()}, False),
    "positions": ({"position_ids": torch.arange(LENGTH)[None]}, True),
    "packed": ({"position_ids": torch.arange(LENGTH)[None] % 3}, False),
    "unknown": ({"attention_mask": torch.ones(2, LENGTH, device="meta")}, False),
    "none": ({}, False),
}


@pytest.mark.parametrize("case", IDLE)
def test_no_mask_is_made_where_eager_mode_makes_none(case: str) -> None:
    named, skipped = IDLE[case]
    names = "_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa", "find_packed_sequence_indices"
    originals = [getattr(masking_utils, name) for name in names]
    for args, kwargs in (((), named), ((named,), {})):
        with eager_mask_branches(args, kwargs):
            changed = [getattr(masking_utils, name) for name in names]
            assert [one is not other for one, other in zip(changed, originals, strict=True)] == [skipped, skipped, True]
        assert [getattr(masking_utils, name) for name in names] == originals


LLAMA = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SHARING = LLAMA | {"num_key_value_heads": 2}


def models() -> dict[str, tuple[Callable[[], Any], tuple[str, ...]]]:
    """Models with one attention kernel for all masks, each with the names of its masks."""
    t5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 99, "dropout_rate": 0.0}
    t5 |= {"decoder_start_token_id": 0}
    bart = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4, "vocab_size": 99}
    bart |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "decoder_attention_heads": 4, "dropout": 0.0}
    one, two = ("attention_mask",), ("attention_mask", "decoder_attention_mask")
    return {
        "llama": (lambda: LlamaForCausalLM(LlamaConfig(**SHARING)), one),
        "mistral": (lambda: MistralForCausalLM(MistralConfig(sliding_window=8, **SHARING)), one),
        "bert": (lambda: BertForMaskedLM(BertConfig(attention_probs_dropout_prob=0.0, **LLAMA)), one),
        "bart": (lambda: BartForConditionalGeneration(BartConfig(**bart)), two),
        "t5": (lambda: T5ForConditionalGeneration(T5Config(**t5)), two),
    }


@pytest.mark.plans_always
@pytest.mark.parametrize("name", [name if name == "llama" else slow(name) for name in models()])
def test_masks_that_mask_nothing_and_others_train_bitwise_in_turn(name: str) -> None:
    make, masks = models()[name]
    torch.manual_seed(0)
    plain = make().train()
    planned = memopt.optimize(copy.deepcopy(plain), 4, precision="fp32", allow={"recompute"}, optimizer=torch.optim.SGD)
    ids = torch.randint(5, 99, (3, 20))
    ones, padded = torch.ones_like(ids), torch.ones_like(ids)
    padded[0, 15:] = 0
    for chosen in [*itertools.product((ones, padded), repeat=len(masks)), (ones,) * len(masks)]:
        batch = {"input_ids": ids, "labels": ids, **dict(zip(masks, chosen, strict=True))}
        losses = [one_step(model, batch) for model in (plain, planned)]
        assert losses[0] == losses[1]
        for (label, left), right in zip(plain.named_parameters(), planned.parameters(), strict=True):
            assert (left.grad is None) == (right.grad is None)
            assert left.grad is None or right.grad is None or torch.equal(left.grad, right.grad), label


def one_step(model: nn.Module, batch: dict[str, Tensor]) -> float:
    model.zero_grad()
    torch.manual_seed(1)
    loss = model(**batch).loss
    loss.backward()
    return float(loss.detach())


@pytest.mark.plans_always
def test_a_mask_that_masks_nothing_takes_no_memory() -> None:
    model = models()["llama"][0]()
    memopt.optimize(model, 4, precision="fp32", allow={"recompute"}, optimizer=torch.optim.SGD)
    ids = torch.randint(5, 99, (1, 256))
    one_step(model, {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)})
    code = memopt.plan_of(model).graphs["captured"][0].code
    assert "scaled_dot_product" in code
    assert "attn_mask" not in code


@pytest.mark.plans_always
def test_hidden_states_are_collected_in_one_region_from_the_first_forward_on() -> None:
    """transformers installs the hooks that collect them in the first forward that asks, behind a lock."""
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).train()
    plain = copy.deepcopy(model)
    tokens = torch.randint(0, 50, (2, LENGTH))
    memopt.optimize(model, 1, precision="fp32", allow={"recompute", "reinplace"}, outputs="all")
    for _ in range(2):
        results = [each(input_ids=tokens, labels=tokens, output_hidden_states=True) for each in (model, plain)]
        for result in results:
            (result.loss + sum(hidden.square().mean() for hidden in result.hidden_states)).backward()
        assert [len(result.hidden_states) for result in results] == [3, 3]
        assert not any("regions" in note for note in memopt.plan_of(model).notes)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
