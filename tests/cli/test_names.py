"""Names of cards, models and shapes on the command line, and what commands print for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memopt import DEFAULT_LEVERS
from memopt.cli.early import UsageError
from memopt.cli.huggingface import architecture
from memopt.cli.job import Job
from memopt.cli.kept import planned
from memopt.cli.main import main
from memopt.cli.names import budget_gb, card_named, model_factory, on_meta, with_lora
from memopt.cli.shapes import Shape, highest_values, parse_shapes, with_defaults

ROOT = Path(__file__).parents[2]
TINY = ("n_layer=1", "n_embd=32", "n_head=2", "vocab_size=128")


@pytest.mark.parametrize("name", ["rtx-4090", "RTX 4090", "rtx4090", "4090", "NVIDIA GeForce RTX 4090"])
def test_cards_by_forgiving_names(name: str) -> None:
    assert card_named(name) == "rtx-4090"


def test_the_budget_is_the_card_s_memory_unless_told() -> None:
    assert budget_gb(None, "rtx-4090") == 24
    assert [budget_gb(text, "h100") for text in ("8", "7.5", "8GB", ".5 GiB")] == [8, 7.5, 8, 0.5]


def test_shapes() -> None:
    assert parse_shapes(["input_ids=4x512", "x=2x3:bf16"]) == {
        "input_ids": Shape((4, 512), torch.int64),
        "x": Shape((2, 3), torch.bfloat16),
    }
    assert list(parse_shapes(["4x8", "target=4:int64"])) == ["0", "target"]


@pytest.mark.parametrize(
    ("name", "kind", "shapes"),
    [
        ("gpt2", "GPT2LMHeadModel", {"input_ids": (8, 512), "labels": (8, 512)}),
        ("GPT-2", "GPT2LMHeadModel", {"input_ids": (8, 512), "labels": (8, 512)}),
        ("llama", "LlamaForCausalLM", {"input_ids": (8, 512), "labels": (8, 512)}),
        ("bert", "BertForMaskedLM", {"input_ids": (8, 512), "labels": (8, 512)}),
        ("BertForSequenceClassification", "BertForSequenceClassification", {"input_ids": (8, 512), "labels": (8,)}),
        ("t5", "T5ForConditionalGeneration", {"input_ids": (8, 512), "labels": (8, 512)}),
        ("vit", "ViTForImageClassification", {"pixel_values": (8, 3, 224, 224), "labels": (8,)}),
        ("whisper", "WhisperForConditionalGeneration", {"input_features": (8, 80, 3000), "labels": (8, 32)}),
    ],
)
def test_architectures_and_their_inputs(name: str, kind: str, shapes: dict[str, tuple[int, ...]]) -> None:
    """At full size, which takes no memory."""
    model, _ = on_meta(model_factory(name, ()))
    assert type(model).__name__ == kind
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert {key: shape.sizes for key, shape in with_defaults(model, {}).items()} == shapes


def test_a_configuration_file(tmp_path: Path) -> None:
    from transformers import GPT2Config

    GPT2Config(n_layer=3, n_embd=32, n_head=2, architectures=["GPT2ForSequenceClassification"]).save_pretrained(
        tmp_path
    )
    for name in (tmp_path, tmp_path / "config.json"):
        model, _ = on_meta(model_factory(str(name), ["num_labels=5"]))
        assert type(model).__name__ == "GPT2ForSequenceClassification"
        shapes = with_defaults(model, parse_shapes(["input_ids=2x16"]))
        assert highest_values(model, shapes) == {"input_ids": 50257, "labels": 5}


def test_a_model_that_cannot_be_built_without_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "looks_at_values.py"
    file.write_text(
        "import torch\n\ndef make():\n    return torch.nn.Linear(int(torch.ones(3).sum()), 2)\n", encoding="utf-8"
    )
    model, _ = on_meta(model_factory(str(file), ()))
    assert isinstance(model, nn.Linear)
    assert model.weight.is_meta
    assert model.in_features == 3
    assert "built on the CPU" in capsys.readouterr().err


def test_levers_to_add_and_to_take_away() -> None:
    assert Job("gpt2", allow="default,fp8,-recompute").options()["allow"] == (DEFAULT_LEVERS | {"fp8"}) - {"recompute"}


@pytest.mark.slow
def test_figures_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    settings = [text for one in TINY for text in ("--set", one)]
    arguments = ["gpt2", *settings, "--shape", "input_ids=2x32", "--device", "cpu", "--budget-gb", "1", "--json"]
    assert main(["plan", *arguments]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["fits"]
    assert figures["peak_gb"] <= figures["budget_gb"] == 1
    assert sum(figures["bytes_at_the_peak"]["planned"].values()) == round(figures["peak_gb"] * 1024**3)
    assert main(["explain", *arguments, "--op", "h.0.mlp.c_fc"]) == 0
    ops = json.loads(capsys.readouterr().out)
    one = next(op for op in ops if "addmm" in op["operator"])
    assert main(["explain", *arguments, "--op", one["op"]]) == 0
    story = json.loads(capsys.readouterr().out)
    assert story["fate"] == one["fate"]
    assert story["bytes"] == one["bytes"]
    assert story["value"].endswith("64x128")
    assert main(["explain", *arguments[:-1], "--op", "h.0.mlp.c_fc"]) == 0
    text = capsys.readouterr().out
    assert f"{len(ops)} ops of 'h.0.mlp.c_fc'" in text
    assert f"{one['op']}, planned for cpu" in text, "the story of the product of a linear layer"


@pytest.mark.parametrize(("largest", "capped"), [(24, True), (20, True), (16, False)])
def test_a_cap_is_not_called_the_largest_batch(
    largest: int, capped: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memopt.max_batch", lambda *args, **options: largest)
    settings = [text for one in TINY for text in ("--set", one)]
    arguments = ["max-batch", "gpt2", *settings, "--budget-gb", "1", "--at-most", "24", "--multiple-of", "8"]
    arguments[-1] = "4" if largest == 16 else "8"
    assert main(arguments) == 0
    assert ("more may fit" in capsys.readouterr().out) == capped
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["limited_by_at_most"] == capped


def test_help_loads_no_torch_and_memopt_no_command_line() -> None:
    script = "import sys, memopt; print(sorted(name for name in sys.modules if name.startswith(('memopt.', 'click'))))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
    script = "import sys; from memopt.cli.main import main; main(['plan', '--help']); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)


TINY_LLAMA = ("num_hidden_layers=2", "hidden_size=64", "intermediate_size=128", "num_attention_heads=4", "vocab_size=9")


def test_lora_freezes_the_model_and_adapts_its_linear_layers() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        model, _ = on_meta(with_lora(model_factory("llama", TINY_LLAMA), 4, dtype))
        assert type(model).__name__ == "LlamaForCausalLM"
        trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
        assert len(trained) == 2 * 2 * 7
        assert all("lora_" in name and one.dtype is torch.float32 for name, one in trained.items())
        assert {one.dtype for one in model.parameters() if not one.requires_grad} == {dtype}
        assert {one.device.type for one in model.parameters()} == {"meta"}


def test_lora_leaves_stacked_experts_and_the_head_alone() -> None:
    sizes = (*TINY_LLAMA, "num_key_value_heads=2", "num_experts=4", "num_experts_per_tok=2", "moe_intermediate_size=8")
    model, _ = on_meta(with_lora(model_factory("qwen3_moe", sizes), 4, torch.bfloat16))
    adapted = {
        name.rpartition(".lora_")[0].rpartition(".")[2] for name, one in model.named_parameters() if one.requires_grad
    }
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert not model.config.use_cache


def test_four_bits_are_those_of_the_frozen_linear_layers() -> None:
    pytest.importorskip("bitsandbytes")
    sizes = (*TINY_LLAMA[:-1], "vocab_size=64", "tie_word_embeddings=false")
    model, _ = on_meta(with_lora(model_factory("llama", sizes), 4, torch.bfloat16, packed=True))
    packed = {name: one for name, one in model.named_parameters() if one.dtype is torch.uint8}
    assert len(packed) == 2 * 7
    assert sum(one.nbytes for one in packed.values()) == 2 * (4 * 64 * 64 + 3 * 64 * 128) // 2
    assert model.lm_head.weight.dtype is torch.bfloat16
    with pytest.raises(UsageError, match="--bits needs --lora"):
        Job("llama", bits="4").prepare()


@pytest.mark.slow
def test_a_base_of_four_bits_is_planned_packed() -> None:
    """A card's plan counts packed weights and their scales, and room for the one that a product unpacks."""
    pytest.importorskip("bitsandbytes")
    wide = ("num_hidden_layers=3", "hidden_size=1024", "intermediate_size=4096", "num_attention_heads=8")
    job = Job("llama", ("input_ids=1x64:int64",), (*wide, "vocab_size=99"), device="rtx-4090", lora=4, effort="fast")
    sixteen, four = (planned(replace(job, bits=bits, budget_gb="4")).plan.account.parameters for bits in (None, "4"))
    weights = 3 * (4 * 1024**2 + 3 * 1024 * 4096)
    assert sixteen - four == pytest.approx(weights * (2 - 0.5 - 1 / 64 - 4 / 64 / 256), rel=1e-3)


