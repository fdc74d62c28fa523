"""What an installation needs and brings: without a C compiler, without numba, without scipy."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import memopt

ROOT = Path(memopt.__file__).parents[1]
NOT_LOADED = """
import sys
for module in {blocked}:
    sys.modules[module] = None
import torch, memopt
from torch import nn
with torch.device("meta"):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)) for _ in range(10))).train()
    batch = torch.zeros(512, 64), torch.zeros(512, 64)
try:
    memopt.plan(model, 1e-4, batch, loss_fn=nn.functional.mse_loss, precision="fp32")
except memopt.BudgetError as refused:
    budget = refused.smallest_gb * 1.1
plan = memopt.plan(model, budget, batch, loss_fn=nn.functional.mse_loss, precision="fp32")
print(plan.predicted_peak_gb, plan.added_time, plan.bound, plan.method, plan.notes)
assert not {{"numba", "scipy", "llvmlite"}} & {{name for name, module in sys.modules.items() if module}}
"""


def project() -> dict[str, Any]:
    if not (ROOT / "pyproject.toml").exists():
        pytest.skip("not a source tree")
    return pytest.importorskip("tomllib").loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_what_an_installation_needs() -> None:
    metadata = project()["project"]
    names = {requirement.split(">")[0] for requirement in metadata["dependencies"]}
    assert names == {"torch", "click", "networkx", "numpy", "rich"}
    extras = metadata["optional-dependencies"]
    assert extras["numba"] == [one for one in extras["dev"] if one.startswith("numba")]
    assert metadata["authors"]
    python = [one.rpartition(" ")[2] for one in metadata["classifiers"] if "Python :: 3." in one]
    assert python == ["3.10", "3.11", "3.12", "3.13"]


def test_a_build_without_a_compiler_goes_on_without_the_kernels(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    project()
    environment = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX")}
    done = subprocess.run(
        [sys.executable, str(ROOT / "setup.py"), "--quiet", "--name"],
        cwd=ROOT,
        env={**environment, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout.split()) == (0, ["memopt"]), done.stderr
    assert "memopt: the solvers' kernels are not built (" in done.stderr
    assert "pip install 'memopt[numba]'" in done.stderr


@pytest.mark.parametrize("missing", ["numba", "numpy"])
def test_a_build_without(missing: str, tmp_path: Path) -> None:
    project()
    (tmp_path / f"{missing}.py").write_text("raise RuntimeError('too new')")
    done = subprocess.run(
        [sys.executable, str(ROOT / "setup.py"), "--quiet", "--name"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout.split()) == (0, ["memopt"]), done.stderr
    assert "(too new)" in done.stderr


def planned_without(*modules: str) -> str:
    command = [sys.executable, "-c", NOT_LOADED.format(blocked=modules)]
    environment = {**os.environ, "MEMOPT_CACHE": "0"}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment, cwd=ROOT).stdout


@pytest.mark.slow
def test_plans_without_numba_and_scipy_are_the_same() -> None:
    plain = planned_without("numba", "scipy", "memopt.solver._kernels")
    assert plain == planned_without("numba", "scipy")


def test_solvers_that_nothing_compiles_warn_once() -> None:
    script = (
        "import sys, warnings; sys.modules['numba'] = sys.modules['memopt.solver._kernels'] = None\n"
        "from memopt.solver import warm_up\n"
        "with warnings.catch_warnings(record=True) as said:\n"
        "    warnings.simplefilter('always'); warm_up(); warm_up()\n"
        "print(*(str(one.message) for one in said), sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    (line,) = done.stdout.splitlines()
    assert line.startswith("the solvers run as plain Python")
    assert line.endswith("pip install 'memopt[numba]'")


@pytest.mark.slow
def test_the_source_distribution_has_the_tests_and_the_documentation(tmp_path: Path) -> None:
    project()
    tree = tmp_path / "tree"
    skipped = shutil.ignore_patterns(".*", "site", "build", "dist", "*.egg-info", "*.so", "__pycache__")
    shutil.copytree(ROOT, tree, ignore=skipped)
    shutil.copytree(ROOT / ".ci", tree / ".ci")
    command = [sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", str(tmp_path), "--formats", "gztar"]
    environment = {**os.environ, "PATH": "", "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run(command, cwd=tree, check=True, capture_output=True, env=environment)
    shutil.unpack_archive(next(tmp_path.glob("*.tar.gz")), tmp_path / "unpacked")
    (made,) = (tmp_path / "unpacked").iterdir()
    for folder in ("memopt", "passes", "tests", "docs", "examples", "benchmarks"):
        wanted = {file.relative_to(tree) for file in (tree / folder).rglob("*") if file.is_file()}
        assert wanted <= {file.relative_to(made) for file in made.rglob("*")}, folder
    assert (made / "CHANGELOG.md").exists()
