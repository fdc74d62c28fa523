"""Finds private names of torch outside the modules that are meant to hold them: memopt/compat/ and passes/compat.py.

`python tests/compat/private_names.py [path ...]` prints `file:line: name` for each and exits with 1 if there are any.

A private name is one that begins with a single underscore. Found are imports (`from torch._dynamo import config`),
names read through a torch module (`torch._C._current_graph_task_id`), and private attributes of any object that the
file does not define itself (`node.target._schema`, `getattr(optimizer, "_step_supports_amp_scaling")`), since the
syntax does not show its type. Operators under `torch.ops` are public, whatever their names begin with.
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
    own = _defined_names(tree)
    found = [*_imported(tree), *_read(tree, own), *_named_by_string(tree, own)]
    return sorted({PrivateName(path, line, name) for line, name in found})


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


def _imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The lines and whole names of the private parts of torch that the file imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            prefix = ""
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            prefix = f"{node.module}."
        else:
            continue
        for path in (prefix + alias.name for alias in node.names):
            if _is_torch(path) and any(map(_is_private, path.split("."))):
                yield node.lineno, path


def _read(tree: ast.AST, own: frozenset[str]) -> Iterator[tuple[int, str]]:
    """The lines and names of the private attributes that the file reads, writes or deletes and may not."""
    modules, operators = _torch_modules(tree), _operator_namespaces(tree)
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    inner = {id(node.value) for node in attributes}
    for node in attributes:
        path = _dotted(node) or [""]
        if path[:2] == _OPERATORS or path[0] in operators:
            continue
        if path[0] in modules:
            private = id(node) not in inner and any(map(_is_private, path))
        else:
            private = _is_private(node.attr) and node.attr not in own and node.attr not in ALLOWED
        if private:
            yield node.lineno, ast.unparse(node)


def _dotted(node: ast.expr | None) -> list[str] | None:
    """`torch.nn.functional` as its parts, or None for an expression that is not a dotted name."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value)
        return None if before is None else [*before, node.attr]
    return None


def _named_by_string(tree: ast.AST, own: frozenset[str]) -> Iterator[tuple[int, str]]:
    """The lines and names of private attributes in calls such as `getattr(tensor, "_name")`."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _ACCESSORS):
            continue
        name = node.args[1].value if len(node.args) > 1 and isinstance(node.args[1], ast.Constant) else None
        if isinstance(name, str) and _is_private(name) and name not in ALLOWED and name not in own:
            yield node.lineno, f"{node.func.id}({ast.unparse(node.args[0])}, {name!r})"


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
