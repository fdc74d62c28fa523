"""The private names of torch that passes use; symbolic shapes, imported only when they are needed; and how operators
are defined.

A module declares the private names that it uses in `PRIVATE_NAMES`, which `memopt.compat.check` reads;
`tests/compat/private_names.py` finds private names elsewhere.
`torch.fx.experimental.symbolic_shapes` imports sympy, which takes a third of a second.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch import fx


@dataclass(frozen=True)
class Private:
    """A private name of torch, or of another library whose code is replaced, with the versions that have it."""

    module: str
    attributes: str
    """The name within the module: `function`, `Class.method`, or an attribute that the instances of a class have."""
    call: str | None
    """The arguments that it is called with, in words: those by position, then keywords as `name=`. None for what is not
    called, or is only called by its replacement, with the replacement's own arguments."""
    since: tuple[int, int]
    until: tuple[int, int]
    """The first and the last version of torch that has it; in others it is not looked for."""
    needed: bool
    """Whether memopt cannot run without it; if False, there is a warning where it is missing."""

    @property
    def path(self) -> str:
        return f"{self.module}.{self.attributes}"


_NAME = re.compile(r"([\w.]+)(\([^)]*\))?(\?)?")


def private(declared: str) -> tuple[Private, ...]:
    """Declares private names, as one `Private` each. An entry begins on a line of its own with a module and a colon.
    The names follow, each perhaps with the arguments of its call in parentheses and a "?" if memopt can do without it,
    then the versions that have all of them: `torch.nn: Module._apply(self, fn) ._buffers? [since 2.13, until 2.14]`. A
    name that begins with a dot is of the class before it. Attributes that only instances have get a "?", too: they
    cannot be looked up on the class."""
    found = []
    for entry in re.split(r"\n\s*(?=[\w.]+:\s)", declared.strip()):
        module, _, rest = entry.partition(":")
        names, _, facts = rest.partition("[")
        since, until = _version(facts, "since") or (0, 0), _version(facts, "until") or (999, 0)
        owner = ""
        for name, call, optional in _NAME.findall(names):
            path = owner + name if name.startswith(".") else name
            owner = path.rpartition(".")[0]
            arguments = " ".join(call[1:-1].split()) if call else None
            found.append(Private(module, path, arguments, since, until, not optional))
    return tuple(found)


def _version(facts: str, word: str) -> tuple[int, int] | None:
    version = re.search(rf"{word} (\d+)\.(\d+)", facts)
    return (int(version[1]), int(version[2])) if version else None


Replacement: TypeAlias = tuple[Any, Any, Any]
"""(object, name of an attribute, new value) or (dictionary, key, new value)."""


_T = TypeVar("_T")


def in_own_thread(run: Callable[..., _T], *args: Any) -> _T:
    """Returns `run(*args)`, run in a thread of its own. Dispatch modes, autocast, profilers and streams belong to a
    thread: `run` neither sees nor disturbs those of the caller (a meter, the fake mode of a compiler)."""
    with ThreadPoolExecutor(1, "passes") as worker:
        return worker.submit(run, *args).result()


def replaced(owner: Any, name: str, value: Any) -> contextlib.AbstractContextManager[None]:
    """Context in which the attribute `name` of `owner` has another value; then its previous value is restored."""
    return replaced_all([(owner, name, value)])


@contextlib.contextmanager
def replaced_all(replacements: Sequence[Replacement]) -> Iterator[None]:
    """Context in which attributes of objects and items of dictionaries have other values; afterwards the previous
    values are restored."""
    before = [
        (owner, name, owner[name] if isinstance(owner, dict) else getattr(owner, name))
        for owner, name, _ in replacements
    ]
    _set_all(replacements)
    try:
        yield
    finally:
        _set_all(before)


def _set_all(replacements: Sequence[Replacement]) -> None:
    for owner, name, value in replacements:
        if isinstance(owner, dict):
            owner[name] = value
        else:
            setattr(owner, name, value)


PRIVATE_NAMES = private("""
    torch._ops: OpOverload._schema? ._overloadname?
    torch.fx: Graph._graph_namespace? Node._erased?
    torch.fx.graph: _Namespace._obj_to_name?
    torch._dispatch.python: enable_python_dispatcher
    torch.fx.experimental.symbolic_shapes: statically_known_true free_unbacked_symbols GuardOnDataDependentSymNode
    torch.fx.experimental.sym_node: SymNode.has_hint? .hint?
""")


def define_operator(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any] | None = None) -> Any:
    """Defines an operator of the namespace `memopt`, and returns it. `fake` computes its results on fake tensors;
    without it the operator is decomposed into what `kernel` calls where it is differentiated."""
    name = schema.partition("(")[0]
    torch.library.define(f"memopt::{name}", schema.removeprefix(name), tags=(torch.Tag.pt2_compliant_tag,))
    # Autograd's keys stay on within a kernel of this kind.
    key = "CompositeImplicitAutograd" if fake is None else "CompositeExplicitAutograd"
    torch.library.impl(f"memopt::{name}", key, kernel)
    if fake is not None:
        torch.library.register_fake(f"memopt::{name}", fake)
    return getattr(torch.ops.memopt, name).default


def schema_of(operator: Any) -> Any:
    """The schema of an operator overload: its name, arguments and returns, and whether it mutates an argument."""
    return operator._schema


def overload_name(operator: Any) -> str:
    """The overload's name within its packet: "default", "Tensor", "out"."""
    return operator._overloadname


def forget_erased(graph: fx.Graph) -> None:
    """Frees the nodes that were erased from a graph, which its table of names keeps alive, with their metadata. With
    symbolic sizes these take more memory than the rest of the graph. Their names stay reserved."""
    names: dict[Any, str] = graph._graph_namespace._obj_to_name
    for node in [named for named in names if isinstance(named, fx.Node) and named._erased]:
        del names[node]


def enable_python_dispatcher() -> contextlib.AbstractContextManager[None]:
    """Context in which operators run by torch's Python implementation where they have one, as under `make_fx`. Some
    operators accept symbolic sizes only in that implementation."""
    from torch._dispatch.python import enable_python_dispatcher as enable

    return enable()


def erase_all(graph: fx.Graph) -> None:
    """Erases all nodes of a graph of which only the generated code is still needed."""
    for node in reversed(graph.nodes):
        graph.erase_node(node)
    forget_erased(graph)


def size_seen(size: Any) -> int | None:
    """The value that a size, or a number computed from sizes, had at capture; None where it depends on data."""
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else None


def statically_known_true(condition: Any) -> bool:
    """Whether a condition on symbolic sizes holds for all values that they can take, decided without a guard."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true as known

    return known(condition)


def free_unbacked_symbols(value: Any) -> set[Any]:
    """The symbols in a tensor's shape, or in a symbolic number, that depend on data and have no hint."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols as free

    return set(free(value))


def depends_on_data(error: Exception) -> bool:
    """Whether an operator failed on fake tensors because it needed a size that depends on data."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return isinstance(error, GuardOnDataDependentSymNode)
