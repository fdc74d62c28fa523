"""`memopt diff` between two budgets, and what `memopt explain --op` says of an op."""

from __future__ import annotations

import json
from typing import Any

import pytest

from memopt.cli.main import main
from tests.marks import slow

SMALL = [part for one in ("n_layer=1", "n_embd=64", "n_head=2", "vocab_size=128") for part in ("--set", one)]
MODEL = ["gpt2", *SMALL, "--shape", "input_ids=4x64"]
EXACT = ["--device", "cpu", "--precision", "fp32", "--allow", "recompute"]


def printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    """Return the figures that a command prints as JSON."""
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def story(op: str, options: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    """Return the story of an op; of the first where several are meant."""
    found = printed(["explain", *MODEL, *options, "--op", op], capsys)
    return printed(["explain", *MODEL, *options, "--op", found[0]["op"]], capsys) if isinstance(found, list) else found


@pytest.mark.slow
def test_two_budgets(capsys: pytest.CaptureFixture[str]) -> None:
    roomy = printed(["plan", *MODEL, *EXACT, "--budget-gb", "1"], capsys)
    tight = str(0.85 * roomy["peak_gb"])
    changes = printed(["diff", *MODEL, *EXACT, "--budget-gb", tight, "--against-budget-gb", "1"], capsys)["changes"]
    alone = printed(["diff", *MODEL, *EXACT, "--budget-gb", tight], capsys)["changes"]
    recomputed = {change["op"] for change in alone if change["kind"] == "recomputed"}
    assert recomputed
    assert {change["op"] for change in changes} == recomputed
    assert {change["sign"] for change in changes} == {"+"}
    back = printed(["diff", *MODEL, *EXACT, "--budget-gb", "1", "--against-budget-gb", tight], capsys)["changes"]
    assert {change["sign"] for change in back} == {"-"}
    lines = ["diff", *MODEL, *EXACT, "--budget-gb", tight, "--against-budget-gb", "1", "--stage", "scheduled"]
    assert main(lines) == 0
    added = {line for line in capsys.readouterr().out.splitlines() if line.startswith("+")}
    assert added
    assert main([*lines, "--order"]) == 0
    assert added < {line for line in capsys.readouterr().out.splitlines() if line.startswith("+")}


@pytest.mark.slow
def test_the_other_budget_is_read_as_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", *MODEL, *EXACT, "--budget-gb", "1", "--against-budget-gb", "lots"]) == 2
    assert "--against-budget-gb takes a number of gigabytes" in capsys.readouterr().err
    assert main(["diff", *MODEL, *EXACT, "--budget-gb", "1", "--against-budget-gb", "0.0001"]) == 3
    assert "a budget of 0.0001 GB is too small" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("op", "dtype", "reason"),
    [
        slow("addmm", "bfloat16", "addmm in bf16: as under torch.autocast"),
        slow("native_layer_norm", "float32", "layer_norm in fp32: as under torch.autocast"),
        slow("tanh", "bfloat16", "tanh in bf16: elementwise, operands in 16 bits"),
        ("tanh_backward", "bfloat16", "the gradient of tanh in bf16: elementwise, operands in 16 bits"),
    ],
)
def test_the_reason_for_a_dtype(op: str, dtype: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--device", "h100", "--budget-gb", "6", "--precision", "bf16", "--backend", "aten"]
    told = story(op, options, capsys)
    assert told["value"].split()[0] == dtype
    assert told["why_dtype"] == reason


def test_the_reason_for_a_dtype_that_nobody_chose(capsys: pytest.CaptureFixture[str]) -> None:
    told = story("addmm", [*EXACT, "--budget-gb", "1"], capsys)
    assert told["value"].split()[0] == "float32"
    assert told["why_dtype"] == "the dtype of the model's code: this plan chooses no dtypes"


def test_the_reason_for_a_cast(capsys: pytest.CaptureFixture[str]) -> None:
    told = story(
        "_to_copy", ["--device", "h100", "--budget-gb", "6", "--precision", "bf16", "--backend", "aten"], capsys
    )
    assert told["why_dtype"].startswith("a cast for ")
    assert told["read_by"][0] in told["why_dtype"]
