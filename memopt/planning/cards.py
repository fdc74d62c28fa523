"""A planned step on other cards: whether it fits there, in which time, and how much larger a batch would fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeAlias

from memopt.account.account import Account, for_card
from memopt.device import Hardware, hardware, known_hardware
from memopt.device.devices import device_of
from memopt.errors import BudgetError, CaptureError
from memopt.levers.all import OFFLOAD_ACTIVATIONS, offload_link
from memopt.planning.options import Effort
from memopt.planning.planner import NEGLIGIBLE, Request, smallest, solve_on_card
from memopt.planning.priced_step import PricedStep
from memopt.progress import stage


@dataclass(frozen=True)
class OnCard:
    """The step on one card, with all of the card's memory as the budget."""

    name: str
    memory_bytes: int
    needed_bytes: int
    """The smallest budget within which the step fits on this card."""
    seconds: float | None
    """Seconds of forward and backward as planned for this card, by the time model; None where the step does not fit."""
    added_time: float | None
    """Added time as a fraction of the step with nothing recomputed on this card; None as for `seconds`."""
    batches: float | None
    """An estimate of the largest batch that fits, as a multiple of this one; None if none can be captured."""

    @property
    def fits(self) -> bool:
        return self.seconds is not None


def on_cards(steps: Mapping[PricedStep, Account], larger: Larger) -> Iterator[OnCard]:
    """The step on each known card of the device type that it was planned for, by ascending memory. `steps` has the step
    under one or several sets of levers, each with its account. `larger(n)` gives the step with a batch n times as
    large, and its account. Steps are priced anew from the same graphs, and solved with effort "fast".

    Cards without units for the step's 16-bit dtype are left out, as plans for them have another precision. Nothing is
    yielded for a step that is planned for a CPU, whose graphs have other kernels, or for a cluster."""
    first = next(iter(steps))
    own = first.settings.hardware
    if device_of(own).is_host or first.traced.sharded is not None:
        return
    cards = [card for card in map(hardware, known_hardware()) if card.device_type == own.device_type]
    low = str(first.traced.rewriting.autocast or "torch.float32").removeprefix("torch.")
    with stage("planning for other cards") as tell:
        tell("larger batches")
        growth = _Growth.of(larger, own)
        for card in sorted(cards, key=lambda card: (card.memory_bytes, card.name)):
            if low in card.flops:
                tell(card.name)
                accounts = {step: for_card(account, card) for step, account in steps.items()}
                row = _best([_on(card, step, account) for step, account in accounts.items()])
                room = card.memory_bytes - _beside(accounts[first])
                batches = None if growth is None else growth.batches(room)
                yield replace(row, batches=batches)


def _best(rows: Sequence[OnCard]) -> OnCard:
    """One row from those of a card under several sets of levers: the first that adds next to no time, as no further
    levers are tried then, else the fastest. It has the smallest `needed_bytes` of all rows."""
    by_time = sorted(rows, key=lambda row: math.inf if row.seconds is None else row.seconds)
    fastest = next((row for row in rows if row.added_time is not None and row.added_time <= NEGLIGIBLE), by_time[0])
    return replace(fastest, needed_bytes=min(row.needed_bytes for row in rows))


def _on(card: Hardware, step: PricedStep, account: Account) -> OnCard:
    """The row of a card for a step under one set of levers, with `batches` still to be found."""
    link = None if step.settings.link is None else offload_link(card, {OFFLOAD_ACTIVATIONS.name})
    joined = step.traced.price(replace(step.settings, hardware=card, link=link)).problem
    seconds = added = None
    with suppress(BudgetError):
        taken, solution, _ = solve_on_card(joined, Request(account, card.memory_bytes, Effort("fast")))
        seconds = taken.problem.seconds + solution.added_seconds
        added = solution.added_seconds / taken.problem.seconds if taken.problem.seconds else 0.0
    return OnCard(card.name, card.memory_bytes, smallest(joined, account)[0], seconds, added, None)


Larger: TypeAlias = Callable[[int], tuple[PricedStep, Account]]
"""Gives the step with a batch n times as large, and its account. Raises `CaptureError` where it cannot be captured."""
_MORE, _MOST = 16, 128
"""The largest multiples of the batch that are traced: for a first line, from the batch itself to there; and for a
second line, from there to about a full card. Larger ones take long to trace where losses are computed in chunks."""


@dataclass(frozen=True)
class _Growth:
    """The bytes that a step needs, without those of `_beside`, as a straight line over the multiple of the batch."""

    fixed: float
    each: float

    @classmethod
    def of(cls, larger: Larger, card: Hardware) -> _Growth | None:
        """The line through two multiples, one of which about fills the card; None if no larger batch needs more."""
        needs: dict[int, int] = {}

        def need(count: int) -> int:
            if count not in needs:
                step, account = larger(count)
                needs[count] = smallest(step.problem, account)[0] - _beside(account)
            return needs[count]

        def through(low: int, high: int) -> _Growth | None:
            each = (need(high) - need(low)) / (high - low)
            return cls(need(low) - low * each, each) if each > 0 else None

        room = card.memory_bytes - _beside(larger(1)[1])
        with suppress(CaptureError):
            more = max(2, min(_MORE, room // need(1)))
            first = through(1, more)
            full = _MOST if first is None else min(_MOST, int(first.batches(room)))
            return through(*sorted((more, full))) if full > 1 and full != more else first
        return None

    def batches(self, room_bytes: int) -> float:
        """The multiple of the batch that fills a card on which tensors have `room_bytes`."""
        return max(0.0, (room_bytes - self.fixed) / self.each)


def _beside(account: Account) -> int:
    """The bytes of a card that no tensor can take: its context, and the reserve of the account."""
    return account.context + account.reserve