def test_host_memory_lets_frozen_parameters_leave_the_card() -> None:
    options = Job("llama", host_gb="64").options()
    assert (options["host_gb"], options["backend"]) == (64, "auto")
    assert options["allow"] == DEFAULT_LEVERS | {"offload_parameters"}
    told = Job("llama", host_gb="64", allow="recompute").options()
    assert (told["allow"], told["backend"]) == ({"recompute"}, "auto")


@pytest.mark.slow
def test_a_lora_is_planned_with_less_than_its_base() -> None:
    base = 2 * 3 * (4 * 1024**2 + 3 * 1024 * 4096)
    wide = (
        "num_hidden_layers=3", "hidden_size=1024", "intermediate_size=4096", "num_attention_heads=8", "vocab_size=99"
    )  # fmt: skip
    job = Job("llama", ("input_ids=1x64:int64",), wide, device="rtx-4090", lora=4, host_gb="4", effort="fast")
    plan = planned(replace(job, budget_gb=f"{0.53 + 0.6 * base / 2**30:.3f}")).plan
    assert plan.account.parameters < 0.6 * base
    assert plan.hosted_bytes > 0.4 * base


def test_a_file_is_loaded_as_it_stands_at_each_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it has the size and the second of its last change that it had when it was loaded before."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "edited_program.py"
    for size in (16, 32):
        file.write_text(f"from torch import nn\n\ndef make():\n    return nn.Linear({size}, 4), None\n")
        os.utime(file, (1e9, 1e9))
        model, _ = model_factory(f"{file}:make", ())()
        assert model.in_features == size


def test_weights_are_tied_where_nothing_is_initialized(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.0 ties weights where it initializes them, which it does not on "meta"."""
    monkeypatch.setattr("transformers.PreTrainedModel.init_weights", lambda model: None)
    with torch.device("meta"):
        model: Any = architecture("gpt2", {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 64})()
    assert model.lm_head.weight is model.transformer.wte.weight


def test_a_transformers_that_cannot_be_imported_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "transformers.py").write_text("import its_dependency")
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match=r"need transformers, whose import fails here .*No module named 'its_depend"):
        architecture("gpt2", {})
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match=r"need transformers: pip install 'memopt\[transformers\]'"):
        architecture("gpt2", {})
