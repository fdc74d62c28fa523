"""Finds private names of torch outside the modules that are meant to hold them: memopt/compat/ and passes/compat.py.

`python tools/check_private_names.py [path ...]` prints `file:line: name` for each and exits with 1 if there are any.

A private name is one that begins with a single underscore. Found are imports (`from torch._dynamo import config`),
names read through a torch module (`torch._C._current_graph_task_id`), and private attributes of any object that the
file does not define itself (`node.target._schema`, `getattr(optimizer, "_step_supports_amp_scaling")`), since an
object's type cannot be told from the syntax. Names of operators under `torch.ops` are public, whatever they begin with.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CHECKED = ("memopt", "passes", "examples")
HOLDERS = (Path("memopt/compat"), Path("passes/compat.py"))

ALLOWED = {
    # Attributes of objects that torch's users, torch's documentation or every model library rely on.
    "_parameters": "the dict of a module's own parameters, which module surgery has used since torch 0.1",
    "_buffers": "the dict of a module's own buffers, as _parameters",
    "_version": "the version counter of a tensor, described in torch's notes on autograd",
    # Not of torch.
    "_fields": "the field names of a named tuple (documented by Python)",
}
"""Private attributes that may be used anywhere, each with the reason."""

_OPERATORS = ["torch", "ops"]
_ACCESSORS = frozenset({"getattr", "setattr", "hasattr", "delattr"})


@dataclass(frozen=True, order=True)
class PrivateName:
    """A use of a private name: where it stands and how it is written there."""

    path: Path
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.name}"


def private_names(path: Path, source: str | None = None) -> list[PrivateName]:
    """The forbidden private names in a file, in order of lines. `source` replaces the file's text."""
    tree = ast.parse(path.read_text(encoding="utf-8") if source is None else source, filename=str(path))
    modules, own, operators = _torch_modules(tree), _defined_names(tree), _operator_namespaces(tree)
    found = [
        PrivateName(path, node.lineno, name)
        for node in ast.walk(tree)
        for name in (*_imported(node), *_read(node, modules, own, operators), *_named_by_string(node, own))
    ]
    return sorted(set(found))


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def _is_torch(module: str) -> bool:
    return module == "torch" or module.startswith("torch.")


def _torch_modules(tree: ast.AST) -> frozenset[str]:
    """The names under which the file has imported torch or parts of it."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update((alias.asname or "torch") for alias in node.names if _is_torch(alias.name))
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and _is_torch(node.module or ""):
            names.update(alias.asname or alias.name for alias in node.names)
    return frozenset(names)


def _operator_namespaces(tree: ast.AST) -> frozenset[str]:
    """The names given to `torch.ops` or a part of it, as by `aten = torch.ops.aten`."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and (_dotted(node.value) or [])[:2] == _OPERATORS:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(target.id for target in targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            names.update(alias.asname or alias.name for alias in node.names if alias.name == "ops")
    return frozenset(names)


def _defined_names(tree: ast.AST) -> frozenset[str]:
    """The private names that the file itself defines: functions, classes, and attributes that it assigns."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return frozenset(names)


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _imported(node: ast.AST) -> Iterator[str]:
    """The private torch names that an import statement takes in, with their whole path."""
    if isinstance(node, ast.Import):
        paths = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.level == 0:
        paths = [f"{node.module}.{alias.name}" for alias in node.names]
    else:
        return
    yield from (path for path in paths if _is_torch(path) and any(map(_is_private, path.split("."))))


def _read(node: ast.AST, modules: frozenset[str], own: frozenset[str], operators: frozenset[str]) -> Iterator[str]:
    """The private attribute that `node` reads or writes, as it is written, if it is a forbidden one."""
    if not isinstance(node, ast.Attribute) or not _is_private(node.attr):
        return
    path = _dotted(node)
    if path is not None and (path[:2] == _OPERATORS or path[0] in operators):
        return
    if (path is not None and path[0] in modules) or (node.attr not in own and node.attr not in ALLOWED):
        yield ast.unparse(node)


def _dotted(node: ast.expr | None) -> list[str] | None:
    """`torch.nn.functional` as its parts, or None for an expression that is not a dotted name."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value)
        return None if before is None else [*before, node.attr]
    return None


def _named_by_string(node: ast.AST, own: frozenset[str]) -> Iterator[str]:
    """The private attribute that a call such as `getattr(tensor, "_name")` asks for."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _ACCESSORS):
        return
    if len(node.args) < 2 or not isinstance(node.args[1], ast.Constant) or not isinstance(node.args[1].value, str):
        return
    name = node.args[1].value
    if _is_private(name) and name not in ALLOWED and name not in own:
        yield f"{node.func.id}({ast.unparse(node.args[0])}, {name!r})"


def checked_files(folders: tuple[str, ...] = CHECKED) -> Iterator[Path]:
    """The Python files in `folders` that may hold no private name."""
    for folder in folders:
        for path in sorted(Path(folder).rglob("*.py")) if Path(folder).is_dir() else [Path(folder)]:
            if not any(path == holder or holder in path.parents for holder in HOLDERS):
                yield path


def main(folders: tuple[str, ...]) -> int:
    """Prints what is found and returns the exit status."""
    found = [name for path in checked_files(folders or CHECKED) for name in private_names(path)]
    for name in found:
        print(name)
    if found:
        print(f"{len(found)} private names of torch outside memopt/compat/ and passes/compat.py: move each there")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(tuple(sys.argv[1:])))
