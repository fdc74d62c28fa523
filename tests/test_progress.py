from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest
from rich.console import Console

from memopt import progress


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(progress, "time", made)
    return made


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(f"{record.levelname} {record.getMessage()}")

    logger, handler = logging.getLogger("memopt"), Handler()
    logger.addHandler(handler)
    monkeypatch.setattr(logger, "level", logging.DEBUG)
    logger.manager._clear_cache()
    yield lines
    logger.removeHandler(handler)


def terminal(monkeypatch: pytest.MonkeyPatch, *, interactive: bool) -> io.StringIO:
    page = io.StringIO()
    console = Console(file=page, force_terminal=interactive, color_system=None, width=60)
    monkeypatch.setattr(progress, "_console", console)
    return page


def test_on_a_terminal_what_took_long_leaves_a_line(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    page = terminal(monkeypatch, interactive=True)
    with progress.stage("capturing"):
        clock.now += 2.34
    assert "memopt: capturing …" in page.getvalue()
    assert page.getvalue().endswith("memopt: capturing 2.3 s\n")


def test_a_moment_leaves_none(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    page = terminal(monkeypatch, interactive=True)
    with progress.stage("capturing"):
        clock.now += 0.9
    assert "0.9 s" not in page.getvalue()


def test_stages_inside_a_stage_have_no_spinner_of_their_own(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    page = terminal(monkeypatch, interactive=True)
    with progress.stage("planning"), progress.stage("solving"):
        clock.now += 1.5
    assert "solving …" not in page.getvalue()
    assert "memopt: solving 1.5 s\n" in page.getvalue()
    with progress.stage("again"):
        pass
    assert "memopt: again …" in page.getvalue()


def test_elsewhere_the_log_has_it(monkeypatch: pytest.MonkeyPatch, clock: Clock, logged: list[str]) -> None:
    page = terminal(monkeypatch, interactive=False)
    with progress.stage("solving"):
        clock.now += 2.0
    assert page.getvalue() == ""
    assert logged == ["DEBUG solving took 2.0 s"]


def test_how_far_a_stage_has_come(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    page = terminal(monkeypatch, interactive=True)
    with progress.stage("planning"), progress.stage("solving") as tell:
        tell("3 of 40")
        clock.now += 0.2
    assert "memopt: solving … 3 of 40" in page.getvalue(), "beside the spinner of the outermost stage"


def test_the_log_has_it_every_ten_seconds(monkeypatch: pytest.MonkeyPatch, clock: Clock, logged: list[str]) -> None:
    page = terminal(monkeypatch, interactive=False)
    with progress.stage("solving") as tell:
        for number in range(6):
            tell(f"{number} of 6")
            clock.now += 5.0
    assert logged == ["INFO solving: 2 of 6", "INFO solving: 4 of 6", "DEBUG solving took 30.0 s"]
    assert page.getvalue() == ""


def test_an_error_passes_and_ends_the_stage(monkeypatch: pytest.MonkeyPatch, clock: Clock, logged: list[str]) -> None:
    terminal(monkeypatch, interactive=False)
    with pytest.raises(KeyError), progress.stage("solving"):
        raise KeyError
    assert logged == ["DEBUG solving took 0.0 s"]
    assert progress._shown == []
