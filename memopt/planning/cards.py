"""A planned step on other cards: whether it fits there, in which time, and how much larger a batch would fit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from memopt.account.account import Account, for_card
from memopt.account.breakdown import ANY_LINK, GRADIENTS, live_bytes_by_kind
from memopt.device import Hardware, hardware, known_hardware
from memopt.device.devices import device_of
from memopt.errors import BudgetError
from memopt.levers.offload_activations import OFFLOAD_ACTIVATIONS, offload_link
from memopt.planning.on_card import on_card
from memopt.planning.options import Effort
from memopt.planning.planner import NEGLIGIBLE, Request, smallest, solve_on_card
from memopt.planning.priced_step import PricedStep
from memopt.progress import stage
from memopt.solver import simulate


@dataclass(frozen=True)
class OnCard:
    """A step on a card, within all of its memory."""

    name: str
    memory_bytes: int
    needed_bytes: int
    """The smallest budget that works there."""
    seconds: float | None
    """Forward and backward as planned for it, by the time model; None where the step does not fit."""
    added_time: float | None
    """The added time in it, as a fraction of the step with nothing recomputed there."""
    batches: float
    """The largest batch that fits, as about how many times this batch, with as much recomputed as in the schedule with
    the smallest peak."""

    @property
    def fits(self) -> bool:
        return self.seconds is not None


def on_cards(steps: Mapping[PricedStep, Account]) -> Iterator[OnCard]:
    """A step on each known card of the same kind as its own, those with less memory first. `steps` has it under one or
    several sets of levers, each with its account. It is priced anew from the same graphs, and solved with little
    effort.

    Cards without units for the step's 16-bit dtype are left out, as plans for them have another precision. There are
    none where it is planned for a CPU, whose graphs have other kernels, or for a cluster."""
    first = next(iter(steps))
    own = first.settings.hardware
    if device_of(own).is_host or first.traced.sharded is not None:
        return
    cards = [card for card in map(hardware, known_hardware()) if card.device_type == own.device_type]
    low = str(first.traced.rewriting.autocast or "torch.float32").removeprefix("torch.")
    with stage("planning for other cards") as tell:
        for card in sorted(cards, key=lambda card: (card.memory_bytes, card.name)):
            if low in card.flops:
                tell(card.name)
                yield _best([_on(card, step, for_card(account, card)) for step, account in steps.items()])


def _best(rows: Sequence[OnCard]) -> OnCard:
    """One row from those of a card under several sets of levers: the first that adds next to no time, as no further
    levers are tried then, else the fastest. It has the smallest `needed_bytes` and the most `batches` of all rows."""
    by_time = sorted(rows, key=lambda row: math.inf if row.seconds is None else row.seconds)
    fastest = next((row for row in rows if row.added_time is not None and row.added_time <= NEGLIGIBLE), by_time[0])
    needed, batches = min(row.needed_bytes for row in rows), max(row.batches for row in rows)
    return replace(fastest, needed_bytes=needed, batches=batches)


def _on(card: Hardware, step: PricedStep, account: Account) -> OnCard:
    """A step under one set of levers on a card."""
    link = None if step.settings.link is None else offload_link(card, {OFFLOAD_ACTIVATIONS.name})
    joined = step.traced.price(replace(step.settings, hardware=card, link=link)).problem
    seconds = added = None
    with suppress(BudgetError):
        taken, solution, _ = solve_on_card(joined, Request(account, card.memory_bytes, Effort("fast")))
        seconds = taken.problem.seconds + solution.added_seconds
        added = solution.added_seconds / taken.problem.seconds if taken.problem.seconds else 0.0
    # Of what the smallest plan holds at its peak, all but parameters, their gradients and the optimiser grows with the
    # batch.
    schedule, problem = joined.smallest.schedule, joined.problem
    held = on_card(joined, schedule, account)
    live = live_bytes_by_kind(problem, schedule, simulate(problem, schedule, ANY_LINK).peak_position)
    grows = sum(live.values()) - live.get(GRADIENTS, 0) + held.inputs + held.rounding + held.fragmentation
    stays = held.resident_bytes - held.inputs - held.rounding - held.fragmentation + live.get(GRADIENTS, 0)
    stepping = held.optimizer_step_bytes(problem.output_bytes)
    batches = max(0.0, (card.memory_bytes - stays) / grows) if stepping <= card.memory_bytes else 0.0
    return OnCard(card.name, card.memory_bytes, smallest(joined, account)[0], seconds, added, batches)
