"""What is wrong on a command line is said at once, without torch; and the names that are known without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from memopt.cli.early import CARDS, LEVERS, OPTIMIZERS, UsageError, check_early, is_cached, model_types
from memopt.cli.huggingface import architecture
from memopt.cli.main import main
from memopt.device import known_hardware
from memopt.levers.all import allowable

ROOT = Path(__file__).parents[2]


def test_the_names_of_cards() -> None:
    assert known_hardware() == CARDS


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "gpt3"),
        ("plan", "BertForNothing"),
        ("plan", "gpt2", "--device", "rtx-9999"),
        ("frontier", "no_such_file.py:make"),
        ("max-batch", "no_such_package:make"),
        ("diff", "elsewhere/config.json"),
        ("plan", "gpt2", "--budget-gb", "lots"),
    ],
    ids=" ".join,
)
def test_it_is_said_before_torch_is_loaded(arguments: tuple[str, ...]) -> None:
    script = (
        "import sys; from memopt.cli.main import main; "
        f"assert main({list(arguments)}) == 2; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


def test_all_that_transformers_has_is_let_through() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    assert set(CONFIG_MAPPING_NAMES) <= set(model_types())
    for name in ("gpt2", "GPT-2", "xlm-roberta", "BertForSequenceClassification", "GPT2LMHeadModel", "ViTModel", ""):
        check_early(name, None, None)


def test_a_model_of_the_hub_from_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import BertConfig

    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert not is_cached("someone/tiny-bert")
    for name in ("someone/tiny-bert", "bert-base-cased"):
        with pytest.raises(UsageError, match="no model is named") as failure:
            check_early(name, None, None)
        assert str(tmp_path) in str(failure.value)
        assert f"run hf download {name} config.json" in str(failure.value)
    BertConfig(num_hidden_layers=1).save_pretrained(tmp_path / "models--someone--tiny-bert" / "snapshots" / "0123")
    check_early("someone/tiny-bert", None, None)
    assert architecture("someone/tiny-bert", {})  # which config it is, huggingface_hub knows when it is built


def test_a_function_that_gives_its_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text(
        "import torch\nfrom torch import nn\n\n"
        "def pair():\n    return nn.Linear(64, 8), torch.zeros(32, 64)\n\n"
        "def with_target():\n    return nn.Linear(64, 8), (torch.zeros(32, 64), torch.zeros(32, dtype=torch.long))\n\n"
        "def odd():\n    return nn.Linear(64, 8), {'input': 3}\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "own.py:with_target", "--loss", "cross_entropy", "--device", "cpu"]) == 0
    assert "Linear, planned for cpu" in capsys.readouterr().out
    assert main(["plan", "own.py:pair", "--loss", "cross_entropy", "--device", "cpu"]) == 2
    assert "--loss needs --shape target" in capsys.readouterr().err
    assert main(["plan", "own.py:odd", "--device", "cpu"]) == 2
    assert "own.py:odd gives int as input 'input'" in capsys.readouterr().err


def test_the_longest_sequence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: dict[str, object] = {}

    def max_length(model: object, budget: float, make_inputs: object, **options: object) -> int:
        asked.update(options, inputs=make_inputs(96))  # type: ignore[operator]
        return 96

    monkeypatch.setattr("memopt.max_length", max_length)
    settings = [text for one in ("n_layer=1", "n_embd=32", "n_head=2", "n_positions=100") for text in ("--set", one)]
    arguments = ["max-length", "gpt2", *settings, "--shape", "input_ids=4x64", "--budget-gb", "1", "--multiple-of", "8"]
    assert main(arguments) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert asked["at_most"] == 100
    assert {name: tuple(one.shape) for name, one in asked["inputs"].items()} == {  # type: ignore[attr-defined]
        "input_ids": (4, 96),
        "labels": (4, 96),
    }
    assert "a length of 96 fits within 1 GB, and its configuration allows no more positions" in printed
    assert main([*arguments, "--at-most", "200"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "the largest length within 1 GB is 96 (input_ids=4x96:int64, labels=4x96:int64)" in printed
    linear = ["torch.nn:Linear", "--set", "in_features=8", "--set", "out_features=8"]
    assert main(["max-length", *linear, "--shape", "4"]) == 2
    assert "the first input has no length" in capsys.readouterr().err


def test_the_names_of_levers_and_optimizers() -> None:
    assert allowable() == LEVERS
    found = {name.lower() for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
    assert set(OPTIMIZERS) - {"none"} == found - {"optimizer", "lbfgs"}
