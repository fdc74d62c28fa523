"""Equal blocks are traced once, and the joint graph is that of the whole."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import transformers as hf
from torch import fx, nn

import memopt
from memopt.capture import operators, stamp
from memopt.capture.blocks import find_runs
from memopt.capture.joint import trace_by_inductor
from memopt.capture.operators import Operators, to_differentiate, trace_operators
from memopt.capture.region import RecordedRegion
from memopt.capture.stamp import trace_blocks_once
from memopt.compat.dynamo import marked_changing
from memopt.compat.inductor import draw_seeds_at_once
from memopt.compat.joint_trace import AotTrace, trace_region
from tests.capture.recorded import recorded
from tests.capture.same_graphs import differences
from tests.marks import slow

Made = tuple[nn.Module, Sequence[Any]]
_LAYERS = 7


class Loss(nn.Module):
    """A model of transformers that returns its loss, or the sum of its first output."""

    def __init__(self, model: nn.Module, **given: Any) -> None:
        super().__init__()
        self.model, self.given = model, given
        model.loss_type = "ForCausalLM"

    def forward(self, tokens: torch.Tensor, **more: Any) -> torch.Tensor:
        out = self.model(tokens, **self.given, **more)
        return out.loss if "loss" in out else out[0].float().pow(2).mean()


def tokens() -> torch.Tensor:
    return torch.randint(0, 64, (2, 16))


def gpt2() -> Made:
    config = hf.GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=_LAYERS, n_head=2)
    ids = tokens()
    return Loss(hf.GPT2LMHeadModel(config), labels=ids, use_cache=False), (ids,)


def opt() -> Made:
    config = hf.OPTConfig(
        vocab_size=64, hidden_size=16, ffn_dim=32, num_hidden_layers=_LAYERS, num_attention_heads=2,
        max_position_embeddings=16, word_embed_proj_dim=16, layerdrop=0.0,
    )  # fmt: skip
    ids = tokens()
    return Loss(hf.OPTForCausalLM(config), labels=ids, use_cache=False), (ids,)


def llama(**options: Any) -> Made:
    config = hf.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=_LAYERS, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16, **options,
    )  # fmt: skip
    ids = tokens()
    return Loss(hf.LlamaForCausalLM(config), labels=ids, use_cache=False), (ids,)


def bert() -> Made:
    config = hf.BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=_LAYERS, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16,
    )  # fmt: skip
    return Loss(hf.BertModel(config)), (tokens(),)


def albert() -> Made:
    config = hf.AlbertConfig(
        vocab_size=64, embedding_size=16, hidden_size=16, num_hidden_layers=_LAYERS, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16,
    )  # fmt: skip
    return Loss(hf.AlbertModel(config)), (tokens(),)


def vit() -> Made:
    config = hf.ViTConfig(
        hidden_size=16, num_hidden_layers=_LAYERS, num_attention_heads=2, intermediate_size=32, image_size=16,
        patch_size=4,
    )  # fmt: skip
    return Loss(hf.ViTModel(config)), (torch.randn(2, 3, 16, 16),)


def t5() -> Made:
    config = hf.T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=_LAYERS + 1, num_heads=2, decoder_start_token_id=0
    )
    return Loss(hf.T5ForConditionalGeneration(config), labels=tokens(), use_cache=False), (tokens(),)


def mixtral() -> Made:
    config = hf.MixtralConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=_LAYERS, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, max_position_embeddings=16,
    )  # fmt: skip
    return Loss(hf.MixtralForCausalLM(config), labels=tokens(), use_cache=False), (tokens(),)


def gemma2() -> Made:
    config = hf.Gemma2Config(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=14, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=16, sliding_window=4,
    )  # fmt: skip
    return Loss(hf.Gemma2ForCausalLM(config), labels=tokens(), use_cache=False), (tokens(),)


class Block(nn.Module):
    def __init__(self, dropout: float = 0.1, rank: int = 0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.drop = nn.Dropout(dropout)
        self.low = nn.Sequential(nn.Linear(16, rank, bias=False), nn.Linear(rank, 16, bias=False)) if rank else None

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        y = self.down(self.drop(torch.nn.functional.gelu(self.up(self.norm(x)))))
        y = y if scale is None else y * scale
        return x + y if self.low is None else x + y + self.low(x)


class Blocks(nn.Module):
    def __init__(self, *blocks: nn.Module, checkpoint: bool = False, shared: bool = False) -> None:
        super().__init__()
        self.blocks, self.checkpoint = nn.ModuleList(blocks), checkpoint
        self.first, self.head = nn.Linear(16, 16), nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.ones(16)) if shared else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        scale = None if self.scale is None else torch.sigmoid(self.scale)
        for block in self.blocks:
            if self.checkpoint:
                x = torch.utils.checkpoint.checkpoint(block, x, scale, use_reentrant=False)
            else:
                x = block(x, scale)
        return self.head(x).pow(2).mean()


def blocks(*ranks: int, **options: Any) -> Made:
    return Blocks(*(Block(rank=rank) for rank in ranks), **options), (torch.randn(4, 16),)


def tied() -> Made:
    block = Block()
    return Blocks(*(block for _ in range(8))), (torch.randn(4, 16),)


def frozen() -> Made:
    model = Blocks(*(Block() for _ in range(18)))
    for block in model.blocks[:9]:
        block.requires_grad_(False)
    return model, (torch.randn(4, 16),)


def adapted() -> Made:
    """Nothing before the first block is trained, so that this saves fewer values than the others."""
    model = Blocks(*(Block(rank=2) for _ in range(8))).requires_grad_(False)
    for block in model.blocks:
        block.low.requires_grad_(True)
    return model, (torch.randn(4, 16),)


def llama_adapted() -> Made:
    made, inputs = llama()
    adapters = pytest.importorskip("peft").LoraConfig(r=2, target_modules="all-linear")
    made.model = pytest.importorskip("peft").get_peft_model(made.model, adapters)
    return made, inputs


MODELS: dict[str, Callable[[], Made]] = {
    "gpt2": gpt2,
    "opt": opt,
    "llama": llama,
    "bert": bert,
    "albert": albert,
    "vit": vit,
    "t5": t5,
    "mixtral": mixtral,
    "gemma2": gemma2,
    "dropout": lambda: blocks(*[0] * 8),
    "two kinds": lambda: blocks(*[0] * 7, *[2] * 8, *[0] * 6),
    "every other": lambda: blocks(*[0, 2] * 8),
    "shared": lambda: blocks(*[0] * 9, shared=True),
    "checkpoints": lambda: blocks(*[0] * 8, checkpoint=True, shared=True),
    "tied": tied,
    "frozen": frozen,
    "adapted": adapted,
    "llama adapted": llama_adapted,
}

QUICK = {"dropout", "tied", "shared", "adapted"}
WHOLE = {("checkpoints", "dynamo")}
"""Those that are traced whole: what is in a checkpoint at Dynamo's level tells no operator."""

