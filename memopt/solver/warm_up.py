"""Compiles the solvers' kernels in advance, so that the first plan does not seem to hang."""

from __future__ import annotations

import functools

from memopt.solver.native import ready_made
from memopt.solver.portfolio import Portfolio
from memopt.solver.problem import Op, RematProblem, Storage


@functools.cache
def warm_up() -> None:
    """Compile the kernels that `Portfolio` calls, by solving a small chain. Does nothing if the extension is used.

    With numba this takes about 12 seconds the first time on a machine; later processes read the machine code from disk.
    """
    if ready_made() is not None:
        return
    portfolio = Portfolio(_chain(blocks=8))
    most = max(baseline.peak_bytes for baseline in portfolio.baselines())
    least = portfolio.smallest().peak_bytes
    portfolio.solve((most + 2 * least) // 3)


def _chain(blocks: int) -> RematProblem:
    """A chain of blocks of two forward ops; each storage is read by the next op and by its own op's backward."""
    depth = 2 * blocks
    forward = [Op(f"f{n}", 1.0, (n - 1,) if n else (), (n,), block=n // 2) for n in range(depth)]
    backward = [
        Op(f"b{n}", 2.0, (n,) if n == depth - 1 else (n, depth + (depth - 2 - n)), (2 * depth - 1 - n,))
        for n in reversed(range(depth))
    ]
    storages = [Storage(f"s{n}", 3 if n % 2 else 1) for n in range(depth)] + [Storage("g", 1)] * depth
    return RematProblem(tuple(forward + backward), tuple(storages), depth)
