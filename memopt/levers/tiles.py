"""The lever that runs operators on one part of the rows at a time, where no row depends on another."""

from __future__ import annotations

from dataclasses import dataclass

from memopt.capture.operators import Decision, OperatorGraph
from memopt.levers.lever import GraphChange, Lever
from memopt.units import size
from passes import EliminateDeadCode, Pipeline, RowSegment, TileRows, find_row_segments

LABEL = "tiles"


@dataclass(frozen=True)
class _Tile:
    """Decides which segments of a region run in `tiles` parts, one by one: those that hold the most bytes inside."""

    tiles: int

    def __call__(self, graph: OperatorGraph) -> Decision:
        segments = find_row_segments(graph.module, self.tiles, graph.parameter_inputs)
        if not segments:
            reason = "no operators that compute each row by itself hold much more than they read and return"
            return Decision(Pipeline((), label=LABEL), notes=(f"{LABEL}: nothing is run in tiles, since {reason}",))
        # For a symbolic number of rows this adds a guard, so that a batch with fewer rows is captured again.
        enough = all(segment.rows >= segment.tiles(self.tiles) for segment in segments)
        assert enough
        passes = TileRows(segments, self.tiles), EliminateDeadCode()
        reasons = {name: "in tiles" for segment in segments for name, _ in segment.members}
        return Decision(Pipeline(passes, label=LABEL), reasons, (self._note(segments),))

    def _note(self, segments: tuple[RowSegment, ...]) -> str:
        by_rows = [segment for segment in segments if segment.most_tiles is None]
        parts = []
        if by_rows:
            largest = max(by_rows, key=lambda segment: segment.inside_bytes)
            inside = f"{largest} with {size(largest.inside_bytes)} inside"
            parts.append(f"{len(by_rows)} operator sequences run in {self.tiles} tiles of rows, the largest {inside}")
        if attention := len(segments) - len(by_rows):
            parts.append(f"{attention} calls of attention on some of their heads at a time")
        return f"{LABEL}: {'; '.join(parts)}; equal but for rounding, as gradients are summed in another order"


TILES = Lever(
    LABEL,
    "Operators that compute each row by itself, as those of an MLP, run on one part of the rows after the other.",
    "rounding",
    "smaller kernels and more of them, and a longer search",
    graph=GraphChange(tuple(map(_Tile, (4, 16)))),
)