CAST_ONCE = {"albert", "tied"}
"""Those that are traced whole under autocast: the first block casts weights that all blocks read."""

calls: list[fx.GraphModule] = []


def modules(region: RecordedRegion) -> Iterator[tuple[str, fx.GraphModule]]:
    """The modules that a region is differentiated as: Dynamo's graph, and the operator graph."""
    yield "dynamo", region.graph_module
    yield "operators", to_differentiate(Operators((region.operator_graph().module,)))


def stamped(module: fx.GraphModule, region: RecordedRegion) -> AotTrace:
    """The trace with each block once; what AOTAutograd traced is added to `calls`."""

    def trace(module: fx.GraphModule) -> AotTrace:
        calls.append(module)
        return trace_region(module, region.inputs)

    return trace_blocks_once(trace, module, region.inputs, region.written)


@pytest.mark.parametrize("name", [name if name in QUICK else slow(name) for name in MODELS])
def test_the_joint_graph_is_that_of_the_whole(name: str) -> None:
    model, inputs = MODELS[name]()
    region = recorded(model.train(), *inputs)
    for kind, module in modules(region):
        with region.tracing():
            whole = trace_region(module, region.inputs)
            calls.clear()
            once = stamped(module, region)
        assert whole.module is not None
        assert once.module is not None
        assert not list(differences(whole.module, once.module))
        for fact in ("input_info", "output_info", "subclass_inp_meta", "mutated_inp_runtime_indices"):
            assert str(getattr(whole.state.fw_metadata, fact)) == str(getattr(once.state.fw_metadata, fact))
        if (name, kind) not in WHOLE:
            assert [len(call.graph.nodes) < len(module.graph.nodes) for call in calls] == [True]


