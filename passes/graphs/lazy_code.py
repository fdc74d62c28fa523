"""A graph module that generates its Python code when it is called or read, since most are only rewritten."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule


class LazyCode(GraphModule):
    """A `GraphModule` whose `recompile` only drops the code, which is generated when it is next called or read.

    Generating the code of a graph of thousands of nodes takes longer than most passes over it.
    """

    def recompile(self) -> None:  # type: ignore[override]
        type(self).forward = LazyCode.forward  # type: ignore[method-assign]  # every graph module has its own class

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._compile()
        return self(*args, **kwargs)

    def _compile(self) -> None:
        if type(self).forward is LazyCode.forward:
            super().recompile()

    @property
    def code(self) -> str:
        self._compile()
        return super().code

    def __str__(self) -> str:
        self._compile()
        return super().__str__()

    def __reduce__(self) -> Any:
        return GraphModule(self, self.graph, type(self).__name__).__reduce__()
