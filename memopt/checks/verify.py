"""Verifies a planned step against the plain one, and stops a run whose gradients differ by more than rounding."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from torch import nn

from memopt.checks.accuracy import Accuracy
from memopt.checks.compare_step import compare
from memopt.checks.comparison import Comparison
from memopt.errors import GradientMismatchError
from memopt.planning.plan import Plan
from memopt.planning.plan_views import source_line
from memopt.run.session import session_of
from passes.graphs.node_facts import backward_nodes

ROUNDING = 1e-4
"""The error of a plan that computes in the model's own dtype, of the loss and of all gradients as one vector: other
kernels and other orders of sums are below it by far."""
OF_AUTOCAST, SIXTEEN_BITS, EIGHT_BITS = 2.0, 1e-2, 0.3
"""The errors of plans that compute in 16 bits, in multiples of autocast's error or at all, and in 8 bits."""
SHARE = 1e-2
"""The part of the error allowed for all gradients that a single parameter may have, without casts. With them, the
gradient of a bias before a normalisation, which is zero but for rounding, is off by as much as all others."""


def verify(model: nn.Module, batch: Any) -> Comparison:
    """Train one planned and one plain step from the same state, which is then restored.

    The plain step takes the memory that it takes: this needs room above the budget.

    Raises:
        GradientMismatchError: loss, gradients or buffers differ by more than the plan's precision explains. It names
            the parameter nearest to the loss, and the operator that reads it.
        ValueError, TypeError, BudgetError: as `memopt.compare`.
    """
    comparison = compare(model, batch, reference="fp32")
    accuracies = comparison.accuracies
    if comparison.bitwise or accuracies is None or not math.isfinite(comparison.plain.loss):
        return comparison
    planned = session_of(model)
    assert planned is not None, "compare has asked for a planned model"
    plan = planned.latest
    limit = _limit(comparison, plan)
    wrong = wrong_gradients(accuracies.optimized, limit, SHARE if limit == ROUNDING else 1.0)
    buffers = [] if comparison.autocast_dtype else [one.name for one in comparison.buffers if one.relative > limit]
    loss = accuracies.optimized.loss
    if wrong or buffers or not loss <= limit:
        raise GradientMismatchError(_message(planned.model, plan, loss, wrong, buffers, limit))
    return comparison


def wrong_gradients(accuracy: Accuracy, limit: float, share: float) -> dict[str, float]:
    """Parameter → relative error, for gradients that are wrong where all of them together may be off by `limit`, and
    one by that `share` of it."""
    return {
        error.name: error.relative
        for error in accuracy.gradients
        if math.isinf(error.relative) or (error.relative > limit and error.relative * error.share > share * limit)
    } or ({} if accuracy.gradient <= limit else {"all parameters together": accuracy.gradient})


def _limit(comparison: Comparison, plan: Plan | None) -> float:
    if plan is not None and any("fp8" in lever for lever in plan.levers):
        return EIGHT_BITS
    if not comparison.autocast_dtype:
        return ROUNDING
    autocast = comparison.accuracies.autocast if comparison.accuracies else None
    return max(SIXTEEN_BITS, OF_AUTOCAST * max(autocast.gradient, autocast.loss) if autocast else SIXTEEN_BITS)


def _message(
    model: nn.Module, plan: Plan | None, loss: float, wrong: dict[str, float], buffers: list[str], limit: float
) -> str:
    parts = [f"the loss by {loss:.1e}"] if not loss <= limit else []
    nearest = last_read(model, plan, wrong)
    if wrong:
        name, place = nearest or (max(wrong, key=lambda one: wrong[one]), "")
        of = f"of {len(wrong)} parameters, nearest to the loss that of {name}"
        parts.append(f"the gradients {of}, by {wrong[name]:.1e}{place}")
    if buffers:
        parts.append(f"the buffers {', '.join(buffers[:3])}")
    return (
        f"the planned step of this {type(model).__name__} differs from the plain one by more than {limit:.0e}: "
        f"{'; '.join(parts)}; the model and its gradients are as before this step: go on without memopt "
        "(memopt.remove(model)), and report it with the table of memopt.compare(model, batch)"
    )


def last_read(model: nn.Module, plan: Plan | None, names: Collection[str]) -> tuple[str, str] | None:
    """Of these parameters the one that the forward reads last, with the operator that reads it and its source line;
    None where the plan has no graphs or the graphs read none of them.

    The backward computes its gradient first of all that are wrong, so that what is wrong lies behind this operator.
    """
    captured = plan.captured if plan is not None else None
    parameters = {id(parameter): name for name, parameter in model.named_parameters()}
    for joint in reversed(captured.regions if captured is not None else ()):
        inputs = joint.module.graph.find_nodes(op="placeholder")
        known = joint.trace.region.parameter_ids if joint.trace is not None else {}
        of_node = {inputs[number]: parameters.get(parameter) for number, parameter in known.items()}
        backward = backward_nodes(joint.module.graph)
        found: tuple[str, str] | None = None
        for node in joint.module.graph.nodes:
            for read in () if node in backward else node.all_input_nodes:
                if (name := of_node.get(read)) in names and name is not None:
                    line = source_line(node)
                    found = name, f", which {node.target} reads" + (f" ({line})" if line else "")
        if found is not None:
            return found
    return None
