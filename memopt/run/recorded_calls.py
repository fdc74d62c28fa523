"""The training calls of a model as Dynamo records them: in one region, or in several where it breaks the graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from memopt.capture.data_sizes import is_real
from memopt.capture.dynamic_shapes import Place, declared_sizes
from memopt.capture.dynamo import GraphBreak, in_brief_with_line, training_call
from memopt.capture.inputs import Call, call_signature, tensors_in, with_zeros
from memopt.capture.on_fakes import PASSED_OVER
from memopt.capture.region import CapturedCall
from memopt.capture.rehearsal import cannot_capture
from memopt.errors import CaptureError
from memopt.planning.options import Options
from memopt.planning.plan import Plan
from memopt.planning.situation import Situation
from memopt.progress import stage
from memopt.recent import Recent
from memopt.run.broken_calls import BrokenCalls
from memopt.run.calls_by_size import CallsBySize
from memopt.run.ceilings import Ceilings
from memopt.run.keeping import Keeping
from memopt.run.road import Road
from memopt.run.tensor_parallel import check_unbroken
from memopt.run.under_way import UnderWay

_MOST_BREAKS = 256
"""The number of signatures that are remembered to break into regions."""


class RecordedCalls:
    """Records the training calls of one model, and runs them by their plans.

    A call is tried as one region first. Where Dynamo breaks its graph, it is recorded in several regions, as are all
    later calls of its signature.
    """

    def __init__(
        self, model: nn.Module, options: Options, loss_fn: Callable[..., Any] | None, road: Road, keeping: Keeping
    ) -> None:
        self.model, self.options, self.loss_fn, self.road, self.keeping = model, options, loss_fn, road, keeping
        self.planner = road.planner
        self.ceilings = Ceilings(self.declared)
        self._breaks: Recent[str, str] = Recent(_MOST_BREAKS)
        """The reason why a call breaks into regions, by its signature."""
        self._by_terms: dict[tuple[torch.dtype | None, bool], tuple[CallsBySize, BrokenCalls]] = {}

    @property
    def whole(self) -> CallsBySize:
        """The calls in one region."""
        return self._recorders[0]

    @property
    def broken(self) -> BrokenCalls:
        """The calls in several regions."""
        return self._recorders[1]

    @property
    def _recorders(self) -> tuple[CallsBySize, BrokenCalls]:
        """They are made again when the dtype changes in which the model takes inputs, and when it turns out that more
        outputs than the loss get gradients: once at most for each."""
        terms = floats, all_outputs = self.planner.proposing.floats, self.planner.differentiate_all
        if terms not in self._by_terms:
            to_capture = partial(training_call, self.model, self.loss_fn, floats)
            whole = CallsBySize(to_capture, self.road, self.ceilings, differentiate_all=all_outputs)
            unplanned_allowed = "plain" in self.options.allow
            broken = BrokenCalls(self.model, to_capture, self.road, self.keeping, unplanned_allowed=unplanned_allowed)
            self._by_terms = {terms: (whole, broken)}
        return self._by_terms[terms]

    @property
    def breaks(self) -> bool:
        """Whether any call is known to break into regions."""
        return bool(len(self._breaks))

    def forget_breaks(self) -> None:
        """Try every call as one region again."""
        self._breaks.clear()

    def forget(self) -> None:
        """Drop all plans and emitted code; recorded regions are kept."""
        self.whole.forget()
        self.broken.forget()

    def forget_plans(self, but: Plan | None) -> None:
        """Drop all plans, of calls in several regions all but one; what is recorded is kept, and emitted regions of
        calls in several."""
        self.whole.forget()
        self.broken.forget_plans(but=but)

    def take(self, earlier: RecordedCalls) -> None:
        """Take over what `earlier` has recorded, whose options differ in the budget alone; it records again if it is
        called again."""
        self._breaks, self.ceilings = earlier._breaks, earlier.ceilings
        self.ceilings.declared = self.declared
        self._by_terms, earlier._by_terms = earlier._by_terms, {}
        for whole, broken in self._by_terms.values():
            whole.travel_by(self.road)
            broken.travel_by(self.road)

    def run(self, under_way: UnderWay) -> Any:
        """Run a call by its plan, which is made if there is none. Raises `BudgetError`, `CaptureError`."""
        call = under_way.call
        reason = self._breaks.get(call_signature(call)) if self.breaks else None
        if reason is None:
            try:
                return self.whole.run(under_way)
            except GraphBreak as broken:
                check_unbroken(self.model, str(broken))
                reason = self._breaks[call_signature(call)] = str(broken)
        return self.broken.run(under_way, partial(self._in_regions, call, reason))

    def planned(self, captured: CapturedCall, call: Call, situation: Situation, plan: Plan) -> None:
        """Have the first run of such a call in this situation use a plan that was made ahead."""
        (self.whole if captured.whole else self.broken).planned(captured, call, situation, plan)

    def capture(self, call: Call) -> CapturedCall:
        """Record a call without running it, so that the first run of such a call finds it recorded.

        Raises `CaptureError`.
        """
        if self.needs_fakes(call):
            return self.planner.capture_on_fakes(call, self.planner.proposing.narrowed)
        given = all(map(is_real, tensors_in(call)))
        with stage("capturing"):
            try:
                captured = self.whole.capture(call if given else with_zeros(call, self.planner.device()))
                if captured is not None:
                    return captured
                reason = PASSED_OVER
            except GraphBreak as broken:
                check_unbroken(self.model, str(broken))
                reason = str(broken)
        try:
            return self._in_regions(call, reason)
        except ValueError:  # ours, CaptureError among them
            raise
        except Exception as failure:  # the model's own: ahead of any step it says that it cannot be planned
            error = f"{reason}; running past it failed: {in_brief_with_line(failure)}"
            raise CaptureError(cannot_capture(self.model, error)) from failure

    def needs_fakes(self, call: Call) -> bool:
        """Whether a call is recorded on fake tensors: the model has no values, or will have another dtype, or the call
        has none and will not run."""
        if self.planner.proposing.narrowed is not None or not all(map(is_real, self.model.parameters())):
            return True
        runs_later = self.options.kept and not self.planner.screens
        return not runs_later and not all(map(is_real, tensors_in(call)))

    def declared(self, call: Call) -> dict[Place, int | None]:
        """The places of a call whose sizes the user declares to change, and the largest size of each."""
        return declared_sizes(self.options.dynamic, call, self.model, with_targets=self.loss_fn is not None)

    def _in_regions(self, call: Call, reason: str) -> CapturedCall:
        """Record the regions of a call that breaks: on its values where the model and the call have any; where plans
        are not kept, on fakes, if it breaks there too, and no code between the regions needs values."""
        real = all(map(is_real, (*self.model.parameters(), *tensors_in(call))))
        only_fakes = not real or self.planner.proposing.narrowed is not None
        if not real or not self.options.kept:
            try:
                on_fakes = self.planner.capture_on_fakes(call, self.planner.proposing.narrowed)
            except CaptureError:
                if only_fakes:
                    raise
            else:
                if only_fakes or not on_fakes.whole:
                    return on_fakes
        with stage("capturing"):
            return self.broken.capture(call, reason)
