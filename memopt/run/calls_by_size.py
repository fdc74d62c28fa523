"""Training calls of models that insist on sizes: captured by themselves for each value of these sizes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from memopt.capture.dynamic_shapes import Place
from memopt.capture.inputs import Call, leaf_name, tensors_in
from memopt.capture.region import CapturedCall
from memopt.errors import CaptureError
from memopt.planning.plan import Plan
from memopt.planning.situation import Situation
from memopt.recent import Recent
from memopt.run.ceilings import Ceilings
from memopt.run.on_demand import Notice
from memopt.run.road import Road
from memopt.run.under_way import UnderWay
from memopt.run.whole_calls import InsistsOnSizes, WholeCalls

_MOST = 32
"""The number of captures that are kept for values of sizes that the model insists on: those that were used last."""

Shapes: TypeAlias = tuple[tuple[int, ...], ...]


class CallsBySize:
    """Plans and runs calls without graph breaks.

    One capture with symbolic sizes serves all calls, until the model turns out to insist on a size: its code takes it
    as a constant, or branches on it. From then on each value of that size gets a capture of its own.
    """

    def __init__(
        self,
        to_capture: Callable[[], Callable[..., Any]],
        road: Road,
        ceilings: Ceilings,
        *,
        differentiate_all: bool,
    ) -> None:
        self._ceilings, self._road, notice = ceilings, road, Notice()

        def make() -> WholeCalls:
            return WholeCalls(to_capture, self._road, self._ceilings, notice, differentiate_all=differentiate_all)

        self._make = make
        self._name = type(road.planner.model).__name__
        self._first = make()
        self._first_shapes: Recent[Shapes, bool] = Recent(_MOST)
        """The shapes of calls that the first capture serves."""
        self._own: Recent[tuple[int, ...], WholeCalls] = Recent(_MOST)
        """The captures for values of the sizes that the model insists on, `Ceilings.fixed`."""

    def run(self, under_way: UnderWay) -> Any:
        """Run a planned call. Raises `GraphBreak` where it is not one region, `BudgetError`, `CaptureError`."""
        return self._with(under_way.call, lambda whole: whole.run(under_way))

    def capture(self, call: Call) -> CapturedCall | None:
        """Record a call without running it; None where torch.compile passes it over. Raises `GraphBreak`."""
        found: CapturedCall | None = self._with(call, lambda whole: whole.capture(call))
        return found

    def planned(self, captured: CapturedCall, call: Call, situation: Situation, plan: Plan) -> None:
        """Have the first run of such a call in this situation use a plan that was made ahead."""
        self._for(call).planned(captured, situation, plan)

    def forget(self) -> None:
        """Drop all plans and emitted code, so that calls are planned again; recorded regions are kept."""
        for whole in self._captures():
            whole.forget()

    def travel_by(self, road: Road) -> None:
        """Have recorded regions planned again, by another road."""
        self._road = road
        for whole in self._captures():
            whole.travel_by(road)

    def _captures(self) -> Iterable[WholeCalls]:
        return self._first, *(whole for _, whole in self._own.items())

    def _with(self, call: Call, run: Callable[[WholeCalls], Any]) -> Any:
        whole = self._for(call)
        for _ in range(1 + sum(tensor.dim() for tensor in tensors_in(call))):
            try:
                result = run(whole)
            except InsistsOnSizes as insists:
                self._fix(call, insists.lines)
                whole = self._own_of(call)
                continue
            self._fix(call, whole.insists)
            return result
        raise CaptureError(f"{self._name} was captured for {_shapes(call)} alone, and the capture is not valid for it")

    def _for(self, call: Call) -> WholeCalls:
        """The capture that serves a call."""
        if not self._ceilings.fixed:
            self._first_shapes[_shapes(call)] = True
            return self._first
        key = self._values(_shapes(call))
        known = any(self._values(shapes) == key for shapes, _ in self._first_shapes.items())
        return self._first if known and key not in self._own else self._own_of(call)

    def _own_of(self, call: Call) -> WholeCalls:
        """The capture for this call's values of the sizes that the model insists on."""
        key = self._values(_shapes(call))
        if key not in self._own:
            self._own[key] = self._make()
        return self._own[key]

    def _values(self, shapes: Shapes) -> tuple[int, ...]:
        """The values of the sizes that the model insists on; -1 for one that the call does not have."""
        has = {(number, dim) for number, shape in enumerate(shapes) for dim in range(len(shape))}
        return tuple(shapes[at[0]][at[1]] if at in has else -1 for at in sorted(self._ceilings.fixed))

    def _fix(self, call: Call, lines: Mapping[Place, str]) -> None:
        """Note the sizes that the model insists on; said once for each."""
        for place in lines.keys() - self._ceilings.fixed:
            self._own.clear()  # their keys lack this size
            self._ceilings.fixed.add(place)
            name = f"{leaf_name(call, place[0])}.shape[{place[1]}]"
            warnings.warn(
                f"{self._name} insists on {name} at {lines[place]}: each value of it is captured and planned by "
                f"itself, and the {_MOST} used last are kept; pad batches to few sizes, or make that line independent "
                "of the size",
                stacklevel=2,
            )


def _shapes(call: Call) -> Shapes:
    return tuple(tuple(tensor.shape) for tensor in tensors_in(call))
