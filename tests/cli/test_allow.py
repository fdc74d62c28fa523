"""What the text of `--allow` means."""

from __future__ import annotations

import pytest

from memopt.cli.job import _allowed
from memopt.levers.all import DEFAULT_LEVERS

DEFAULT = {str(name) for name in DEFAULT_LEVERS}


@pytest.mark.parametrize("text", ["default,-recompute", "-recompute,default", "default, -recompute, -recompute"])
def test_a_lever_is_taken_away_wherever_it_stands(text: str) -> None:
    assert _allowed(text) == DEFAULT - {"recompute"}


def test_all_levers_by_default_are_taken_away_by_their_name() -> None:
    assert _allowed("recompute,tiles,default,-default") == {"tiles"}


def test_a_name_with_two_signs_is_unknown() -> None:
    with pytest.raises(Exception, match="has no lever '--recompute'"):
        _allowed("default,--recompute")
