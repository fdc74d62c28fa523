"""Runs a benchmark in further processes of its own, and reads the records that these print: JSON, one on a line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any


def record_of(benchmark: str, *arguments: str, limit_seconds: float | None = None, **variables: str) -> Any:
    """The record in the last line that `python -m benchmarks.BENCHMARK` prints with these arguments, and with
    `variables` added to the environment. Raises `CalledProcessError` where it fails, and `TimeoutExpired` at the
    limit."""
    command, surroundings = _command(benchmark, arguments), {**os.environ, **variables}
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env=surroundings, timeout=limit_seconds
    )
    return json.loads(done.stdout.splitlines()[-1])


def records_of(benchmark: str, *arguments: str, **variables: str) -> Iterator[dict[str, Any]]:
    """The records among the lines that `python -m benchmarks.BENCHMARK` prints, as they come; see `record_of`. Where
    the process fails, a line on stderr says so after the last one."""
    command, surroundings = _command(benchmark, arguments), {**os.environ, **variables}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=surroundings) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("{"):  # libraries print, too
                yield json.loads(line)
    if child.returncode:
        print(f"{benchmark} {' '.join(arguments)} ended with {child.returncode}", file=sys.stderr)


def _command(benchmark: str, arguments: tuple[str, ...]) -> list[str]:
    return [sys.executable, "-m", f"benchmarks.{benchmark}", *arguments]