@pytest.mark.parametrize("name", [name if name in QUICK else slow(name) for name in MODELS])
def test_inductors_joint_graph_is_that_of_the_whole(name: str) -> None:
    """But for names: inductor numbers the nodes that its passes make."""
    model, inputs = MODELS[name]()
    region = recorded(model.train(), *inputs)
    sizes = []

    def trace(module: fx.GraphModule) -> Any:
        sizes.append(len(module.graph.nodes))
        return trace_by_inductor(module, region.inputs)

    for kind, module in modules(region):
        sizes.clear()
        with region.tracing():
            whole = trace_by_inductor(module, region.inputs)
            once = trace_blocks_once(trace, module, region.inputs, region.written)
        for joint in (whole.module, once.module):
            assert joint is not None
            draw_seeds_at_once(joint)
        assert (whole.forward_outputs, whole.inputs) == (once.forward_outputs, once.inputs)
        found = differences(whole.module, once.module)
        assert not [difference for difference in found if ": name: " not in difference]
        if (name, kind) not in WHOLE:
            assert [size < len(module.graph.nodes) for size in sizes] == [True]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", [name if name in QUICK else slow(name) for name in MODELS])
def test_the_operator_graph_is_that_of_the_whole(name: str, autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = MODELS[name]()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        region = recorded(model.train(), *inputs)
    given = region.graph_module, region.inputs, region.written
    traced: list[int] = []
    trace = operators._trace

    def counted(module: fx.GraphModule, **options: Any) -> Any:
        traced.append(len(module.graph.nodes))
        return trace(module, **options)

    monkeypatch.setattr(operators, "_trace", counted)
    with region.tracing(), region.modes.restored():
        once = trace_operators(*given)
        monkeypatch.setattr(stamp, "find_runs", lambda *_: ())
        whole = trace_operators(*given)
    assert not list(differences(whole, once))
    if name != "checkpoints":
        assert traced[0] < traced[-1]
        assert len(traced) == (3 if autocast and name in CAST_ONCE else 2)


def read_late() -> Made:
    return ReadLate(), (torch.randn(4, 16),)


class ReadLate(Blocks):
    """Blocks whose results are read after the last one, too."""

    def __init__(self) -> None:
        super().__init__(*(Block() for _ in range(8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = [self.first(x)]
        for block in self.blocks:
            states.append(block(states[-1]))
        return self.head(torch.stack(states).sum(0)).pow(2).mean()


def one_constant_differs() -> Made:
    model, inputs = blocks(*[0] * 7)
    model.blocks[3].norm.eps = 1e-3
    return model, inputs


def one_writes() -> Made:
    block = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))
    return nn.Sequential(*(copy.deepcopy(block) for _ in range(8)), Mean()), (torch.randn(4, 16),)


def weights_of_one_storage() -> Made:
    model, inputs = blocks(*[0] * 8)
    storage = torch.randn(8, 32, 16)
    for number, block in enumerate(model.blocks):
        block.up.weight = nn.Parameter(storage[number])
    return model, inputs


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.pow(2).mean()


@pytest.mark.parametrize("make", [read_late, one_constant_differs, one_writes, weights_of_one_storage])
def test_blocks_that_differ_are_traced_whole(make: Callable[[], Made]) -> None:
    model, inputs = make()
    region = recorded(model.train(), *inputs)
    for _, module in modules(region):
        assert not find_runs(module, region.inputs, region.written)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dropout", *map(slow, ("gpt2", "bert", "shared"))])
def test_sizes_may_be_symbols(name: str) -> None:
    """Of GPT-2, arithmetic on the number of rows in the first block serves the others, too."""
    model, inputs = MODELS[name]()
    with marked_changing([(inputs[0], 0)]):
        region = recorded(model.train(), *inputs, symbols=True)
    assert region.changing
    for _, module in modules(region):
        with region.tracing():
            calls.clear()
            whole, once = trace_region(module, region.inputs), stamped(module, region)
        assert [len(call.graph.nodes) < len(module.graph.nodes) for call in calls] == [True]
        # Numbers in names count the arithmetic on sizes that nothing reads, too.
        found = differences(whole.module, once.module)
        assert not [difference for difference in found if ": name: mul_" not in difference]


@pytest.mark.plans_always
@pytest.mark.parametrize("allow", [{"recompute", "reinplace"}, slow(memopt.DEFAULT_LEVERS)], ids=["exact", "default"])
def test_plans_and_bits_are_those_of_the_whole(allow: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def step() -> tuple[str, list[torch.Tensor]]:
        torch.manual_seed(0)
        model, inputs = blocks(*[0] * 8, shared=True)
        memopt.optimize(model.train(), 0.1, example_inputs=inputs, precision="fp32", allow=allow)
        model(*inputs).backward()
        return str(memopt.plan_of(model)), [parameter.grad for parameter in model.parameters()]

    once, gradients = step()
    monkeypatch.setattr(stamp, "find_runs", lambda *_: ())
    whole, expected = step()
    assert once == whole
    assert all(map(torch.equal, gradients, expected))
