"""The program of docs/checkpoints.md, on two ranks and then on four, and on two alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.page_examples import ROOT, marked_blocks

STOPS, ENDS = 3, 5


def losses(program: Path, ranks: int, last: int) -> dict[int, float]:
    """The losses that `torchrun` prints, by the number of the step."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    run = [*command, str(program), str(last)]
    done = subprocess.run(run, capture_output=True, text=True, check=False, env=surroundings, cwd=program.parent)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = (line.split() for line in done.stdout.splitlines() if line[:1].isdigit())
    return {int(number): float(loss) for number, loss in rows}


@pytest.mark.slow
def test_the_run_goes_on_on_four_ranks(tmp_path: Path) -> None:
    (text,) = marked_blocks(ROOT / "docs" / "checkpoints.md")
    one, other = tmp_path / "one" / "train.py", tmp_path / "other" / "train.py"
    for program in (one, other):
        program.parent.mkdir()
        program.write_text(text)
    first, second, alone = losses(one, 2, STOPS), losses(one, 4, ENDS), losses(other, 2, ENDS)
    assert list(first) == [1, 2, 3]
    assert list(second) == [4, 5]
    assert {**first, **second} == pytest.approx(alone, abs=3e-6)
