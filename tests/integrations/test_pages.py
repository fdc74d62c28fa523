"""Each page of docs/integrations is a whole program that runs, by the versions that it names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "integrations").glob("*.md"))
PROGRAM = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NEEDS = {"fabric": "lightning", "peft": "torchao", "pipelining": "torch.distributed.pipelining"}
"""The package that a page needs, where its name is another."""
ON_TWO_RANKS = {"pipelining"}
MOST_LINES = 150


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_program_runs(page: Path, tmp_path: Path) -> None:
    pytest.importorskip(NEEDS.get(page.stem, page.stem), exc_type=ImportError)
    (program,) = PROGRAM.findall(page.read_text(encoding="utf-8"))
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    (tmp_path / "train.py").write_text(program, encoding="utf-8")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, "-W", "ignore", *(launcher if page.stem in ON_TWO_RANKS else []), "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=surroundings, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_version_is_the_one_installed(page: Path) -> None:
    named = re.findall(r"(\w+) (\d+\.\d+)", page.read_text(encoding="utf-8").split("```")[0])
    assert named
    for package, version in named:
        try:
            installed = metadata.version(package.lower())
        except metadata.PackageNotFoundError:
            pytest.skip(f"{package} is not installed")
        # Python 3.10 has older libraries than constraints.txt names.
        other = package == "torch" or sys.version_info < (3, 11)
        if other and not installed.startswith(version):
            pytest.skip(f"tested with {package} {version}, and {installed} is installed")
        assert installed.startswith(version), package


def test_each_integration_is_short() -> None:
    for file in (ROOT / "memopt" / "integrations").glob("*.py"):
        assert len(file.read_text(encoding="utf-8").splitlines()) < MOST_LINES, file.name
