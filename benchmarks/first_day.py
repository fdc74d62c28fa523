"""The first minutes on a card: what cannot be known without one, in order of worth, each line written as it comes.

    python -m benchmarks.first_day --minutes 9 --to FOLDER          # again with the same folder: goes on
    .venv-card/bin/python tests/card/stand_in/run.py -m benchmarks.first_day --minutes 9 --to FOLDER

Each subject runs in a process of its own, which ends when the minutes are over; FOLDER/first_day.jsonl then has what it
wrote so far, and the next call begins with what is missing there. Bytes, verdicts and times are those of this card; on
the stand-in for one (docs/card.md) times and verdicts on numbers mean nothing, and each line says so.

The subjects and what their lines say are in `benchmarks/first_day_lines.py`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NEEDED = ("torch", "transformers", "networkx", "numpy", "numba", "scipy", "rich", "click")
DONE = "done"
"""The key of a subject's last line."""


def missing() -> list[str]:
    """The packages that this program needs and this machine lacks."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def known_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of the file that were written completely."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]


def lines_of(subject: str, known: dict[str, dict[str, Any]], small: bool, until: float) -> Iterator[dict[str, Any]]:
    """Yield the lines of a subject, but for the `known` ones, from a process that is ended at the time `until`; where
    it fails, a line with the end of its output."""
    command = [sys.executable, "-m", "benchmarks.first_day", "--subject", subject, "--known", json.dumps(known)]
    command += ["--small"] * small
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        watch = threading.Timer(max(1.0, until - time.monotonic()), child.kill)
        said: list[str] = []
        errors = child.stderr
        listener = threading.Thread(target=lambda: said.extend(errors))
        watch.start()
        listener.start()
        for line in child.stdout:
            if line.startswith("{"):
                yield json.loads(line)
        listener.join()
        watch.cancel()
    if child.returncode and time.monotonic() < until:
        yield {"subject": subject, "key": DONE, "failure": f"ended with {child.returncode}: {''.join(said)[-300:]}"}


def run_all(to: Path, minutes: float, *, small: bool, only: list[str]) -> None:
    """Run the subjects that are not done, in order, until the minutes are over."""
    from benchmarks.first_day_lines import SUBJECTS
    from benchmarks.stamp import stamp

    until = time.monotonic() + 60 * minutes
    to.mkdir(parents=True, exist_ok=True)
    path = to / "first_day.jsonl"
    if not path.exists():
        path.write_text(json.dumps({"subject": "stamp", "key": DONE, **stamp()}) + "\n", encoding="utf-8")
    for subject in only or SUBJECTS:
        known = {line["key"]: line for line in known_lines(path) if line["subject"] == subject}
        if DONE in known:
            continue
        for line in lines_of(subject, known, small, until):
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)
        if time.monotonic() >= until:
            print(f"{minutes:g} minutes are over after {subject}: call again with --to {to} for what is missing")
            return
    print(f"all subjects are in {path}")


def run_subject(subject: str, known: dict[str, dict[str, Any]], *, small: bool) -> None:
    """Print the lines of a subject as JSON."""
    from benchmarks.first_day_lines import STAND_IN, SUBJECTS

    worthless = {"stand_in": True} if STAND_IN else {}
    begin = time.perf_counter()
    for key, figures in SUBJECTS[subject](known, small):
        after = {"after_s": round(time.perf_counter() - begin, 2), "after_cpu_s": round(time.process_time(), 2)}
        print(json.dumps({"subject": subject, "key": key, **figures, **after, **worthless}), flush=True)
    print(json.dumps({"subject": subject, "key": DONE, **worthless}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, help="for all subjects of this call together")
    parser.add_argument("--to", type=Path, default=Path("first_day"), help="the folder of the results")
    parser.add_argument("--only", nargs="+", default=[], help="subjects")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that this program runs")
    parser.add_argument("--subject", help=argparse.SUPPRESS)
    parser.add_argument("--known", type=json.loads, default={}, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if lacking := missing():
        sys.exit(f"this machine lacks {', '.join(lacking)}: pip install {' '.join(lacking)}")
    import torch

    if not torch.cuda.is_available():
        sys.exit("no CUDA card here, and no stand-in for one (tests/card/stand_in/run.py)")
    if chosen.subject:
        run_subject(chosen.subject, chosen.known, small=chosen.small)
    else:
        run_all(chosen.to, chosen.minutes, small=chosen.small, only=chosen.only)


if __name__ == "__main__":
    main()
