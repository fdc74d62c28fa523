"""The messages and exit codes of the command when something goes wrong."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from traceback import walk_tb
from types import FrameType

FAILED, BAD_USAGE, DOES_NOT_FIT = 1, 2, 3


class UsageError(ValueError):
    """Raised for an argument of the command that cannot be used; the message says which one and what is expected."""


def described(error: Exception) -> tuple[int, str]:
    """The exit code for an error, and the text to print: one sentence, or several lines for a `BudgetError`."""
    code, sentence = _failure(error)
    return code, sentence if code == DOES_NOT_FIT else " ".join(sentence.split())


def _failure(error: Exception) -> tuple[int, str]:
    """As `described`, but sentences may have line breaks."""
    import click

    from memopt.errors import BudgetError, CaptureError

    if isinstance(error, click.UsageError):
        command = error.ctx.command_path if error.ctx else "memopt"
        return BAD_USAGE, f"{error.format_message()} ({command} --help lists what it takes)"
    if isinstance(error, click.ClickException):
        return BAD_USAGE, error.format_message()
    if isinstance(error, BudgetError):
        return DOES_NOT_FIT, str(error)
    if isinstance(error, CaptureError):
        from memopt.capture.dry_run import RUN_UNPLANNED

        return FAILED, str(error).replace(RUN_UNPLANNED, "change the model at that line, or its inputs with --shape")
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    # Messages of errors that a library or the model's own code raised are no sentences for users.
    own = bool(frames) and str(frames[-1].f_globals.get("__name__", "")).startswith("memopt.")
    if own and isinstance(error, (ValueError, TypeError, ModuleNotFoundError)):
        return BAD_USAGE, str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return BAD_USAGE, f"{error.filename}: {error.strerror}"
    return FAILED, f"{one_line(error)} (--debug shows the traceback)"


def one_line(error: BaseException) -> str:
    """An error's type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Context in which other libraries log nothing and warn of nothing: they print tracebacks of errors that the
    command reports itself. memopt's own warnings are printed on one line each."""

    def one_sentence(message: Warning | str, _category: object, filename: str, *_: object, **__: object) -> None:
        if Path(filename).is_relative_to(Path(__file__).parents[1]):
            print(f"memopt: warning: {message}", file=sys.stderr)

    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = one_sentence  # type: ignore[assignment]
            yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def ended_by_interrupts() -> Iterator[None]:
    """Context in which Ctrl-C ends the process at once, with one sentence. A `KeyboardInterrupt` is ignored within a
    finalizer or a callback, and can become another error within an import. Files are written whole or not at all."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, _interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _interrupted(_signal: int, _frame: FrameType | None) -> None:
    show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # a spinner may have hidden it
    os.write(2, f"{show_cursor}\nmemopt: interrupted\n".lstrip("\n").encode())
    # Ended by the signal itself, as shells expect: they report 130.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
