"""A graph module that makes its Python code when somebody calls or reads it: most graphs are only rewritten again."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule


class LazyCode(GraphModule):
    """As `GraphModule`, but `recompile` only forgets the code, which is made at the next call or look at it.

    Making the code of a graph of thousands of nodes takes longer than most passes over it.
    """

    def recompile(self) -> None:  # type: ignore[override]
        type(self).forward = LazyCode.forward  # type: ignore[method-assign]  # each has a class of its own

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
