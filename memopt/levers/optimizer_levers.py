"""The levers on the optimizer, and their combinations: how they are put around it, and what a step costs with them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, TypeAlias

from torch import nn, optim

from memopt.account.account import Account
from memopt.levers.lever import Lever, OptimizerChange
from memopt.levers.training_price import TrainingFacts, TrainingPrice, price_training
from memopt.optimizers import (
    BF16ParametersOptimizer,
    LowBitOptimizer,
    OffloadedOptimizer,
    OptimizerInBackward,
    Stepping,
    check_adam,
    use_bf16_parameters,
)
from memopt.optimizers.parameterwise import check_inner
from memopt.units import duration, size

BF16_PARAMETERS = Lever(
    BF16ParametersOptimizer.title,
    "Parameters and gradients are held in bfloat16, with stochastic rounding in the optimizer's step.",
    "approximate",
    "rounding of every update; needs a step in bf16, and memopt.wrap_optimizer",
    optimizer=OptimizerChange(
        BF16ParametersOptimizer,
        "parameters and gradients in bfloat16, stepped in float32 and rounded stochastically",
        "weights have 8 bits of precision, rounded without bias",
        apply=use_bf16_parameters,
        narrows=True,
    ),
)
LOW_BIT_OPTIMIZER = Lever(
    LowBitOptimizer.title,
    "Adam's two moments are held in 8 bits.",
    "approximate",
    "quantization error in the moments; for Adam and AdamW only, and needs memopt.wrap_optimizer",
    optimizer=OptimizerChange(
        LowBitOptimizer,
        "Adam's moments in 8 bits, with one scale per 256 values; those of small parameters stay in float32",
        "moments rounded to about two decimal digits; trains about as with float32 moments",
        check=check_adam,
    ),
)
OFFLOAD_OPTIMIZER = Lever(
    OffloadedOptimizer.title,
    "The optimizer's state is held in host memory and copied piece by piece for its step.",
    "bitwise",
    "host memory and the time of the copies; needs memopt.wrap_optimizer; not on a CPU",
    optimizer=OptimizerChange(
        OffloadedOptimizer,
        "the optimizer's state in the host's memory, copied to the device piece by piece",
        "bitwise equal to the same optimizer stepped parameter by parameter",
        offloads=True,
    ),
)
OPTIMIZER_IN_BACKWARD = Lever(
    OptimizerInBackward.title,
    "Each parameter is stepped, and its gradient freed, as soon as the backward no longer reads them.",
    "bitwise",
    "no clipping by the norm of all gradients, no GradScaler, no accumulation, no TrainStep; for backend 'aten', and "
    "needs memopt.wrap_optimizer",
    optimizer=OptimizerChange(
        OptimizerInBackward,
        "each parameter is stepped, and its gradient freed, as soon as the backward no longer reads them; no "
        "clipping by the norm of all gradients, no GradScaler, no accumulation, and plain operators only (backend "
        "'aten')",
        "bitwise equal to the same optimizer stepped parameter by parameter",
        in_backward=True,
    ),
)


Wanted: TypeAlias = Callable[[Sequence[Lever]], bool]
"""Whether a combination of levers is worth the time that it takes to price it."""
Known: TypeAlias = dict[tuple[OptimizerChange, ...], TrainingPrice]
"""The prices found so far of training with these changes, for the same `TrainingFacts`."""


@dataclass(frozen=True)
class PricedLevers:
    """A combination of levers on the optimizer, the innermost first, with bytes and seconds without and with them."""

    levers: tuple[Lever, ...]
    before: TrainingPrice
    after: TrainingPrice
    each: tuple[PricedLevers, ...] = ()
    """For each of the levers, that lever alone, priced on top of those before it; empty in these entries themselves."""

    @classmethod
    def of(cls, facts: TrainingFacts, levers: Sequence[Lever], known: Known | None = None) -> PricedLevers:
        """The combination of `levers`, the innermost first, with its bytes and seconds. A lever that steps parameters
        in the backward is moved to the outermost place. `known` is a cache of bytes and seconds.

        Raises `ValueError` for an optimizer that cannot be tried on fake tensors, or that the levers do not fit."""
        known = {} if known is None else known
        levers = sorted(levers, key=lambda lever: lever.optimizer is not None and lever.optimizer.in_backward)
        prices = []
        for number in range(len(levers) + 1):
            changes = changes_of(levers[:number])
            if changes not in known:
                known[changes] = price_training(facts, changes)
            prices.append(known[changes])
        each = tuple(cls((lever,), prices[number], prices[number + 1]) for number, lever in enumerate(levers))
        return cls(tuple(levers), prices[0], prices[-1], each)

    @property
    def names(self) -> tuple[str, ...]:
        """The levers' names in `allow`, the innermost first."""
        return tuple(lever.name for lever in self.levers)

    @property
    def added_seconds(self) -> float:
        """Estimated seconds that the levers add to `optimizer.step()`; negative where they make it faster."""
        if self.each:
            return sum(one.added_seconds for one in self.each)
        return round(self.after.seconds - self.before.seconds, 9)  # sums of floats differ by their order

    @property
    def host_bytes(self) -> int:
        """Bytes of the host's memory that the levers hold."""
        return self.after.host_bytes - self.before.host_bytes

    @property
    def saved_bytes(self) -> int:
        """The bytes that the levers save on the device; negative where they need more."""
        return self.before.total - self.after.total

    @property
    def narrows(self) -> bool:
        """Whether a lever casts parameters to bfloat16, and so changes the step that is captured."""
        return any(change.narrows for change in changes_of(self.levers))

    @property
    def stepping(self) -> Stepping | None:
        """The temporary bytes of stepping parameters within the backward; None where they are stepped after it."""
        return self.after.stepping

    def adjusted(self, account: Account) -> Account:
        """The account with its rows of parameters, gradients and optimizer replaced by the bytes that training with
        these levers holds. The old values of these rows have no influence.

        Where parameters are stepped in the backward, the rows of gradients and of the optimizer's temporaries are 0:
        the solver's problem has them as storages."""
        rows: dict[str, Any] = self.after.rows
        if self.stepping is not None:
            rows.update(gradients=0, optimizer_temporaries=0)
        return replace(account, **rows, state_blocks=self.after.state_blocks)

    def __str__(self) -> str:
        if self.each or not self.levers:
            return "; ".join(map(str, self.each))
        (change,) = changes_of(self.levers)
        sign = "-" if self.added_seconds < 0 else "+"
        cost = f"{sign}{duration(abs(self.added_seconds))} a step" if self.added_seconds else "no added time"
        host = f", {size(self.host_bytes)} on the host" if self.host_bytes else ""
        word = "saves" if self.saved_bytes >= 0 else "costs"
        step = f"{self.names[0]}: {word} {size(abs(self.saved_bytes))}, {cost}{host}"
        return f"{step}; {change.changes}; {change.exactness}"

    @property
    def effect(self) -> str:
        """What the levers change besides memory and time, and how exact that is, as text for users."""
        changed = "; ".join(f"{change.changes}; {change.exactness}" for change in changes_of(self.levers))
        return f"{changed}; {size(self.host_bytes)} on the host" if self.host_bytes else changed


