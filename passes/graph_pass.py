"""The base class of passes: frozen values that take a graph module, return another one, and check it."""

import abc
import contextlib
import copy
import re
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

from torch.fx import GraphModule
from torch.fx.passes.infra.pass_base import PassResult

from passes.compat import forget_erased
from passes.graphs.edit import LazyCode
from passes.graphs.graph_text import diff_graphs
from passes.graphs.verify import VerifyError, check_signature, check_structure, verify

GraphKind: TypeAlias = Literal["operators", "joint"]
"""The two kinds of graphs that memopt rewrites for a region of a model.

`"operators"`: the forward in ATen operators as its author called them. `linear`, `layer_norm` and attention are whole,
and nothing is differentiated yet. `"joint"`: forward and backward as one canonical, functional ATen graph, before it is
decided which values are saved and which are recomputed.
"""


class PassError(ValueError):
    """Raised where a pass cannot take a graph, or has made an inconsistent one; the message names the pass, the node,
    and what to do."""

    def __init__(self, pass_name: str, node: str | None, problem: str, mend: str) -> None:
        where = f"node {node}: " if node else ""
        super().__init__(f"{pass_name}: {where}{problem}; {mend}")
        self.pass_name = pass_name
        self.node = node
        self.problem = problem
        self.mend = mend

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.pass_name, self.node, self.problem, self.mend)


@dataclass(frozen=True)
class Pass(abc.ABC):
    """A rewrite of a graph. Subclasses are frozen dataclasses: their fields are their options, and `repr` prints them.

    Calling a pass checks what it `requires`, rewrites a copy, and checks what it `ensures`: by default that the graph
    is well formed and keeps its inputs and outputs. The module given is never modified. Constants and submodules are
    shared with it, and so are the values in `node.meta`.

    A user's own pass goes to `memopt.plan(..., passes=[MyPass()])`; its class attribute `graph` says which graphs it is
    for: "operators" (before differentiation) or "joint" (forward and backward)."""

    graph: ClassVar[GraphKind] = "operators"
    """The kind of graph that the pass is for where it is one of a user's own `passes`."""
    keeps_signature: ClassVar[bool] = True
    """False for a pass that changes the graph's inputs, or the number or the types of its outputs."""

    def __call__(self, graph_module: GraphModule) -> GraphModule:
        """Returns the rewritten graph module. Raises `PassError` if a check of the graph or of the result fails."""
        try:
            self.requires(graph_module)
            after = self._rewritten(copy_graph_module(graph_module))
            after.recompile()
            self.ensures(graph_module, after)
        except VerifyError as error:
            raise PassError(self.name, error.node, error.problem, error.mend) from error
        forget_erased(after.graph)
        return after

    def _rewritten(self, copied: GraphModule) -> GraphModule:
        try:
            after = self.rewrite(copied)
        except RuntimeError as error:
            used = re.match(r"Tried to erase Node (\S+) but it still had", str(error))
            if used is None:
                raise
            mend = "call passes.replace_node(node, by) instead"
            raise VerifyError(used[1], "rewrite erases this node, which others use", mend) from error
        if not isinstance(after, GraphModule):
            problem = f"rewrite returned {'None' if after is None else type(after).__name__}, not a graph module"
            raise VerifyError(None, problem, "end it with `return graph_module`")
        return after

    @property
    def name(self) -> str:
        return type(self).__name__

    @abc.abstractmethod
    def rewrite(self, graph_module: GraphModule) -> GraphModule:
        """Edits the graph module given, which is the pass's own copy, and returns it; or returns a new one."""

    def requires(self, graph_module: GraphModule) -> None:
        """Raises `VerifyError` if the graph is not one this pass can take. By default the graph must be well formed,
        with a `meta["val"]` for each value."""
        check_structure(graph_module.graph)

    def ensures(self, before: GraphModule, after: GraphModule) -> None:
        """Raises `VerifyError` if the rewrite broke the graph. By default the calls that it changed are run on fake
        tensors, and their results compared with `meta["val"]`."""
        verify(after, before=before)
        if self.keeps_signature:
            check_signature(before, after)

    def as_fx_pass(self) -> Callable[[GraphModule], PassResult]:
        """This pass for torch.fx's `PassManager`: a function that returns the graph and whether it was modified."""

        def run(graph_module: GraphModule) -> PassResult:
            after = self(graph_module)
            return PassResult(after, modified=bool(diff_graphs(graph_module, after)))

        run.__name__ = self.name
        return run


