"""Records the training calls of a model with Dynamo, in one region or in several where it breaks the graph."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from memopt.capture.captured_call import CapturedCall
from memopt.capture.data_sizes import SizeOutgrown, is_real
from memopt.capture.dry_run import EagerCodeTooLargeError, cannot_capture
from memopt.capture.dynamo import GraphBreak, TooManyShapes, in_brief_with_line
from memopt.capture.inputs import Call, Place, call_signature, declared_sizes, leaf_name, tensors_in, with_zeros
from memopt.capture.on_fakes import PASSED_OVER
from memopt.compat.autograd import stops_recomputation
from memopt.errors import BudgetError, CaptureError
from memopt.lru import LruCache
from memopt.planning.plan import Plan
from memopt.planning.terms import Situation
from memopt.progress import stage
from memopt.run.call_in_progress import CallInProgress
from memopt.run.on_demand import Notice
from memopt.run.plans_of_regions import Insists
from memopt.run.recorded_calls import OtherPathTaken, RecordedCalls
from memopt.run.road import Road
from memopt.run.settings import Settings
from memopt.run.sharding import Keeping, check_unbroken
from memopt.run.sizes import Shapes, SizeBounds, cover, tensor_shapes
from memopt.saved_values import set_generators
from memopt.training_state import CallState

_MOST_BREAKS = 256
"""The number of call signatures that are remembered to break into regions."""
_MOST_ERRORS = 64
"""The number of calls that are remembered to have no graph."""
_MOST_VALUES = 32
"""The number of captures that are kept for values of constant sizes (`SizeBounds.fixed`): those used last."""


class Recorder:
    """Captures the training calls of one model with Dynamo, and runs them by their plans.

    A call is tried as one region first. Where Dynamo breaks its graph, this call and all later ones of its signature
    are captured as several regions; where Dynamo captures nothing, later calls of that signature are refused at once.

    One capture with symbolic sizes serves all calls in one region, until the model turns out to need a size as a
    constant, for instance because it branches on it. From then on each value of that size gets a capture of its own."""

    def __init__(self, road: Road, keeping: Keeping) -> None:
        self.road, self.keeping, self.planner = road, keeping, road.planner
        self.model, self.options = road.planner.terms.model, road.planner.terms.options
        self.size_bounds = SizeBounds(self.declared)
        self._settings = Settings(self.model)
        self._breaks: LruCache[str, str] = LruCache(_MOST_BREAKS)
        """The reason why a call breaks into regions, by its signature."""
        self._errors: LruCache[tuple[str, int], str] = LruCache(_MOST_ERRORS)
        """Why a call cannot be captured, by its signature and the state of the model's code: the text alone, since an
        error's traceback holds the inputs."""
        self._terms: tuple[torch.dtype | None, bool] | None = None
        """The dtype in which the model takes inputs, and whether all outputs are differentiated, in the present
        recordings. Each changes at most once, and all calls are recorded again then."""

    def _in_present_terms(self) -> None:
        """Begin with empty recordings at the first call, and again where the dtype of floating-point inputs, or whether
        all outputs are differentiated, has changed since they were made."""
        terms = self.planner.optimizer_choice.floats, self.planner.differentiate_all
        if self._terms == terms:
            return
        self._terms = terms
        self._notice = Notice()
        self._first = self._new(whole=True)
        self._first_shapes: LruCache[Shapes, bool] = LruCache(_MOST_VALUES)
        """The shapes of calls that the first recording serves."""
        self._own: LruCache[tuple[int, ...], RecordedCalls] = LruCache(_MOST_VALUES)
        """The recordings for values of the sizes that the model needs as constants (`SizeBounds.fixed`)."""
        self._broken = self._new(whole=False)

    def _new(self, *, whole: bool) -> RecordedCalls:
        """A recording of calls in one region, or in several, without any region yet."""
        return RecordedCalls(self.road, self.keeping, self.size_bounds, self._notice, whole=whole)

    @property
    def broken(self) -> RecordedCalls:
        """The object that records calls in several regions."""
        self._in_present_terms()
        return self._broken

    def _all(self) -> Iterable[RecordedCalls]:
        """All objects that record calls, in one region or in several."""
        self._in_present_terms()
        return self._first, *(whole for _, whole in self._own.items()), self._broken

    @property
    def ran_unplanned(self) -> bool:
        """Whether a call in several regions ran without a plan, as it took another path than planned."""
        return bool(self._breaks) and self._broken.ran_unplanned

    def break_reason(self, call: Call) -> str | None:
        """Why a call breaks into several regions, with the line of the model; None where it is one region, or where
        that is not known."""
        return self._breaks.get(call_signature(call)) if self._breaks else None

    def serves_all_sizes(self, call: Call) -> bool:
        """Whether calls like this one with other sizes need no further capture, since sizes are symbols in the captured
        graph; False once any call is known to break into several regions."""
        if self._terms is None or self._breaks:
            return False
        serving = self._own.get(self._values(tensor_shapes(call))) if self.size_bounds.fixed else self._first
        return serving is not None and serving.has_symbols

    def lacks_smaller(self, call: Call) -> bool:
        """Whether no capture serves a call in one region, although a call with larger sizes was captured: the last
        batch of an epoch may be such a call. To be asked only where `serves_all_sizes` is False."""
        if self._terms is None or self._breaks:
            return False
        shapes = tensor_shapes(call)
        if shapes in self._first_shapes or (self.size_bounds.fixed and self._values(shapes) in self._own):
            return False
        return any(cover(larger, shapes) for larger, _ in self._first_shapes.items())

    @property
    def may_run_twice(self) -> bool:
        """Whether parts of the forward may run a second time in the backward, because the captured code changes no
        Python objects; False before a call was captured."""
        return self._terms is not None and self._first.changes_objects is False

    def forget_errors(self) -> None:
        """Forget which calls could not be captured, so that they are tried again: the failure may have come from the
        model's own forward."""
        from memopt.compat.dynamo import forget_skipped  # loads torch._dynamo

        self._errors.clear()
        forget_skipped()

    def forget(self) -> None:
        """Drop all plans and emitted code, so that calls are planned again; captured regions stay."""
        for recorded in self._all():
            recorded.forget()
        self.planner.forget_sizes()

    def forget_plans(self, but: Plan | None) -> None:
        """Drop all plans, except `but` if it is for a call in several regions. Captured regions stay, and so does the
        emitted code of calls in several regions."""
        for recorded in self._all():
            recorded.forget_plans(but=but)

    def take(self, earlier: Recorder) -> None:
        """Take over what `earlier`, the recorder of an earlier session (`Session.from_captures`), has captured. If
        `earlier` is called again, it captures anew."""
        self._breaks, self.size_bounds = earlier._breaks, earlier.size_bounds
        self.size_bounds.declared = self.declared
        if earlier._terms is None:
            return
        self._terms, earlier._terms = earlier._terms, None
        self._notice, self._first, self._first_shapes = earlier._notice, earlier._first, earlier._first_shapes
        self._own, self._broken = earlier._own, earlier._broken
        for recorded in (self._first, *(own for _, own in self._own.items()), self._broken):
            recorded.use_road(self.road)

    def run(self, in_progress: CallInProgress, before: CallState) -> Any:
        """Run a call by its plan, which is made if there is none, and once more where the existing ones do not serve
        its sizes. `before` is the state before the call. Raises `BudgetError` where no plan fits, and `CaptureError`
        where the call cannot be captured."""
        call, outgrown = in_progress.call, ""
        for _ in range(2):
            if self._errors and (text := self._errors.get(self._state(call))):
                raise CaptureError(text)
            try:
                reason = self.break_reason(call)
                if reason is None:
                    try:
                        return self._by_size(call, RecordedCalls.run_whole, call, in_progress)
                    except GraphBreak as broken:
                        check_unbroken(self.model, str(broken))
                        reason = self._breaks[call_signature(call)] = str(broken)
                return self.broken.run(in_progress, partial(self._in_regions, call, reason, in_progress.most_between))
            except SizeOutgrown as error:
                outgrown = str(error)
            except (BudgetError, OtherPathTaken, TooManyShapes, EagerCodeTooLargeError):
                raise
            except CaptureError as error:
                self._errors[self._state(call)] = str(error)
                self._breaks.clear()  # once the model has changed, it may be one region
                raise
            except Exception as error:
                if not stops_recomputation(error):  # an error of the model itself
                    self.forget_errors()
                raise
            # Outside of the handler, since its exception would keep the forward's tensors alive. A forward writes to
            # buffers only at its end, so that only the generators have to be undone.
            set_generators(before.generators, before.device)
            self.forget()
        raise CaptureError(
            f"{outgrown}, though it was planned for this very batch: in eager mode the code computes another size than "
            "when it is compiled; call memopt.remove(model) to train it plain"
        )

    def planned(self, captured: CapturedCall, call: Call, situation: Situation, plan: Plan) -> None:
        """Make the first run of a call like `call` in this situation use `plan`, which was made before that run."""
        recorded = self._recording_for(call) if captured.whole else self.broken
        recorded.planned(captured, call, situation, plan)

    def capture(self, call: Call) -> CapturedCall:
        """Capture a call without running it, so that its first run needs no capture. Raises `CaptureError` where it
        cannot be captured."""
        if self.needs_fakes(call):
            return self.planner.capture_on_fakes(call, self.planner.optimizer_choice.narrowed)
        with stage("capturing"):
            try:
                captured = self.capture_whole(call)
                if captured is not None:
                    return captured
                reason = PASSED_OVER
            except GraphBreak as broken:
                check_unbroken(self.model, str(broken))
                reason = str(broken)
        try:
            return self._in_regions(call, reason)
        except ValueError:  # memopt's own, such as CaptureError
            raise
        except Exception as failure:  # an error of the model itself, reported as one of capture: no step has run yet
            error = f"{reason}; running the rest of the forward failed: {in_brief_with_line(failure)}"
            raise CaptureError(cannot_capture(self.model, error)) from failure

    def capture_whole(self, call: Call) -> CapturedCall | None:
        """Capture a call as one region without running it; None where torch.compile does not compile the model. Raises
        `GraphBreak` where the call is not one region."""
        if not all(map(is_real, tensors_in(call))):
            call = with_zeros(call, self.planner.terms.device())
        found: CapturedCall | None = self._by_size(call, RecordedCalls.capture_whole, call)
        return found

    def needs_fakes(self, call: Call) -> bool:
        """Whether a call has to be captured on fake tensors: if the model has no values or will be cast to another
        dtype; and if the call has no values, unless the model is to be trained and no dtype depends on values."""
        if self.planner.optimizer_choice.narrowed is not None or not all(map(is_real, self.model.parameters())):
            return True
        runs_later = self.options.to_train and not self.planner.screens
        return not runs_later and not all(map(is_real, tensors_in(call)))

    def declared(self, call: Call) -> dict[Place, int | None]:
        """The dimensions of a call's tensors that the user declares to change (`dynamic`), each with its largest size;
        None where no largest size was declared."""
        return declared_sizes(self.options.dynamic, call, self.model, with_targets=self.planner.loss_fn is not None)

    def _in_regions(
        self, call: Call, reason: str, most_between: Callable[[], float] = lambda: math.inf
    ) -> CapturedCall:
        """Record the regions of a call that breaks for `reason`, by a run on its values. If the plan is not for
        training, it is captured on fakes first, and on values only if it does not break on fakes, or code between the
        regions needs values. If the model or the call has no values, it is captured on fakes alone. `most_between`
        returns the bytes that code between the regions may hold."""
        real = all(map(is_real, (*self.model.parameters(), *tensors_in(call))))
        only_fakes = not real or self.planner.optimizer_choice.narrowed is not None
        if not real or not self.options.to_train:
            try:
                on_fakes = self.planner.capture_on_fakes(call, self.planner.optimizer_choice.narrowed)
            except CaptureError:
                if only_fakes:
                    raise
            else:
                if only_fakes or not on_fakes.whole:
                    return on_fakes
        with stage("capturing"):
            return self.broken.capture(call, reason, most_between())

    def _by_size(self, call: Call, run: Callable[..., Any], *given: Any) -> Any:
        """The result of `run(recording, *given)` for the recording that serves the sizes of a call in one region."""
        whole = self._recording_for(call)
        for _ in range(1 + sum(map(torch.Tensor.dim, tensors_in(call)))):
            try:
                result = run(whole, *given)
            except Insists as insists:
                new = {at: line for at, line in insists.lines.items() if at not in self.size_bounds.fixed}
                self._fix(call, {at: line for at, line in new.items() if at in self.size_bounds.changed} or new)
                whole = self._own_of(call)
                continue
            if insists_on := whole.regions.insists:
                # A size that was marked together with others and never changes does not matter.
                self._fix(call, {at: line for at, line in insists_on.items() if at in self.size_bounds.changed})
            return result
        name = type(self.model).__name__
        raise CaptureError(
            f"{name} was captured for exactly {tensor_shapes(call)}, and yet the capture is not valid for them; "
            "this is a fault of memopt: report it with these shapes"
        )

    def _recording_for(self, call: Call) -> RecordedCalls:
        """The recording that serves a call in one region."""
        self._in_present_terms()
        if not self.size_bounds.fixed:
            self._first_shapes[tensor_shapes(call)] = True
            return self._first
        key = self._values(tensor_shapes(call))
        known = any(self._values(shapes) == key for shapes, _ in self._first_shapes.items())
        return self._first if known and key not in self._own else self._own_of(call)

    def _own_of(self, call: Call) -> RecordedCalls:
        """The recording for this call's values of the sizes that the model needs as constants."""
        key = self._values(tensor_shapes(call))
        if key not in self._own:
            self._own[key] = self._new(whole=True)
        return self._own[key]

    def _values(self, shapes: Shapes) -> tuple[int, ...]:
        """The values of the sizes that the model needs as constants; -1 for one that the call does not have."""
        has = {(number, dim) for number, shape in enumerate(shapes) for dim in range(len(shape))}
        return tuple(shapes[at[0]][at[1]] if at in has else -1 for at in sorted(self.size_bounds.fixed))

    def _fix(self, call: Call, lines: Mapping[Place, str]) -> None:
        """Record the sizes that the model needs as constants, each with the line that needs it; warns once for each."""
        for place in lines.keys() - self.size_bounds.fixed:
            self._own.clear()  # their keys lack this size
            self.size_bounds.fixed.add(place)
            name = f"{leaf_name(call, place[0])}.shape[{place[1]}]"
            warnings.warn(
                f"{type(self.model).__name__} needs {name} to be a constant at {lines[place]}: each value of it is "
                f"captured and planned separately, and the {_MOST_VALUES} used last are kept; pad batches to few "
                "sizes, or make that line independent of the size",
                stacklevel=2,
            )

    def _state(self, call: Call) -> tuple[str, int]:
        return call_signature(call), self._settings.number()
