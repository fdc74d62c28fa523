"""The rows of a plan's account as coloured bands over the time of a step, and the small HTML picture of them that
notebooks show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from memopt.account.account import FETCHED, GRADIENTS, OUTPUTS, RECOMPUTED, SAVED, TEMPORARIES, WORKSPACE
from memopt.planning.plan import Plan
from memopt.show.report import headline
from memopt.show.step import Step, StepMemory, step_of
from memopt.units import size

OTHER = "other rows"
COLOURS = {
    "parameters": "#8893a1",
    "optimizer state": "#b0b9c4",
    OTHER: "#d3d9e0",
    GRADIENTS: "#7a5ba6",
    OUTPUTS: "#b79ad6",
    SAVED: "#3f7fbf",
    FETCHED: "#c7577f",
    RECOMPUTED: "#e08a3c",
    TEMPORARIES: "#4fa08b",
    "optimizer temporaries": "#4fa08b",
    WORKSPACE: "#c9a227",
}
"""The bands from the bottom to the top, with their colours; all rows of the account that are not here make one band."""
_OPTIMIZER_SHARE = 0.035  # the optimizer's step, whose time is not known, takes this share of the axis
_WIDTH, _HEIGHT, _COLUMNS = 860, 220, 430
_STYLE = """
.memopt-heart { font: 13px/1.5 system-ui, sans-serif; max-width: 860px; color: inherit; }
.memopt-heart .bar { display: flex; height: 18px; margin: 2px 0; }
.memopt-heart .bar i { display: block; }
.memopt-heart .label { opacity: 0.75; }
.memopt-heart .keys { display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 4px 0; }
.memopt-heart .keys i { display: inline-block; width: 10px; height: 10px; margin-right: 6px; border-radius: 2px; }
.memopt-heart svg { width: 100%; height: auto; display: block; margin-top: 8px; overflow: visible; }
.memopt-heart text { font-size: 11px; fill: currentColor; opacity: 0.75; }
""".strip()


def band_of(row: str) -> str:
    """The name of the coloured band of the memory chart in which `row`, a row of the account, is drawn."""
    return row if row in COLOURS else OTHER


def edges(memory: StepMemory) -> list[float]:
    """The seconds from the beginning of the step at which its moments begin, and at which the last one ends: that of
    the optimizer's step, which is drawn as long as a fixed share of the rest."""
    end = memory.seconds or 1.0
    return [*(one.start for one in memory.evaluations), end, end * (1 + _OPTIMIZER_SHARE)]


def end_of(step: Step) -> float:
    """The seconds that the time axis of a step spans, as planned and with nothing recomputed."""
    return max(edges(step.planned)[-1], edges(step.plain)[-1])


def columns(memory: StepMemory, count: int, end: float) -> list[int | None]:
    """For each of `count` columns up to `end` seconds, the moment with the most bytes; None after the step."""
    at: list[int | None] = [None] * count
    places = [min(count - 1, int(second / end * count)) for second in edges(memory)]
    for moment, live in enumerate(memory.live_bytes):
        for column in range(places[moment], places[moment + 1] + 1):
            other = at[column]
            if other is None or live > memory.live_bytes[other]:
                at[column] = moment
    return at


def bands(memory: StepMemory, moments: Sequence[int | None]) -> dict[str, list[int]]:
    """For each coloured band of the memory chart, its bytes at the given moments of the step; 0 at None, a column after
    the step (`columns`). Bands that are empty at all moments are left out."""
    by_moment: list[Counter[str]] = []
    for rows in memory.held():
        by_moment.append(Counter())
        for row, nbytes in rows.items():
            by_moment[-1][band_of(row)] += nbytes
    found = {band: [0 if moment is None else by_moment[moment][band] for moment in moments] for band in COLOURS}
    return {band: values for band, values in found.items() if any(value > 0 for value in values)}


