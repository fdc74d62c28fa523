"""What a plan changes in its captured step, and the changes that only one of two plans makes (`Plan.diff`); and such
changes folded into rows: what repeats in the blocks of a model is shown once, and similar changes share a row."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from memopt.planning.changes import (
    DTYPE,
    IN_PLACE,
    KEPT,
    KINDS,
    OFFLOADED,
    RECOMPUTED,
    SAVED,
    Change,
    GraphFacts,
    between,
    pass_changes,
    schedule_changes,
)
from memopt.planning.plan import Plan
from memopt.planning.plan_graphs import PlanDiff, StageDiff
from memopt.planning.priced_step import PricedStep
from memopt.units import size
from passes import diff_graphs


def plan_diff(plan: Plan, step: PricedStep, *, order: bool) -> PlanDiff:
    """A plan's changes to the captured `step` (`Plan.diff`); with `order`, also operators that only moved."""
    changes = [*pass_changes(step.traced), *schedule_changes(step.traced, step.problem, plan.regions, order=order)]
    for path, nbytes in plan.kept:
        reason = "so that the backward need not gather them again"
        changes.append(Change(KEPT, "parameters", path, "parameters", nbytes=nbytes, reason=reason))
    regions = step.traced.regions
    graphs = [one.operators.stages[0] for one in regions if one.operators and one.operators.stages]
    graphs += [region.module for region in regions]
    # in the order of the forward as its author wrote it
    modules = dict.fromkeys(path for module in graphs for path in GraphFacts(module.graph, 0).modules)
    return diff_of(plan, tuple(changes), tuple(modules), lambda stage: plan.diff(stage, order=order))


def diff_of(
    plan: Plan, changes: tuple[Change, ...], modules: tuple[str, ...], of_stage: Callable[[str], StageDiff]
) -> PlanDiff:
    """The diff that shows a plan's `changes`; `modules` and `of_stage` are fields of `PlanDiff`."""
    return PlanDiff(f"{plan.model} on {plan.hardware} within {_budget(plan)}", changes, modules, of_stage)


def diff_between(
    plan: Plan, own: PlanDiff, other: Plan, others: PlanDiff, of_stage: Callable[[str], StageDiff]
) -> PlanDiff:
    """The changes that only one of two plans makes; `own` and `others` have all that each makes."""
    title = (
        f"{plan.model} on {plan.hardware}: + is done only by the plan within {_budget(plan)}, "
        f"- only by the plan within {_budget(other)}"
    )
    modules = dict.fromkeys((*own.modules, *others.modules))
    return PlanDiff(title, between(others.changes, own.changes), tuple(modules), of_stage)


def plans_diff(plan: Plan, step: PricedStep, other: Plan, others: PricedStep, *, order: bool) -> PlanDiff:
    """The changes that only one of two plans makes (`Plan.diff`); `step` and `others` are their steps."""

    def of_stage(stage: str) -> StageDiff:
        graphs = [one.graphs for one in (other, plan)]
        if not all(stage in known for known in graphs):
            both = [repr(name) for name in graphs[0] if all(name in known for known in graphs)]
            raise ValueError(f"no stage {stage!r} in both plans; give one of {', '.join(both)}")
        before, after = (known[stage] for known in graphs)
        if len(before) != len(after):
            raise ValueError(
                f"the plans are of {len(before)} and {len(after)} regions, which cannot be compared line by line; "
                "print plan.diff(other) instead"
            )
        return StageDiff(tuple(diff_graphs(old, new, order=order) for old, new in zip(before, after, strict=True)))

    own, before = plan_diff(plan, step, order=order), plan_diff(other, others, order=order)
    return diff_between(plan, own, other, before, of_stage)


def _budget(plan: Plan) -> str:
    return size(plan.budget_bytes)


_BY_LINE = (RECOMPUTED, OFFLOADED, SAVED)
_DEPTHS, _OTHER_DEPTHS = (9, 9, 9, 9, 1, 0), (9, 1, 0, 0, 0, 0)
LEVELS = len(_DEPTHS)
"""The number of levels of folding. At level 0 a row is for one line of the user's code and for operators that change in
the same blocks; at the last it is for a whole part of the model. Changes of dtype and results in place are folded
earlier than recomputations and offloads: `_DEPTHS` and `_OTHER_DEPTHS` say by how many parts of a module's path within
its block each level tells modules apart."""


@dataclass(frozen=True)
class _ModulePlace:
    """Where a module is in the model: its section (all blocks of one list, or a path outside of blocks), its block, and
    its path within the block."""

    section: str
    """The path with "*" for the block's number: "transformer.h.*"; the whole path outside of blocks."""
    block: str = ""
    """The path of the block, as "transformer.h.3"; "" outside of blocks."""
    inner: str = ""
    """The module's path within the block."""


@dataclass(frozen=True)
class DiffEntry:
    """One change that operators at the same place in several blocks of a section have in common."""

    place: _ModulePlace
    by_block: Mapping[str, Change]
    """The change in each block, by the block's path in the order of the blocks; by "" in a section without blocks."""

    @property
    def first(self) -> Change:
        return next(iter(self.by_block.values()))

    @property
    def blocks(self) -> frozenset[str]:
        return frozenset(self.by_block)


