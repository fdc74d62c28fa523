from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.compat.private_names import ALLOWED, CHECKED, checked_files, main, private_names

ROOT = Path(__file__).parents[2]
HERE = Path("memopt/somewhere.py")


def found(source: str) -> list[str]:
    return [name.name for name in private_names(HERE, source)]


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch._dynamo", "torch._dynamo"),
        ("import torch._dynamo.config as settings", "torch._dynamo.config"),
        ("from torch import _guards", "torch._guards"),
        ("from torch._C import DispatchKey", "torch._C.DispatchKey"),
        ("from torch.fx.graph import _BoxedCodeGen", "torch.fx.graph._BoxedCodeGen"),
        ("from torch.utils._pytree import tree_map as walk", "torch.utils._pytree.tree_map"),
        ("import torch\nkind = torch._ops.OpOverload", "torch._ops.OpOverload"),
        ("import torch as t\nt._C", "t._C"),
        ("from torch.amp import autocast_mode as mode\nmode._enter_autocast()", "mode._enter_autocast"),
        ("def f(node): return node.target._schema", "node.target._schema"),
        ("def f(module): module._compiled_call_impl = None", "module._compiled_call_impl"),
        ("def f(module): del module._compiled_call_impl", "module._compiled_call_impl"),
        ("class M(Module):\n    def f(self): return self._call_impl", "self._call_impl"),
        (
            "def f(x): return getattr(x, '_step_supports_amp_scaling', False)",
            "getattr(x, '_step_supports_amp_scaling')",
        ),
        ("def f(x): setattr(x, '_boxed_call', True)", "setattr(x, '_boxed_call')"),
    ],
)
def test_private_names_are_found(source: str, name: str) -> None:
    assert found(source) == [name]


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ncopy = torch.ops.aten._to_copy.default",
        "import torch\naten = torch.ops.aten\ncopy = aten._to_copy.default",
        "import torch\nfrom typing import Any\naten: Any = torch.ops.aten\ncopy = aten._to_copy",
        "from torch import ops\ncopy = ops.aten._to_copy.default",
        "import torch\ntorch.nn.Module.__call__",
        "class Meter:\n    def __init__(self): self._peak = 0\n    def f(self, other): return self._peak > other._peak",
        "class Plan:\n    def _rows(self): ...\ndef f(plan): return plan._rows()",
        "class Plan:\n    _rows: int = 0\ndef f(plan): return plan._rows",
        "from memopt.solver.replay import _kernel",
        *(f"def f(x): return x.{name}" for name in ALLOWED),
    ],
)
def test_other_names_are_not(source: str) -> None:
    assert found(source) == []


def test_a_finding_says_where() -> None:
    (name,) = private_names(HERE, "import torch\n\n\ntorch._C._set_grad_enabled(False)")
    assert str(name) == "memopt/somewhere.py:4: torch._C._set_grad_enabled"


def test_the_modules_that_hold_them_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    files = set(checked_files())
    assert Path("memopt/meter.py") in files
    assert Path("passes/graph_pass.py") in files
    assert not [path for path in files if "compat" in path.as_posix()]


def test_every_exception_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = "".join(path.read_text(encoding="utf-8") for path in checked_files())
    assert [name for name in ALLOWED if name not in text] == []


def test_the_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "good.py").write_text("import torch\n")
    assert main((str(tmp_path),)) == 0
    assert capsys.readouterr().out == ""
    bad = tmp_path / "bad.py"
    bad.write_text("import torch\n\nfrom torch._C import DispatchKey\n")
    assert main((str(tmp_path),)) == 1
    assert capsys.readouterr().out.splitlines()[0] == f"{bad}:3: torch._C.DispatchKey"


def test_this_tree_has_none() -> None:
    command = [sys.executable, "tests/compat/private_names.py", *CHECKED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
