"""The step of one card of a cluster: its time, what bounds it, and the table that shows both."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

from memopt.units import duration, size

COMPUTE, MEMORY, GATHER, REDUCE, EXCHANGE = "compute", "memory", "gather", "reduce", "tensor parallel"


@dataclass(frozen=True)
class ClusterStep:
    """The time of a whole step, optimiser included, on one card of a cluster, by the time model. Times in seconds."""

    mesh: str
    cards: int
    interconnect: str
    bounds: tuple[tuple[str, float], ...]
    """The seconds of the step by what bounds them, the largest first. "compute": arithmetic; "memory": the card's
    memory traffic and launches; "gather" and "reduce": exchanges of parameters and gradients that take longer than the
    block computes beside which they run; "tensor parallel": exchanges within the layers."""
    gathers_seconds: float
    """All gathers of parameters, most of which run beside compute."""
    reductions_seconds: float
    """All reductions of gradients, likewise."""
    blocks: tuple[tuple[str, int, float, float, float, float], ...]
    """Each group of parameters: path, bytes gathered, seconds to gather once and to reduce, seconds of its forward and
    of its backward with what is recomputed in it. "" is the root's group."""

    @property
    def seconds(self) -> float:
        """The whole step."""
        return sum(seconds for _, seconds in self.bounds)

    @property
    def bound(self) -> str:
        """What bounds most of the step."""
        return self.bounds[0][0]


def cluster_table(step: ClusterStep) -> Table:
    """The seconds of a card's step by what bounds them, and the exchanges of its groups of parameters."""
    table = Table(title=headline(step), title_justify="left")
    table.add_column("bounded by")
    for title in ("time", "of the step"):
        table.add_column(title, justify="right")
    for name, seconds in step.bounds:
        table.add_row(name, duration(seconds), f"{seconds / step.seconds:.1%}")
    table.add_section()
    table.add_row("all gathers", duration(step.gathers_seconds), "")
    table.add_row("all reductions", duration(step.reductions_seconds), "")
    largest = max(step.blocks, key=lambda block: block[1])
    table.add_row(f"largest group ({largest[0] or 'root'})", size(largest[1]), "")
    return table


def headline(step: ClusterStep) -> str:
    """The cluster and the time of its step in one sentence."""
    return (
        f"On {step.cards:,} cards ({step.mesh}) over {step.interconnect}: a step takes {duration(step.seconds)}, most "
        f"of it bounded by {step.bound}"
    )
