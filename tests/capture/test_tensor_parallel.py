"""One card's part of a model under tensor and sequence parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn
from transformers import LlamaConfig, LlamaForCausalLM

from examples.models.cluster import CardStep, Job
from examples.models.llama import TP_PLAN, Llama, LlamaSize, on_meta
from memopt.capture.tensor_parallel import (
    GATHER_SHARDS,
    SCATTER_SUMS,
    _with_first,
    is_exchange,
    meta_copy,
    part_of_one_card,
    styles_of,
)
from memopt.device.time_model import node_flops

SMALL = LlamaSize(256, 2, 8, 4, 704, words=4096)
LENGTH = 512


def graph_of(tp: int) -> fx.GraphModule:
    mesh = {"dp_shard": 8, "tp": tp}
    (region,) = CardStep.of(Job(SMALL, mesh, 2, LENGTH)).priced.traced.regions
    return region.module


def flops_of(graph: fx.GraphModule) -> int:
    return sum(node_flops(node) for node in graph.graph.nodes if node.op == "call_function")


@pytest.fixture(scope="module")
def parts() -> dict[int, fx.GraphModule]:
    return {tp: graph_of(tp) for tp in (1, 2, 4)}


@pytest.mark.slow
def test_the_work_is_divided(parts: dict[int, fx.GraphModule]) -> None:
    """All products and all attention are split: nothing that counts operations is done twice."""
    whole = flops_of(parts[1])
    assert whole > 0
    assert {tp: tp * flops_of(graph) for tp, graph in parts.items()} == dict.fromkeys(parts, whole)


def test_norms_run_on_parts_of_the_sequence(parts: dict[int, fx.GraphModule]) -> None:
    roots = [node for node in parts[4].graph.nodes if str(node.target).startswith("aten.rsqrt")]
    assert len(roots) == 2 * SMALL.layers + 1
    assert {tuple(node.meta["val"].shape) for node in roots} == {(2, LENGTH // 4, 1)}


def test_every_exchange_has_its_mirror_in_the_backward(parts: dict[int, fx.GraphModule]) -> None:
    """Each block gathers and scatters twice, the head gathers once, and a gradient goes the other way."""
    calls = [node.target for node in parts[2].graph.nodes if node.op == "call_function"]
    assert not any(is_exchange(node) for node in parts[1].graph.nodes)
    blocks = 2 * SMALL.layers
    assert calls.count(GATHER_SHARDS.default) == blocks + 1 + blocks
    assert calls.count(SCATTER_SUMS.default) == blocks + blocks + 1


def test_shapes_are_local_and_the_model_stays_as_it_was() -> None:
    model = on_meta(SMALL)
    before = {name: (id(parameter), parameter.shape) for name, parameter in model.named_parameters()}
    part: Any = part_of_one_card(meta_copy(model), 4, styles_of(model, 4, TP_PLAN))
    block = part.layers[0]
    assert block.attention.q.weight.shape == (64, 256)
    assert block.attention.k.weight.shape == (32, 256)
    assert block.attention.out.weight.shape == (256, 64)
    assert block.mlp.down.weight.shape == (256, 176)
    assert block.mlp_norm.weight.shape == (256,)
    assert part.head.weight.shape == (1024, 256)
    assert part.embedding.weight.shape == (1024, 256)
    assert {name: (id(parameter), parameter.shape) for name, parameter in model.named_parameters()} == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_biases_of_rows_stay_whole() -> None:
    model = nn.ModuleDict({"up": nn.Linear(8, 16), "down": nn.Linear(16, 8)})
    part: Any = part_of_one_card(meta_copy(model), 2, {"up": "colwise", "down": "rowwise"})
    assert part["up"].bias.shape == (8,)
    assert part["down"].bias.shape == (8,)


def transformers_llama(**changes: Any) -> nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(vocab_size=512, **{**sizes, "num_key_value_heads": 2, **changes}))


def test_models_of_transformers_bring_their_plan() -> None:
    styles = styles_of(transformers_llama(), 2, None)
    assert styles["model.layers.1.self_attn.o_proj"] == "rowwise"
    assert styles["lm_head"] == "colwise_gather_output"


@pytest.mark.parametrize(
    ("cards", "plan", "text"),
    [
        (4, None, "'tp': 4 in mesh does not divide num_key_value_heads=2"),
        (3, None, "'tp': 3 in mesh does not divide the 512 rows of lm_head.weight"),
        (2, {"layers.*.wq": "colwise"}, "tp_plan names 'layers.*.wq', which no module of LlamaForCausalLM matches"),
        (2, {"lm_head": "columns"}, "unknown style 'columns' for 'lm_head' in tp_plan; known are colwise"),
        (2, {"model.norm": "colwise"}, "tp_plan splits model.norm, a LlamaRMSNorm"),
    ],
)
def test_what_cannot_be_split_is_refused(cards: int, plan: Any, text: str) -> None:
    with pytest.raises(ValueError, match=r"^") as refused:
        styles_of(transformers_llama(), cards, plan)
    assert text in str(refused.value)


def test_a_model_without_a_plan_is_refused() -> None:
    with pytest.raises(ValueError, match="Llama does not say how 'tp' in mesh splits its layers; give tp_plan"):
        styles_of(Llama(SMALL.of(1)), 2, None)


class Called(nn.Module):
    """A block whose hidden states are not its first argument."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"up": nn.Linear(8, 16), "down": nn.Linear(16, 8)})])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs


def test_hidden_states_are_what_is_exchanged() -> None:
    ids, hidden, mask = torch.zeros(2, 4, dtype=torch.long), torch.zeros(2, 4, 8), None
    double = lambda value: torch.cat([value, value], 1)  # noqa: E731
    for args, kwargs in [((hidden, hidden), {}), ((mask, ids, hidden), {"ids": ids}), ((ids,), {"x": hidden})]:
        changed, named = _with_first(Called(), args, kwargs, double)
        before, after = [*args, *kwargs.values()], [*changed, *named.values()]
        first = next(number for number, one in enumerate(before) if one is hidden)
        assert [one is other for one, other in zip(before, after, strict=True)] == [
            number != first for number in range(len(before))
        ]
        assert after[first].shape == (2, 8, 8)
        assert list(named) == list(kwargs)
    with pytest.raises(ValueError, match="that Called is called with, but no argument is a floating-point tensor"):
        _with_first(Called(), (ids, mask), {}, double)