def notebook(plan: Plan) -> str:
    """A plan as a piece of HTML for notebooks: headline, a bar for the peak with nothing recomputed and one for the
    planned peak, and, where the plan has graphs, its memory over time."""
    used = {band_of(row) for row, nbytes in (*plan.plain.rows, *plan.planned.rows) if nbytes > 0}
    picture = ""
    if plan.source is not None:
        step = step_of(plan)
        found = bands(step.planned, columns(step.planned, _COLUMNS, end_of(step)))
        used |= set(found)
        picture = _picture(plan, step, found)
    keys = "".join(f'<span><i style="background:{COLOURS[band]}"></i>{band}</span>' for band in COLOURS if band in used)
    return (
        f'<div class="memopt-heart"><style>{_STYLE}</style><p>{escape(headline(plan))}</p>'
        f'{_bars(plan)}<div class="keys">{keys}</div>{picture}</div>'
    )


def _bars(plan: Plan) -> str:
    """Two bars, for the peak with nothing recomputed and the planned one, each divided into the rows of the account."""
    whole = max(plan.plain.peak_bytes, plan.planned.peak_bytes)
    order = list(COLOURS)
    text = ""
    for label, peak in (("nothing recomputed", plan.plain), ("planned", plan.planned)):
        rows = sorted(peak.rows, key=lambda row: order.index(band_of(row[0])))
        parts = "".join(
            f'<i style="width:{100 * nbytes / whole:.2f}%;background:{COLOURS[band_of(row)]}" '
            f'title="{escape(row)}: {size(nbytes)}"></i>'
            for row, nbytes in rows
            if nbytes > 0
        )
        text += f'<div class="label">{label}: {size(peak.peak_bytes)}</div><div class="bar">{parts}</div>'
    return text


def _picture(plan: Plan, step: Step, found: Mapping[str, Sequence[int]]) -> str:
    """Bands of the planned memory, a line of the memory with nothing recomputed, and the budget, as SVG."""
    most = 1.06 * max(step.plain.peak_bytes, step.planned.peak_bytes)
    moments = enumerate(columns(step.plain, _COLUMNS, end_of(step)))
    points = [(at, step.plain.live_bytes[moment]) for at, moment in moments if moment is not None]
    line = f"M0 {_y(points[0][1], most)}{_stairs(points, most, 1)}"
    limit = ""
    if plan.budget_bytes <= most:
        up = _y(plan.budget_bytes, most)
        limit = (
            f'<line x1="0" x2="{_WIDTH}" y1="{up}" y2="{up}" stroke="#b3421f" stroke-dasharray="6 4"/>'
            f'<text x="{_WIDTH}" y="{up - 4:.1f}" text-anchor="end">budget {size(plan.budget_bytes)}</text>'
        )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="memory over the step">'
        f"{''.join(_areas(found, most))}"
        f'<path d="{line}" fill="none" stroke="currentColor" stroke-width="1.2"/>{limit}</svg>'
    )


def _areas(found: Mapping[str, Sequence[int]], most: float) -> Iterator[str]:
    """An SVG path for each band, on top of the bands before it; `most` is the bytes at the top of the picture."""
    base: Sequence[int] = [0] * _COLUMNS
    for band, values in found.items():
        top = [low + value for low, value in zip(base, values, strict=True)]
        there, back = _stairs(list(enumerate(top)), most, 1), _stairs(list(enumerate(base))[::-1], most, 0)
        yield f'<path d="M0 {_y(top[0], most)}{there}{back}Z" fill="{COLOURS[band]}"><title>{band}</title></path>'
        base = top


def _stairs(points: Sequence[tuple[int, int]], most: float, side: int) -> str:
    """The SVG path along the tops of columns, (column, bytes), to the left (`side` 0) or right (`side` 1) of the last
    one; `most` is the bytes at the top of the picture."""
    width = _WIDTH / _COLUMNS
    text, before = "", None
    for at, nbytes in points:
        height = _y(nbytes, most)
        if height != before:
            text += f"H{(at + 1 - side) * width:.0f}V{height}"
        before = height
    return f"{text}H{(points[-1][0] + side) * width:.0f}"


def _y(nbytes: int, most: float) -> float:
    return round(_HEIGHT * (1 - nbytes / most), 1)
