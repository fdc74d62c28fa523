"""What a step holds by module, operator and line of code: the rows of a memory lock."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from memopt.capture.dynamo_graph import AUTHOR_CHECKPOINT
from memopt.device.storages import storage_bytes
from memopt.planning.changes import GraphFacts
from memopt.planning.plan import Plan
from memopt.planning.plan_graphs import named_nodes
from memopt.show.step import Step, smallest_memory, step_of
from passes.graphs.node_facts import is_tangent, module_path


@dataclass(frozen=True)
class LockedRow:
    """A row of a memory lock, the file that `memopt check --lock` compares a later step with: the memory that one line
    of code allocates by calls of one operator, in all modules where it allocates the same. Bytes, and seconds of
    recomputing, are those of one module. Parameters and inputs are listed at the line that reads them first."""

    modules: tuple[str, ...]
    """Paths of the modules, which differ in their numbers only; "" for what belongs to no module."""
    operator: str
    """The operator's name; for bytes that no operator makes, the row of the account."""
    source: str = ""
    """The line of code as "file:line"; "" where none is known."""
    code: str = ""
    made: int = 0
    """Bytes that the line makes in the captured step."""
    fused: int = 0
    """Bytes that only the plain step makes there: the captured step computes them within kernels that read them."""
    plain: int = 0
    """Bytes that are alive at the peak of the captured step with nothing recomputed."""
    planned: int = 0
    """Bytes that are alive at the peak of the planned step."""
    smallest: int = 0
    """Bytes that are alive at the peak within the smallest budget."""
    added: float = 0.0
    """Seconds of recomputing what the line makes."""
    calls: int = 0
    """The number of its calls, in the forward and the backward."""
    checkpointed: int = 0
    """The number of those that lie under `torch.utils.checkpoint`."""

    @property
    def pattern(self) -> str:
        """The path of the modules, with * in place of numbers."""
        return re.sub(r"(?<![^.])\d+(?![^.])", "*", self.modules[0])


_OWN = {"parameters": "parameters", "inputs": "inputs", "buffers": "inputs", "optimizer state": "optimizer state"}
"""The rows of the account that the user's code makes, with their names in locks. Only these count as made: of the
others, such as gaps between blocks, there may be more at one peak than at another."""
FIGURES = ("made", "fused", "plain", "planned", "smallest", "added", "calls", "checkpointed")
"""The names of a row's fields that are numbers."""


def locked_rows(plan: Plan) -> tuple[LockedRow, ...]:
    """The rows of a memory lock, in the order of the step, from a plan with its graphs. Counted once for each module
    of a row, the bytes `plain` of all rows add up to the peak of the captured step, `planned` to that of the planned
    step, and `smallest` to that of the step within the smallest budget."""
    found: dict[tuple[str, LockedRow], list[LockedRow]] = defaultdict(list)
    for row in _rows(plan, step_of(plan)):
        found[row.pattern, replace(row, modules=())].append(row)
    return tuple(replace(same[0], modules=tuple(row.modules[0] for row in same)) for same in found.values())


def _rows(plan: Plan, step: Step) -> Iterator[LockedRow]:
    """A row for each combination of module, operator and line."""
    memories = {"plain": step.plain, "planned": step.planned, "smallest": smallest_memory(plan, step)}
    keys = [(op.module, op.operator or op.name, op.source, op.code) for op in step.ops]
    nodes = {name: node for name, _, node in named_nodes(plan.solved[0].traced)}
    found: dict[tuple[str, str, str, str], Counter[str]] = defaultdict(Counter)
    seconds: dict[tuple[str, str, str, str], float] = defaultdict(float)
    given: Counter[str] = Counter()
    for row, (module, source, code), nbytes in _given(plan):
        given[row] += nbytes
        found[module, row, source, code].update(dict.fromkeys(("made", *memories), nbytes))
    for key, op in zip(keys, step.ops, strict=True):
        node = nodes.get(op.name)
        fused = storage_bytes(node.meta["val"]) if node is not None and op.fate == "fused" else 0
        checkpointed = node is not None and AUTHOR_CHECKPOINT in node.meta.get("custom", ())
        made = op.nbytes * (op.half != "input")
        found[key].update(made=made, fused=fused, calls=1, checkpointed=int(checkpointed))
        seconds[key] += op.seconds * op.recomputed
    for row, nbytes in step.plain.resident.items():
        if row in _OWN:
            found["", _OWN[row], "", ""]["made"] += nbytes
    for figure, memory in memories.items():
        for number, _, nbytes in memory.alive(memory.peak):
            found[keys[number]][figure] += nbytes
        for row, nbytes in memory.rows(memory.peak).items():
            found["", _OWN.get(row, row), "", ""][figure] += nbytes
    for row, nbytes in given.items():  # the account's rows keep the bytes that belong to no module
        found["", row, "", ""].subtract(dict.fromkeys(("made", *memories), nbytes))
    for (module, operator, source, code), figures in found.items():
        if any(nbytes for name, nbytes in figures.items() if name != "calls"):
            added = seconds[module, operator, source, code]
            counted = {name: figures[name] for name in FIGURES if name != "added"}
            yield LockedRow((module,), operator, source, code, added=added, **counted)


def _given(plan: Plan) -> Iterator[tuple[str, tuple[str, str, str], int]]:
    """For each input of the graphs: its row of the account; the module, line and code that read it first; its bytes."""
    for number, region in enumerate(plan.solved[0].traced.regions):
        graph = region.module.graph
        facts = GraphFacts(graph, number)
        inputs = [node for node in graph.find_nodes(op="placeholder") if not is_tangent(node)]
        for at, node in enumerate(inputs):
            reader = next(iter(node.users), None)
            place = ("", "", "") if reader is None else (module_path(reader), *facts.line(reader))
            row = "parameters" if at in region.parameter_inputs else "inputs"
            yield row, place, storage_bytes(node.meta.get("val"))
