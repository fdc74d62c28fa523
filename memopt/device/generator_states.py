"""States of the CPU's random generator, which are tensors that no operator makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def states_reported(report: Callable[[torch.Tensor], None], *, during_captures: bool = False) -> Iterator[None]:
    """Context in which `report` gets every state that `torch.get_rng_state` returns.

    `torch.utils.checkpoint` and `torch.random.fork_rng` hold one such state each. Dispatch modes do not see them.

    Args:
        report: called with the state.
        during_captures: whether Dynamo captures code in the context. It must not capture the reports.
    """
    functions: Any = torch.random
    before = functions.default_generator
    functions.default_generator = reporting = _Reporting(before, report)
    if during_captures:
        disable: Any = torch.compiler.disable
        reporting.get_state = disable(reporting.get_state)  # type: ignore[method-assign]
    try:
        yield
    finally:
        functions.default_generator = before


class _Reporting:
    """A generator, for the functions of `torch.random`, whose states are reported."""

    def __init__(self, generator: Any, report: Callable[[torch.Tensor], None]) -> None:
        self._generator, self._report = generator, report

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def get_state(self) -> torch.Tensor:
        state: torch.Tensor = self._generator.get_state()
        self._report(state)
        return state
