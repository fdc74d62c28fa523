"""`import memopt`: the public names, where they come from, and what they load."""

from __future__ import annotations

import compileall
import hashlib
import shutil
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from pkgutil import iter_modules

import pytest

import memopt

ROOT = Path(memopt.__file__).parents[1]
SLOW_TO_IMPORT = (
    "numba",
    "networkx",
    "rich",
    "scipy",
    "sympy",
    "transformers",
    "torch._dynamo",
    "torch._inductor",
    "torch._functorch.aot_autograd",
)


def loaded_by(*statements: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after the last statement and had not before it."""
    script = "; ".join(["import sys", *statements[:-1], "before = set(sys.modules)", statements[-1]])
    script += "; print('\\n'.join(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_import_loads_next_to_nothing() -> None:
    loaded = loaded_by("import memopt")
    assert "torch" not in loaded
    assert not loaded & set(SLOW_TO_IMPORT)
    assert {name for name in loaded if name.startswith(("memopt", "passes"))} == {"memopt"}


def test_the_solver_loads_no_torch() -> None:
    loaded = loaded_by("import memopt.solver")
    assert "torch" not in loaded
    assert "passes" not in loaded


def test_first_use_of_optimize_loads_no_compiler() -> None:
    loaded = loaded_by("import torch, memopt", "memopt.optimize")
    slow = {"torch._dynamo", "torch._inductor", "torch._functorch.aot_autograd", "sympy", "networkx", "transformers"}
    assert not loaded & slow


def test_all_names_are_there() -> None:
    assert sorted(memopt.__all__) == sorted([*memopt._MODULES, "__version__"])
    assert dir(memopt) == sorted(memopt.__all__)
    for name in memopt.__all__:
        assert getattr(memopt, name) is not None
    scope: dict[str, object] = {}
    exec("from memopt import *", scope)
    assert set(memopt.__all__) <= set(scope)


def test_no_module_hides_a_public_name() -> None:
    """A submodule becomes an attribute of memopt once it is imported, and would replace a function of its name."""
    assert not set(memopt.__all__) & {module.name for module in iter_modules(memopt.__path__)}


def test_plan_is_the_function_after_every_import() -> None:
    import_module("memopt.planning.plan")
    import_module("memopt.planning.planner")
    assert memopt.plan.__module__ == "memopt.api"
    assert memopt.frontier.__module__ == "memopt.api"


def test_unknown_names() -> None:
    with pytest.raises(AttributeError, match="module 'memopt' has no attribute 'optimise'"):
        memopt.optimise  # noqa: B018


def test_version() -> None:
    assert memopt.__version__ == version("memopt")


def test_version_of_an_uninstalled_tree(tmp_path: Path) -> None:
    for package in ("memopt", "passes"):
        (tmp_path / package).symlink_to(ROOT / package)
    command = [sys.executable, "-S", "-c", "import memopt; print(memopt.__version__)"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0+unknown"


def test_an_installation_without_sources(tmp_path: Path) -> None:
    """Where only compiled files are installed, all names are there, and plans on disk are those of this version."""
    for package in ("memopt", "passes"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
        assert compileall.compile_dir(tmp_path / package, quiet=1, legacy=True)
    for source in tmp_path.rglob("*.py"):
        source.unlink()
    script = "import memopt; print(memopt.__file__, *sorted(memopt.__all__)); memopt.optimize, memopt.TrainStep"
    script += "; from memopt.planning.job_key import own_digest; print(own_digest())"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    file, *names, digest = done.stdout.split()
    assert Path(file).suffix == ".pyc"
    assert names == sorted(memopt.__all__)
    assert digest != hashlib.sha256().hexdigest(), "the hash of no files"


@pytest.mark.parametrize("module", ["passes.py", "passes/__init__.py"])
def test_another_package_named_passes(tmp_path: Path, module: str) -> None:
    other = tmp_path / module
    other.parent.mkdir(exist_ok=True)
    other.write_text("")
    script = f"import sys; sys.path.insert(1, {str(ROOT)!r}); import memopt"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: memopt needs its own package 'passes' in {ROOT}, but {other.resolve()} comes")