@dataclass(frozen=True)
class Row:
    """One line of a plan's diff: the entries (changes) that it shows together."""

    section: str
    inner: str
    entries: tuple[DiffEntry, ...]

    @property
    def first(self) -> Change:
        return self.entries[0].first

    @property
    def blocks(self) -> frozenset[str]:
        """The paths of the blocks to which at least one of the entries applies."""
        return frozenset().union(*(entry.blocks for entry in self.entries))

    def figures(self) -> tuple[int, float, bool]:
        """The most bytes, with their seconds, in one block; and whether the bytes are the same in all blocks."""
        changes = {block: [e.by_block[block] for e in self.entries if block in e.by_block] for block in self.blocks}
        sums = {
            (sum(change.nbytes * max(change.times, 1) for change in some), sum(change.seconds for change in some))
            for some in changes.values()
        }
        nbytes, seconds = max(sums)
        return nbytes, seconds, len({found[0] for found in sums}) == 1


def places(paths: Iterable[str]) -> dict[str, _ModulePlace]:
    """For each module path, the block of the model that it lies in, if any, and its path within the block. A list of
    modules counts as a list of blocks if the paths have submodules of at least two of its elements."""
    paths = tuple(paths)
    numbers: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for path in paths:
        parts = path.split(".")
        for at, part in enumerate(parts[:-1]):
            if part.isdigit():
                numbers[_starred(parts[:at])].add(part)
    blocks = {prefix for prefix, found in numbers.items() if len(found) > 1}
    return {path: _place(path.split("."), blocks) for path in paths}


def _starred(parts: Sequence[str]) -> tuple[str, ...]:
    return tuple("*" if part.isdigit() else part for part in parts)


def _place(parts: list[str], blocks: set[tuple[str, ...]]) -> _ModulePlace:
    stars = [at for at, part in enumerate(parts) if part.isdigit() and _starred(parts[:at]) in blocks]
    if not stars:
        return _ModulePlace(".".join(parts))
    section = ["*" if at in stars else part for at, part in enumerate(parts)][: stars[-1] + 1]
    return _ModulePlace(".".join(section), ".".join(parts[: stars[-1] + 1]), ".".join(parts[stars[-1] + 1 :]))


def blocks_of(where: Mapping[str, _ModulePlace]) -> dict[str, list[str]]:
    """The paths of the blocks of each section, [""] for one without blocks, in the order of `where` (`places`)."""
    sections: dict[str, dict[str, None]] = defaultdict(dict)
    for place in where.values():
        sections[place.section][place.block] = None
    return {section: list(blocks) for section, blocks in sections.items()}


def entries(changes: Iterable[Change], where: Mapping[str, _ModulePlace]) -> list[DiffEntry]:
    """The changes as entries: changes that differ only in their block become one. Entries are in the order of their
    modules in `where`, which has the place of each module by its path (`places`)."""
    order = {path: number for number, path in enumerate(where)}
    alike: dict[object, list[Change]] = defaultdict(list)
    for change in sorted(changes, key=lambda change: order[change.module]):
        place = where[change.module]
        region = 0 if place.block else change.region
        what = change.sign, change.kind, change.operator, change.source, change.number, change.detail
        alike[(place.section, place.inner, *what, region)].append(change)
    return [DiffEntry(where[some[0].module], {where[one.module].block: one for one in some}) for some in alike.values()]


def rows(found: Iterable[DiffEntry], level: int) -> list[Row]:
    """The entries as rows; each higher level (0 to `LEVELS` - 1) shows more entries in one row. Rows are sorted by
    section and module in the order of the entries, and by kind of change within a module."""
    groups: dict[tuple[tuple[str, str], object], list[DiffEntry]] = defaultdict(list)
    modules: dict[tuple[str, str], int] = {}
    for entry in found:
        section = entry.place.section
        if level == LEVELS - 1 and not entry.place.block:
            section = section.split(".")[0]
        depths = _DEPTHS if entry.first.kind in _BY_LINE else _OTHER_DEPTHS
        place = section, ".".join(entry.place.inner.split(".")[: depths[level]])
        modules.setdefault(place, len(modules))
        groups[place, _what(entry, level)].append(entry)
    made = [Row(*place, tuple(some)) for (place, _), some in groups.items()]
    sections = list(dict.fromkeys(section for section, _ in modules))
    return sorted(
        made,
        key=lambda row: (
            sections.index(row.section),
            row.inner != "" and modules[row.section, row.inner] + 1,
            KINDS.index(row.first.kind),
            row.first.sign,
        ),
    )


def _what(entry: DiffEntry, level: int) -> tuple[object, ...]:
    """A key by which entries of one module are grouped into rows; it tells less apart at each higher `level`."""
    change = entry.first
    in_detail = change.kind in (DTYPE, SAVED) or (level == 0 and change.kind != IN_PLACE)
    place = change.source * (level <= 2) if change.kind in _BY_LINE else change.reason * (level == 0)
    return change.sign, change.kind, change.detail * in_detail, place, entry.blocks if level == 0 else None
