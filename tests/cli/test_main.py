"""What the command sets for its own process while a subcommand runs."""

from __future__ import annotations

import gc

import pytest

from memopt.cli import main as entry


@pytest.mark.parametrize("arguments", [["cards"], ["cards", "--debug"], ["no-such-command"]], ids=" ".join)
def test_reference_cycles_are_looked_for_rarely_and_as_before_afterwards(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, run = gc.get_threshold(), entry._run
    seen: list[tuple[int, ...]] = []

    def noting(given: list[str]) -> int:
        seen.append(gc.get_threshold())
        return run(given)

    monkeypatch.setattr(entry, "_run", noting)
    entry.main(arguments)
    assert seen[0] > before
    assert gc.get_threshold() == before


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("memopt ma", ["max-batch", "max-length"]),
        ("memopt plan gpt2 --device rtx-3", ["rtx-3060", "rtx-3090"]),
        ("memopt plan llama4_t", ["llama4_text"]),
        ("memopt plan gpt2 --allow default,fp8_b", ["default,fp8_block"]),
        (
            "memopt plan gpt2 --allow default,-off",
            ["default,-offload_activations", "default,-offload_parameters", "default,-offload_optimizer"],
        ),
        ("memopt plan gpt2 --allow recompute,re", ["recompute,reinplace"]),
        ("memopt report gpt2 --optimizer adam", ["adam", "adamax", "adamw"]),
    ],
)
def test_the_shell_completes(
    words: str, completed: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_MEMOPT_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    with pytest.raises(SystemExit) as ended:
        entry.main([])
    assert ended.value.code == 0
    assert [line.partition(",")[2] for line in capsys.readouterr().out.splitlines()] == completed
