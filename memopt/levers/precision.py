"""The lever that computes in 16 bits; the option `precision` says in which dtype, and in which operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from memopt.capture.caller_modes import autocast_is_on
from memopt.capture.operators import Decision, OperatorGraph, Operators, Rewriting
from memopt.device.devices import device_of
from memopt.device.hardware import Hardware
from memopt.levers.lever import Lever
from memopt.rewrite.dtypes import AssignPrecision, Policy, PrecisionPlan, Rules, low_dtype, searches
from memopt.rewrite.narrow import narrowing
from memopt.rewrite.op_prices import OpPrices
from memopt.rewrite.screen import KeptOut, Screenings
from memopt.rewrite.search import search_precision
from passes import EliminateDeadCode, InsertCasts, MergeCasts, Pipeline

LABEL = "precision"
LEFT_TO_AUTOCAST = "torch.autocast is on: dtypes are left to it"


def precision_rewriting(policy: Policy, hardware: Hardware) -> Rewriting:
    """Returns the rewriting that gives a model's operator graphs their precision on a device; an empty one for fp32.

    Raises `ValueError` for unknown names in `policy`, and for fp16 on a device without it."""
    low = low_dtype(policy, hardware)
    rules = Rules() if isinstance(policy, str) else Rules.of(policy)
    if low == torch.float32 and all(dtype == torch.float32 for _, dtype in rules.dtypes):
        return Rewriting(planned_for=hardware.device_type)
    screenings = Screenings() if torch.float16 in (low, *(dtype for _, dtype in rules.dtypes)) else None
    prices = OpPrices(hardware, narrows=low == torch.bfloat16) if searches(policy) else None
    sums = device_of(hardware).sums_in_16_bits
    decide = DecidePrecision(
        low, rules, yields=policy == "auto", screenings=screenings, prices=prices, sums_in_16_bits=sums
    )
    joint = narrowing if low == torch.bfloat16 else None
    return Rewriting((decide,), joint, low, hardware.device_type, replaces_autocast=policy != "auto")


@dataclass(frozen=True)
class DecidePrecision:
    """Decides the dtype of each operator of a region, and names the passes that apply it.

    Results that are returned to the model's caller have the dtypes of the plain model."""

    low: torch.dtype
    rules: Rules = field(default_factory=Rules)
    kept_out: tuple[tuple[str, str], ...] = ()
    yields: bool = False
    """Whether a region that is captured under the caller's own autocast is left alone."""
    screenings: Screenings | None = field(default=None, compare=False, repr=False)
    """The ranges of values on sample batches; None where no operator may compute in fp16."""
    prices: OpPrices | None = field(default=None, compare=False, repr=False)
    """The prices with which the best dtypes are searched for; None for the default choices."""
    sums_in_16_bits: frozenset[str] = frozenset()
    """As in `AssignPrecision`."""

    def __call__(self, graph: OperatorGraph) -> Decision:
        if self.left_to_autocast:
            return Decision(Pipeline((), label=LABEL), notes=(LEFT_TO_AUTOCAST,))
        plan = self.plan(graph)
        passes = InsertCasts(plan.assignment, outputs=graph.result_dtypes), MergeCasts(), EliminateDeadCode()
        calls = [node for node in graph.module.graph.nodes if node.op == "call_function"]
        scaled = "; its gradients need a loss scale: train with memopt.TrainStep, or a torch.amp.GradScaler"
        note = f"precision: {plan.summary()}" + (scaled if plan.low == torch.float16 else "")
        notes, unmatched = (note, *plan.notes), self.rules.unmatched(calls)
        return Decision(Pipeline(passes, label=LABEL), plan.reasons, notes, unmatched, graph.author_typed | plan.exact)

    @property
    def left_to_autocast(self) -> bool:
        """Whether the caller's `torch.autocast` decides the dtypes: it is on and `yields` is set (precision "auto")."""
        return self.yields and autocast_is_on()

    def plan(self, graph: OperatorGraph) -> PrecisionPlan:
        """The dtype of each operator of a region, with a reason."""

        def decide(kept_out: KeptOut) -> PrecisionPlan:
            out = (*self.kept_out, *kept_out)
            default = AssignPrecision(self.low, self.rules, graph.author_typed, out, self.sums_in_16_bits)
            return search_precision(graph, default, self.prices) if self.prices else default(graph.module)

        if self.screenings is None:
            return decide(())

        plan, note = self.screenings.decide(graph, decide)
        return replace(plan, notes=(*plan.notes, note))


def check_rules(model: nn.Module, regions: Sequence[Operators]) -> None:
    """Raises `ValueError` for a precision rule of the user that matches nothing in any of the model's `regions`."""
    nothing = frozenset.intersection(*(region.unmatched for region in regions)) if regions else frozenset()
    for rule in sorted(nothing):
        raise ValueError(
            f"the precision rule {rule!r} matches no operator, module or node of {type(model).__name__}; write a "
            "module as in model.named_modules(), an operator as in plan.diff('precision'), or remove the rule"
        )


PRECISION = Lever(
    LABEL,
    "Operators compute in bf16 or fp16 where accurate enough, and save their results so; parameters stay in fp32.",
    "approximate",
    "rounding of activations and gradients to 16 bits; fp16 needs a loss scale, which TrainStep has",
    tried_by="every plan",
    option="precision",
)
