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
