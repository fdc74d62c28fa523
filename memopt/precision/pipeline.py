"""From a policy to the passes that apply it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from memopt.precision.assign import AssignPrecision
from memopt.precision.devices import low_dtype
from memopt.precision.plan import PrecisionPlan
from memopt.precision.rules import Rules
from memopt.pricing.hardware_table import Hardware
from passes import EliminateDeadCode, InsertCasts, MergeCasts, Pipeline

Policy = str | Mapping[str, str]


def precision_pipeline(
    policy: Policy,
    hardware: Hardware,
    module: fx.GraphModule,
    *,
    author_typed: frozenset[str] = frozenset(),
    kept_out: tuple[tuple[str, str], ...] = (),
    cpu_has_bf16: bool | None = None,
) -> tuple[Pipeline, PrecisionPlan]:
    """The passes that give a captured operator graph its precision, and the plan that they apply.

    `policy` is a name (`"fp32"`, `"bf16"`, `"fp16"`, `"auto"`) or a user's rules with a `"default"`. The same arguments
    give the same passes. What the graph returns keeps the dtype that it is computed in, as under autocast. Raises
    ValueError for unknown names, rules that match nothing, and fp16 on a device without it.
    """
    low = low_dtype(policy, hardware, cpu_has_bf16=cpu_has_bf16)
    rules = Rules() if isinstance(policy, str) else Rules.of(policy)
    if low == torch.float32 and all(dtype == torch.float32 for _, dtype in rules.dtypes):
        rules.check(module.graph.nodes)
        return Pipeline(()), PrecisionPlan(None)
    plan = AssignPrecision(low, rules, author_typed, kept_out)(module)
    return Pipeline((InsertCasts(plan.assignment, keep_outputs=False), MergeCasts(), EliminateDeadCode())), plan
