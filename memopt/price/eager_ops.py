"""Ops of a region's problem that stand for the eager code before, beside and after it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from memopt.account.breakdown import EAGER
from memopt.capture.between import EagerBytes
from memopt.price.priced_graph import PricedGraph
from memopt.solver import Op, Storage


def with_eager(priced: PricedGraph, number: int, eager: Sequence[EagerBytes]) -> PricedGraph:
    """The priced region `number` of a call with what eager code holds around its forward and around its backward.

    The most that it holds before a half of the region is the workspace of an op; what it holds while the half runs is a
    storage that lives as long as that half. After the last region's forward there is one for what is held until its
    backward begins.

    Args:
        eager: the bytes around each region; at the end those after the last backward and after the last forward.
    """
    problem, own, around = priced.problem, eager[number], eager[-1]
    last = number == len(eager) - 2
    forward, backward, held = (len(problem.storages) + more for more in range(3))
    storages = [
        Storage(f"{EAGER}_forward", own.during, movable=False),
        Storage(f"{EAGER}_backward", own.during_backward, movable=False),
    ]
    before = [_op(workspace_bytes=own.before), _op(makes=(forward,))]
    between = [_op(reads=(forward,))]
    tangents = _leading_receipts(problem.ops[problem.forward_ops :])
    most_back = own.before_backward
    if last:
        storages.append(Storage(f"{EAGER}_held", around.during, movable=False))
        between.append(_op(makes=(held,)))
        most_back = max(0, most_back - around.during)
    back = [_op(reads=(held,) if last else (), workspace_bytes=most_back), _op(makes=(backward,))]
    after = [_op(reads=(backward,))]
    if number == 0:
        after.append(_op(workspace_bytes=around.before))
    split = problem.forward_ops + (tangents if last else 0)  # its tangents come before the backward begins
    pieces = (before, (0, problem.forward_ops), between, (problem.forward_ops, split), back, (split, None), after)
    ops, nodes, modules = _joined(pieces, priced)
    problem = replace(
        problem,
        ops=ops,
        storages=(*problem.storages, *storages),
        forward_ops=problem.forward_ops + len(before) + len(between),
    )
    values = (*priced.values, *("" for _ in storages))
    return replace(priced, problem=problem, nodes=nodes, modules=modules, values=values)


def _joined(
    pieces: Iterable[list[Op] | tuple[int, int | None]], priced: PricedGraph
) -> tuple[tuple[Op, ...], tuple[str, ...], tuple[str, ...]]:
    """The ops of `pieces`, with their nodes and modules. A piece is a range of the region's own ops, or ops of eager
    code, which have neither."""
    ops: list[Op] = []
    nodes: list[str] = []
    modules: list[str] = []
    for piece in pieces:
        if isinstance(piece, tuple):
            ops += priced.problem.ops[slice(*piece)]
            nodes += priced.nodes[slice(*piece)]
            modules += priced.modules[slice(*piece)]
        else:
            ops += piece
            nodes += [""] * len(piece)
            modules += [""] * len(piece)
    return tuple(ops), tuple(nodes), tuple(modules)


def _op(reads: tuple[int, ...] = (), makes: tuple[int, ...] = (), workspace_bytes: int = 0) -> Op:
    return Op(EAGER, 0.0, reads, makes, workspace_bytes, recomputable=False)


def _leading_receipts(backward: Sequence[Op]) -> int:
    """The number of ops at the start of a backward that receive the gradients of outputs."""
    return next((number for number, op in enumerate(backward) if op.reads or op.seconds), len(backward))
