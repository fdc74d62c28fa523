"""Where the command `memopt` starts: runs a subcommand, and ends with its exit code, or with one sentence on stderr."""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from traceback import walk_tb
from types import FrameType

from memopt.cli.early import BAD_USAGE, DOES_NOT_FIT, FAILED, one_line
from memopt.progress import lines_on_stderr, rare_collections


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with `arguments` (default: those of this process) and return its exit code: 0 if the step fits or
    there was nothing to judge, 1 if the model cannot be planned or a check failed, 2 for bad usage, 3 if no plan fits
    the budget. Ctrl-C ends the process by its signal, which shells report as 130. Long work says on stderr how far it
    has come. With "--debug", failures are raised with their traceback; with "--json" they are printed as JSON too."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    atexit.register(gc.freeze)  # else Python looks for cycles among all objects of torch at exit: a second
    debug = "--debug" in given
    if debug:
        with lines_on_stderr(), rare_collections():
            return _run(given)
    with _ended_by_interrupts():
        try:
            with _quiet(), lines_on_stderr(), rare_collections():
                return _run(given)
        except Exception as error:
            return _report(error, as_json="--json" in given)


def _report(error: Exception, *, as_json: bool) -> int:
    """Write a sentence about an error to stderr, and its figures to stdout if `as_json`; returns the exit code."""
    from memopt.cli.output import failure_figures, in_columns, show_json

    code, sentence = _failure(error)
    sentence = sentence if code == DOES_NOT_FIT else " ".join(sentence.split())
    text = f"memopt: {sentence}"
    print(in_columns(text, sys.stderr) if code == DOES_NOT_FIT else text, file=sys.stderr)
    if as_json:
        show_json(failure_figures(error, code, sentence))
    return code


def _run(arguments: list[str]) -> int:
    # Imported here, so that an interrupt during the imports ends with one sentence too.
    from memopt.cli.commands import memopt

    return int(memopt.main(args=arguments, prog_name="memopt", standalone_mode=False) or 0)


def _failure(error: Exception) -> tuple[int, str]:
    """The exit code for an error, and the text to print: a sentence, perhaps with line breaks, or several lines for a
    `BudgetError`."""
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


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
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
def _ended_by_interrupts() -> Iterator[None]:
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
