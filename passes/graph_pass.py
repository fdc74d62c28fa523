"""The pass protocol: a frozen value that takes a graph module and returns another, checked before and after."""

import abc
import copy
import textwrap
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

from torch.fx import GraphModule
from torch.fx.passes.infra.pass_base import PassResult

from passes.graphs.graph_diff import diff_graphs
from passes.graphs.lazy_code import LazyCode
from passes.graphs.verify import VerifyError, check_signature, check_structure, verify


class PassError(ValueError):
    """A pass met a graph it cannot take, or made one that contradicts itself: which pass, which node, and the mend."""

    def __init__(self, pass_name: str, node: str | None, problem: str, mend: str) -> None:
        where = f"node {node}: " if node else ""
        super().__init__(f"{pass_name}: {where}{problem}; {mend}")
        self.pass_name = pass_name
        self.node = node
        self.problem = problem
        self.mend = mend


@dataclass(frozen=True)
class Pass(abc.ABC):
    """A rewrite of a graph. Subclasses are frozen dataclasses: their fields are their options, `repr` prints them.

    Calling a pass checks what it `requires`, rewrites a copy, and checks what it `ensures`: by default that the graph
    holds together and keeps its inputs and outputs. The module given is never modified; constants and submodules are
    shared with it, and so are the values in `node.meta`.
    """

    keeps_signature: ClassVar[bool] = True
    """False for a pass that changes the graph's inputs, or how many outputs it has and of what type."""

    def __call__(self, graph_module: GraphModule) -> GraphModule:
        """Returns the rewritten graph module. Raises `PassError`."""
        try:
            self.requires(graph_module)
            after = self.rewrite(copy_graph_module(graph_module))
            after.recompile()
            self.ensures(graph_module, after)
        except VerifyError as error:
            raise PassError(self.name, error.node, error.problem, error.mend) from error
        return after

    @property
    def name(self) -> str:
        return type(self).__name__

    @abc.abstractmethod
    def rewrite(self, graph_module: GraphModule) -> GraphModule:
        """Edits the graph module given, which is the pass's own copy, and returns it; or returns a new one."""

    def requires(self, graph_module: GraphModule) -> None:
        """Raises `VerifyError` if the graph is not one this pass can take. By default: well formed, with metadata."""
        check_structure(graph_module.graph)

    def ensures(self, before: GraphModule, after: GraphModule) -> None:
        """Raises `VerifyError` if the rewrite broke the graph. By default: changed calls run on fake tensors again."""
        verify(after, before=before, thorough=False)
        if self.keeps_signature:
            check_signature(before, after)

    def as_fx_pass(self) -> Callable[[GraphModule], PassResult]:
        """This pass as torch.fx's `PassManager` takes it: a function that also says whether it modified the graph."""

        def run(graph_module: GraphModule) -> PassResult:
            after = self(graph_module)
            return PassResult(after, modified=bool(diff_graphs(graph_module, after)))

        run.__name__ = self.name
        return run


Observer: TypeAlias = Callable[[Pass, GraphModule, GraphModule], None]
"""Called after each pass with the pass, the graph before and the graph after; may raise, must not modify."""


@dataclass(frozen=True, repr=False)
class Pipeline(Pass):
    """Passes in a row, itself a pass; prints as a list. `passes` may be any sequence of passes and is kept as a tuple.

    The observer is called between passes, for those of a pipeline inside this one too: one callback serves verifying,
    timing, printing and recording. `label` names what the passes do together.
    """

    passes: tuple[Pass, ...]
    observer: Observer | None = field(default=None, compare=False)
    label: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "passes", tuple(self.passes))
        for each in self.passes:
            if not isinstance(each, Pass):
                raise TypeError(f"a Pipeline holds passes, not {each!r}; give it instances of Pass")

    def __call__(self, graph_module: GraphModule) -> GraphModule:
        return self._run(graph_module, ())

    def rewrite(self, graph_module: GraphModule) -> GraphModule:
        return self(graph_module)

    def _run(self, graph_module: GraphModule, outer: tuple[Observer, ...]) -> GraphModule:
        observers = (*outer, self.observer) if self.observer is not None else outer
        for each in self.passes:
            if isinstance(each, Pipeline):
                graph_module = each._run(graph_module, observers)
                continue
            after = each(graph_module)
            for observer in observers:
                observer(each, graph_module, after)
            graph_module = after
        return graph_module

    @property
    def name(self) -> str:
        return self.label or super().name

    def __iter__(self) -> Iterator[Pass]:
        return iter(self.passes)

    def __len__(self) -> int:
        return len(self.passes)

    def __repr__(self) -> str:
        head = f"Pipeline({self.label!r}, [" if self.label else "Pipeline(["
        rows = "".join(textwrap.indent(f"{each!r},\n", "    ") for each in self.passes)
        return f"{head}\n{rows}])" if rows else f"{head}])"


def copy_graph_module(graph_module: GraphModule) -> GraphModule:
    """A graph module with a graph of its own; constants, submodules and the values in `meta` are shared."""
    with warnings.catch_warnings():
        # torch's own: the call convention of a captured graph holds a tree specification that warns when it is copied.
        warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
        graph = copy.deepcopy(graph_module.graph)
    copied = LazyCode(graph_module, graph, type(graph_module).__name__)
    copied.meta.update(graph_module.meta)
    return copied
