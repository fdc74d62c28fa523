from __future__ import annotations

import io
import logging
import threading
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
    line, taken, rest = page.getvalue().partition("memopt: capturing took 2.3 s\n")
    assert "memopt: capturing" in line
    assert taken
    assert not rest


def test_a_moment_leaves_none(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    page = terminal(monkeypatch, interactive=True)
    with progress.stage("capturing"):
        clock.now += 0.9
    assert "took" not in page.getvalue()


def test_stages_inside_a_stage_share_its_line(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    page = terminal(monkeypatch, interactive=True)
    with progress.stage("planning"):
        for name in ("tracing", "solving", "tracing", "a moment"):
            with progress.stage(name):
                clock.now += 1.5 if name != "a moment" else 0.1
    assert page.getvalue().endswith("memopt: planning took 4.6 s (tracing 3.0, solving 1.5)\n")
    assert page.getvalue().count("took") == 1
    with progress.stage("again"):
        pass
    assert "memopt: again" in page.getvalue()


def test_how_far_the_outermost_and_the_innermost_stage_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal(monkeypatch, interactive=True)
    with progress.stage("looking") as tell, progress.stage("planning"), progress.stage("solving") as tell_of_solving:
        tell("16 [of 40]")
        tell_of_solving("3 of 5")
        line = progress._own.shown[0][0]
        assert line.tasks[0].description == r"looking: 16 \[of 40] · solving: 3 of 5"
        progress.say("4 of 5")
        assert line.tasks[0].description.endswith("solving: 4 of 5")
    progress.say("nothing runs")


def test_elsewhere_the_log_has_it(monkeypatch: pytest.MonkeyPatch, clock: Clock, logged: list[str]) -> None:
    page = terminal(monkeypatch, interactive=False)
    with progress.stage("planning"):
        with progress.stage("solving"):
            clock.now += 2.0
        with progress.stage("a moment"):
            clock.now += 0.5
    assert page.getvalue() == ""
    assert logged == ["INFO solving took 2.0 s", "DEBUG a moment took 0.5 s", "INFO planning took 2.5 s"]


def test_and_stderr_has_it_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    page = terminal(monkeypatch, interactive=False)
    with progress.lines_on_stderr(), progress.stage("planning"), progress.stage("solving") as tell:
        clock.now += 12.0
        tell("a sentence that is longer than the sixty columns of this page: 3 of 40")
    assert page.getvalue().splitlines() == [
        "memopt: solving: a sentence that is longer than the sixty columns of this page: 3 of 40",
        "memopt: solving took 12.0 s",
        "memopt: planning took 12.0 s",
    ]
    with progress.stage("later"):
        clock.now += 2.0
    assert "later" not in page.getvalue()


def test_the_log_has_it_every_ten_seconds(monkeypatch: pytest.MonkeyPatch, clock: Clock, logged: list[str]) -> None:
    page = terminal(monkeypatch, interactive=False)
    with progress.stage("solving") as tell:
        for number in range(6):
            tell(f"{number} of 6")
            clock.now += 5.0
    assert logged == ["INFO solving: 2 of 6", "INFO solving: 4 of 6", "INFO solving took 30.0 s"]
    assert page.getvalue() == ""


def test_an_error_passes_and_ends_the_stage(monkeypatch: pytest.MonkeyPatch, clock: Clock, logged: list[str]) -> None:
    """A failed stage logs no duration: the error says what happened."""
    page = terminal(monkeypatch, interactive=True)

    def fail() -> None:
        with progress.stage("planning"), progress.stage("solving"):
            clock.now += 2.0
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert logged == []
    assert "took" not in page.getvalue()
    assert progress._own.stages == progress._own.shown == []


def test_threads_have_stages_of_their_own(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    page = terminal(monkeypatch, interactive=True)
    begun, ended = threading.Event(), threading.Event()

    def other() -> None:
        with progress.stage("exporting"):
            begun.set()
            ended.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    assert begun.wait(60)
    with progress.stage("planning"), progress.stage("solving"):
        clock.now += 2.0
        progress.say("half")
    ended.set()
    thread.join()
    assert "planning took 2.0 s (solving 2.0)" in page.getvalue()
    assert "solving took" not in page.getvalue()
    with progress.stage("planning"):
        assert progress._own.shown
