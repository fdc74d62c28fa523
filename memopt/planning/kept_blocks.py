"""Which blocks one card of a cluster keeps gathered from their forward to their backward, and their plan's step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from memopt.account.account import Account
from memopt.errors import BudgetError
from memopt.planning.cluster_step import cluster_step
from memopt.planning.figures import recounted
from memopt.planning.plan import Plan

Solve = Callable[[Account], Plan]
"""Plans a step whose account has other bytes. Raises `BudgetError`."""


def with_kept_blocks(plan: Plan, solve: Solve) -> Plan:
    """The plan with as many of the last blocks kept as it has room for; where its step waits for gathers, with more of
    them and more recomputation if that takes less time by the rates of the links.

    A plan for one card is returned as it is.
    """
    sharded = None if plan.captured is None else plan.captured.sharded
    if sharded is None or sharded.sharding.cluster.mesh.dp_shard == 1:
        return plan
    sharding = sharded.sharding
    blocks = len(sharding.blocks)
    room = plan.budget_bytes - plan.ceiling_bytes
    kept = max(count for count in range(blocks + 1) if sharding.kept_bytes(count) <= room)
    best = _keeping(plan, kept)
    if _seconds(_keeping(plan, blocks)) >= _seconds(best):
        return best
    for more in dict.fromkeys((blocks, (kept + blocks + 1) // 2)):
        with suppress(BudgetError):
            other = _keeping(solve(replace(plan.account, kept=sharding.kept_bytes(more))), more)
            return min(best, other, key=_seconds)
    return best


def _keeping(plan: Plan, count: int) -> Plan:
    """The plan with the same schedule and the last `count` blocks kept."""
    step, schedule = plan.solved
    assert step.traced.sharded is not None
    sharding = step.traced.sharded.sharding
    account = replace(plan.account, kept=sharding.kept_bytes(count))
    kept = sharding.blocks[len(sharding.blocks) - count :]
    return recounted(
        plan,
        account,
        cluster=cluster_step(step.problem, schedule, step, account, kept=count),
        kept=tuple((block.name, block.gathered_bytes) for block in kept),
    )


def _seconds(plan: Plan) -> float:
    assert plan.cluster is not None
    return plan.cluster.seconds
