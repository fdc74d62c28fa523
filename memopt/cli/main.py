"""Where the command `memopt` starts: runs a subcommand, and ends with its exit code, or with one sentence on stderr."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from memopt.cli.failures import end_on_interrupt, report_failure


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with `arguments` (default: those of this process) and return its exit code.

    0: the step fits, or the command had nothing to judge. 1: the model cannot be planned, or a check failed. 2: bad
    usage. 3: no plan fits the budget. 130: interrupted.

    With "--debug" among the arguments, failures are raised with their traceback.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    if not debug:
        end_on_interrupt()
    try:
        # Imported here, so that an interrupt during the imports is answered too.
        from memopt.cli.commands import memopt

        return int(memopt.main(args=given, prog_name="memopt", standalone_mode=False) or 0)
    except Exception as error:
        if debug:
            raise
        return report_failure(error)