def changes_of(levers: Iterable[Lever]) -> tuple[OptimizerChange, ...]:
    """The `OptimizerChange` of each of the `levers` that has one."""
    return tuple(lever.optimizer for lever in levers if lever.optimizer is not None)


def apply_levers(levers: Sequence[Lever], model: nn.Module, optimizer: optim.Optimizer) -> optim.Optimizer:
    """Wrap an optimizer by levers, in the order given, and change the parameters of `model` where a lever does so;
    returns the outermost optimizer.

    Raises `TypeError` or `ValueError` where a lever does not fit the optimizer, and then changes nothing."""
    if levers:
        check_inner(optimizer, levers[0].name)
    for change in changes_of(levers):
        if change.check is not None:
            change.check(optimizer)
    for change in changes_of(levers):
        optimizer = change.wrap(optimizer) if change.apply is None else change.apply(model, optimizer)
    return optimizer


def least_with_levers(account: Account) -> int:
    """A lower bound in bytes on what is resident with any levers on the optimizer: the account without optimizer state
    and gradients, and with half of the parameters' bytes."""
    return replace(account, parameters=account.parameters // 2, optimizer_state=0, gradients=0).resident_bytes


def combinations_of(
    facts: TrainingFacts,
    levers: Collection[Lever],
    allowed: Collection[str],
    wanted: Wanted = lambda levers: True,
) -> Iterator[PricedLevers]:
    """The combinations of `levers` that fit the optimizer, each with its bytes and seconds.

    First come the combinations of `allowed` levers only, the least added time first. Then come those with at least one
    lever that is not allowed and for which `wanted` returns True, by the number of their levers, and with equally many
    the least added time first."""
    known: Known = {}
    numbers = range(1, len(levers) + 1)
    own = [lever for lever in levers if lever.name in allowed]
    yield from _priced(facts, [some for number in numbers for some in combinations(own, number)], known)

    def useful(some: Sequence[Lever]) -> bool:
        return not set(allowed).issuperset(lever.name for lever in some) and wanted(some)

    for number in numbers:
        yield from _priced(facts, [some for some in combinations(levers, number) if useful(some)], known)


def _priced(facts: TrainingFacts, chosen: Iterable[Sequence[Lever]], known: Known) -> list[PricedLevers]:
    """The combinations that fit the optimizer, sorted by the time they add."""
    found: list[PricedLevers] = []
    for levers in chosen:
        try:
            found.append(PricedLevers.of(facts, levers, known))
        except (TypeError, ValueError):  # does not fit this optimizer: 8-bit moments, for one, are for Adam alone
            continue
    return sorted(found, key=lambda priced: priced.added_seconds)