@dataclass(frozen=True, repr=False)
class Pipeline(Pass):
    """Passes that run one after another; itself a pass, and prints as a list.

    `passes` may be any sequence of passes and is kept as a tuple. `label` names what they do together.

    All passes rewrite one copy, which is checked at the end; if it is wrong, they run one by one, each checked, so that
    the error names the pass."""

    passes: tuple[Pass, ...]
    label: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "passes", tuple(self.passes))
        _check_passes(self.passes)

    def __call__(self, graph_module: GraphModule) -> GraphModule:
        if self._has_usual_checks():
            with contextlib.suppress(VerifyError):
                return self._at_once(graph_module)
        for item in self.passes:
            graph_module = item(graph_module)
        return graph_module

    def stages(self, graph_module: GraphModule) -> list[GraphModule]:
        """Returns the graph after each pass, also after those of pipelines in this one; each is checked."""
        found: list[GraphModule] = []
        for item in _flat(self.passes):
            found.append(item(found[-1] if found else graph_module))
        return found

    def rewrite(self, graph_module: GraphModule) -> GraphModule:
        return self(graph_module)

    def _has_usual_checks(self) -> bool:
        """Returns whether there are several passes, none of them a pipeline or with checks of its own."""
        kinds = [type(item) for item in self.passes]
        usual = (Pass.__call__, Pass.requires, Pass.ensures)
        return len(kinds) > 1 and all((kind.__call__, kind.requires, kind.ensures) == usual for kind in kinds)

    def _at_once(self, graph_module: GraphModule) -> GraphModule:
        """Returns one copy that all passes have rewritten. Raises `VerifyError` if a check before or after fails."""
        self.requires(graph_module)
        after = copy_graph_module(graph_module)
        for item in self.passes:
            after = item._rewritten(after)
        after.recompile()
        verify(after, before=graph_module)
        if all(item.keeps_signature for item in self.passes):
            check_signature(graph_module, after)
        return after

    @property
    def name(self) -> str:
        return self.label or super().name

    def __iter__(self) -> Iterator[Pass]:
        return iter(self.passes)

    def __len__(self) -> int:
        return len(self.passes)

    def __repr__(self) -> str:
        head = f"Pipeline({self.label!r}, [" if self.label else "Pipeline(["
        rows = "".join(textwrap.indent(f"{inner!r},\n", "    ") for inner in self.passes)
        return f"{head}\n{rows}])" if rows else f"{head}])"


def passes_for(graph: GraphKind, passes: Iterable[Pass]) -> tuple[Pass, ...]:
    """Returns those of the passes that are for one kind of graph, "operators" or "joint", in order; a `Pipeline` counts
    as the passes in it.

    Raises TypeError for an object that is no pass, and ValueError for a pass whose `graph` is no kind of graph."""
    flat = list(_flat(tuple(passes)))
    for listed in flat:
        if listed.graph not in ("operators", "joint"):
            raise ValueError(f"{listed.name}.graph is {listed.graph!r}; set it to 'operators' or 'joint'")
    return tuple(listed for listed in flat if listed.graph == graph)


def _flat(passes: tuple[Pass, ...]) -> Iterator[Pass]:
    _check_passes(passes)
    for listed in passes:
        if isinstance(listed, Pipeline):
            yield from _flat(listed.passes)
        else:
            yield listed


def _check_passes(passes: Iterable[object]) -> None:
    for listed in passes:
        if not isinstance(listed, Pass):
            raise TypeError(f"{listed!r} is no pass; give instances of Pass")


def copy_graph_module(graph_module: GraphModule) -> GraphModule:
    """Returns a graph module with a graph of its own; constants, submodules and the values in `meta` are shared."""
    with warnings.catch_warnings():
        # torch's own: the call convention of a captured graph holds a tree specification that warns when it is copied.
        warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
        graph = copy.deepcopy(graph_module.graph)
    copied = LazyCode(graph_module, graph, type(graph_module).__name__)
    copied.meta.update(graph_module.meta)
    return copied
