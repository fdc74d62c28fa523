"""The cost of choosing fp32 (label 0) or 16 bits (label 1), as terms of pairs of labels."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from memopt.solver.arrays import Flags
from memopt.solver.max_flow import ONE, ZERO, LabelProblem


class Amounts(NamedTuple):
    """Seconds of the step, bytes saved for the backward, and error in squared unit roundoffs."""

    seconds: float = 0.0
    nbytes: float = 0.0
    error: float = 0.0

    def __sub__(self, other: Amounts) -> Amounts:
        return Amounts(*(one - two for one, two in zip(self, other, strict=True)))


@dataclass
class LabelTerms:
    """Terms over numbered labels. A cast or a saved copy that several readers share has a label that they demand."""

    pairs: list[tuple[int, int]] = field(default_factory=list)
    amounts: list[Amounts] = field(default_factory=list)
    labels: int = 2
    _demands: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    """By shared label the pairs of label and value that demand it."""
    _demanded: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    _touching: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))

    def label(self) -> int:
        self.labels += 1
        return self.labels - 1

    def add(self, zero: int, one: int, amounts: Amounts) -> None:
        """Adds the cost of `zero` having label 0 while `one` has label 1."""
        if zero in (one, ONE) or one == ZERO or amounts == Amounts():
            return
        for label in {zero, one}:
            self._touching[label].append(len(self.pairs))
        self.pairs.append((zero, one))
        self.amounts.append(amounts)

    def shared(self, low: bool, demanding: Iterable[int], source: int, amounts: Amounts) -> None:
        """Adds a cost that is paid once if any of `demanding` has label 1 (`low`; else label 0).

        It is paid where `source` has the other label; with the source ZERO (or ONE, if not `low`) always.
        """
        thing = self.label()
        for label in sorted(set(demanding)):
            self._demands[thing].append((label, int(low)))
            self._demanded[label].append(thing)
        self.add(*((source, thing) if low else (thing, source)), amounts)

    def problem(self, byte_price: float) -> LabelProblem:
        """Returns the problem with costs in seconds, `byte_price` of them for a byte, and errors as tolls."""
        demands = [
            (thing, label) if low else (label, thing) for thing, all_ in self._demands.items() for label, low in all_
        ]
        costs = [amount.seconds + byte_price * amount.nbytes for amount in self.amounts] + [math.inf] * len(demands)
        tolls = [amount.error for amount in self.amounts] + [0.0] * len(demands)
        pairs = np.array([*self.pairs, *demands], np.int64).reshape(-1, 2)
        return LabelProblem(self.labels, pairs[:, 0], pairs[:, 1], np.array(costs), np.array(tolls))

    def complete(self, chosen: dict[int, bool]) -> Flags:
        """Returns all labels for given ones: a shared label is set exactly where it is demanded."""
        labels = np.zeros(self.labels, np.bool_)
        labels[ONE] = True
        for label, low in chosen.items():
            labels[label] = low
        for thing in self._demands:
            labels[thing] = self._state(thing, labels)
        return labels

    def total(self, labels: Flags) -> Amounts:
        return self._sum(range(len(self.pairs)), labels)

    def flipping(self, label: int, labels: Flags) -> Amounts:
        """Returns the additional amounts of giving one label the other value."""
        things = self._demanded[label]
        near = sorted({pair for part in (label, *things) for pair in self._touching[part]})
        other = labels.copy()
        other[label] = not labels[label]
        for thing in things:
            other[thing] = self._state(thing, other)
        return self._sum(near, other) - self._sum(near, labels)

    def _state(self, thing: int, labels: Flags) -> bool:
        demands = self._demands[thing]
        low = bool(demands[0][1])
        return low if any(bool(labels[label]) == low for label, _ in demands) else not low

    def _sum(self, pairs: Iterable[int], labels: Flags) -> Amounts:
        paid = [self.amounts[pair] for pair in pairs if not labels[self.pairs[pair][0]] and labels[self.pairs[pair][1]]]
        return Amounts(*(math.fsum(column) for column in zip(*paid, strict=True))) if paid else Amounts()
