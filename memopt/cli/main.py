"""Where the command `memopt` starts: runs a subcommand, and ends with its exit code, or with one sentence on stderr."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Sequence

from memopt.cli.failures import DOES_NOT_FIT, described, ended_by_interrupts, quiet
from memopt.garbage import rare_collections
from memopt.progress import lines_on_stderr


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
    with ended_by_interrupts():
        try:
            with quiet(), lines_on_stderr(), rare_collections():
                return _run(given)
        except Exception as error:
            return _report(error, as_json="--json" in given)


def _report(error: Exception, *, as_json: bool) -> int:
    """Write a sentence about an error to stderr, and its figures to stdout if `as_json`; returns the exit code."""
    from memopt.cli.output import failure_figures, in_columns, show_json

    code, sentence = described(error)
    text = f"memopt: {sentence}"
    print(in_columns(text, sys.stderr) if code == DOES_NOT_FIT else text, file=sys.stderr)
    if as_json:
        show_json(failure_figures(error, code, sentence))
    return code


def _run(arguments: list[str]) -> int:
    # Imported here, so that an interrupt during the imports ends with one sentence too.
    from memopt.cli.commands import memopt

    return int(memopt.main(args=arguments, prog_name="memopt", standalone_mode=False) or 0)
