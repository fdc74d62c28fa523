"""The levers on the optimizer, and their combinations: how they are put around it, and the time and memory of a step
with them, with the properties of a training run that these depend on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Any, TypeAlias

import torch
from torch import nn, optim

from memopt.account.account import Account
from memopt.account.optimizer_account import optimizer_account
from memopt.account.optimizer_trial import OptimizerLike
from memopt.compat.host import HOST
from memopt.device.devices import device_of
from memopt.device.hardware import Hardware
from memopt.levers.lever import Lever, OptimizerChange
from memopt.optimizers import (
    BF16ParametersOptimizer,
    LowBitOptimizer,
    OffloadedOptimizer,
    OptimizerInBackward,
    Stepping,
    check_adam,
    use_bf16_parameters,
)
from memopt.optimizers.bf16_parameters import kept_wide
from memopt.optimizers.optimizer_step_price import (
    OptimizerStepPrice,
    nbytes,
    optimizer_step_price,
    prices_of_each,
)
from memopt.optimizers.parameterwise import PIECE_ELEMENTS, check_inner
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


@dataclass(frozen=True)
class TrainingFacts:
    """Facts behind the bytes and seconds of training with levers on the optimizer: parameters, optimizer and
    hardware. Parameters may be on "meta"."""

    parameters: tuple[torch.Tensor, ...]
    """All parameters of the model, each once, frozen ones too."""
    optimizer: OptimizerLike
    """A class, an instance (over these parameters), a partial, a name or None, as for `memopt.optimize`."""
    hardware: Hardware
    """The device that trains."""
    wide: tuple[torch.Tensor, ...] = ()
    """Parameters that stay in float32 (`kept_wide`)."""
    together: tuple[tuple[torch.Tensor, ...], ...] | None = None
    """Groups of parameters whose gradients a backward makes at once, those of a module; None: each gradient alone."""
    shared: tuple[torch.Tensor, ...] = ()
    """Parameters used at several places, whose gradients are complete only after the last use."""

    @classmethod
    def of(cls, model: nn.Module, optimizer: OptimizerLike, hardware: Hardware) -> TrainingFacts:
        """The facts of training `model` with this optimizer on this hardware."""
        return cls(
            tuple(model.parameters()),
            optimizer,
            hardware,
            wide=tuple(kept_wide(model)),
            together=tuple(_together(model)),
            shared=tuple(_shared(model)),
        )

    @property
    def trained(self) -> list[torch.Tensor]:
        """The parameters that require gradients."""
        return trained(self.parameters)

    @cached_property
    def fused(self) -> bool:
        """Whether the optimizer uses fused kernels on the device."""
        return optimizer_account(self.optimizer, self.trained, self.hardware.device_type).name.endswith("(fused)")


def trained(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those of the parameters that require gradients."""
    return [parameter for parameter in parameters if parameter.requires_grad]


def _together(model: nn.Module) -> list[tuple[nn.Parameter, ...]]:
    """The parameters of each module by itself, whose gradients one operator may make at once."""
    return [found for module in model.modules() if (found := tuple(module.parameters(recurse=False)))]


def _shared(model: nn.Module) -> list[nn.Parameter]:
    """Parameters at several places of the model, like tied embeddings."""
    places = Counter(id(parameter) for group in _together(model) for parameter in group)
    return [parameter for parameter in model.parameters() if places[id(parameter)] > 1]


@dataclass(frozen=True)
class _TrainingPrice:
    """The bytes that training with some levers holds, by the rows of a step's account, and the seconds of
    `optimizer.step()`."""

    parameters: int
    gradients: int
    optimizer_state: int
    optimizer_temporaries: int
    host_bytes: int
    seconds: float
    stepping: Stepping | None = None
    """With the optimizer in the backward, the bytes that stepping each kind of parameter takes there; else None."""
    state_blocks: tuple[int, ...] = ()
    """The bytes of each tensor of the optimizer's state on a GPU, in the order of the parameters."""

    @property
    def rows(self) -> dict[str, int]:
        """Bytes on the device, by the name of the account's row."""
        names = ("parameters", "gradients", "optimizer_state", "optimizer_temporaries")
        return {name: getattr(self, name) for name in names}

    @property
    def total(self) -> int:
        """The sum of the rows: bytes on the device."""
        return sum(self.rows.values())


def price_training(facts: TrainingFacts, changes: Sequence[OptimizerChange]) -> _TrainingPrice:
    """The bytes and seconds of training with the optimizer wrapped by `changes`, the innermost first, found by stepping
    it on fake tensors.

    Where parameters are stepped within the backward, gradients and temporaries count at the moment of the backward when
    their sum is largest. That moment is estimated from the model's modules here; a plan finds it in the graph.

    Raises `ValueError` for an optimizer that cannot be tried on fake tensors, or that the levers do not fit."""
    if not changes:
        plain = optimizer_step_price(facts.optimizer, facts.trained, facts.hardware)
        sizes = nbytes(facts.parameters), nbytes(facts.trained)
        return _TrainingPrice(*sizes, plain.state_bytes, plain.temporary_bytes, 0, plain.seconds)
    dtypes = {id(parameter): _dtype(parameter, facts, changes) for parameter in facts.parameters}
    learning = [dtypes[id(parameter)] for parameter in facts.trained]
    offloads, in_backward = any(change.offloads for change in changes), any(change.in_backward for change in changes)
    wraps = tuple(change.wrap for change in changes)
    alone = tuple(change.wrap for change in changes if not change.offloads)
    prices = prices_of_each(facts.optimizer, facts.trained, learning, facts.hardware, alone)
    state, host_bytes, seconds = sum(price.state_bytes for price in prices), 0, sum(price.seconds for price in prices)
    temporaries = [price.temporary_bytes for price in prices]
    blocks = tuple(nbytes for price in prices for nbytes in price.arrays)
    if offloads:
        prices = prices_of_each(facts.optimizer, facts.trained, learning, facts.hardware, wraps, device=HOST.type)
        temporaries = [price.temporary_bytes for price in prices]
        state, blocks = _scalars(facts), ()
        host_bytes = sum(_host_bytes(price, facts) for price in prices)
        pairs = zip(facts.trained, prices, strict=True)
        seconds += sum(_copy_seconds(parameter.numel(), price, facts) for parameter, price in pairs)
    gradients, stepped = _gradients(facts, dtypes, temporaries, in_backward)
    parameters = sum(_size(parameter, dtypes[id(parameter)]) for parameter in facts.parameters)
    stepped_alone = zip(facts.trained, learning, temporaries, strict=True)
    inside = Stepping.of(stepped_alone) if in_backward else None
    return _TrainingPrice(parameters, gradients, state, stepped, host_bytes, seconds, inside, blocks)


def _dtype(parameter: torch.Tensor, facts: TrainingFacts, changes: Sequence[OptimizerChange]) -> torch.dtype:
    narrow = any(change.narrows for change in changes) and parameter.dtype is torch.float32
    return torch.bfloat16 if narrow and all(parameter is not wide for wide in facts.wide) else parameter.dtype


def _size(parameter: torch.Tensor, dtype: torch.dtype) -> int:
    return parameter.numel() * dtype.itemsize


def _gradients(
    facts: TrainingFacts, dtypes: dict[int, torch.dtype], temporaries: Sequence[int], in_backward: bool
) -> tuple[int, int]:
    """Bytes of gradients and of the optimizer's temporaries at the moment when their sum is largest."""
    sizes = {id(parameter): _size(parameter, dtypes[id(parameter)]) for parameter in facts.trained}
    if not in_backward:
        return sum(sizes.values()), max(temporaries, default=0)
    stepping = {id(parameter): nbytes for parameter, nbytes in zip(facts.trained, temporaries, strict=True)}
    shared = trained(facts.shared)
    held = {id(parameter) for parameter in shared}
    waiting = sum(sizes[number] for number in held)
    moments = [(waiting, stepping[number]) for number in held]
    for group in facts.together or [(parameter,) for parameter in facts.trained]:
        own = [id(parameter) for parameter in trained(group) if id(parameter) not in held]
        if own:
            moments.append((waiting + sum(sizes[number] for number in own), max(stepping[number] for number in own)))
    return max(moments, key=sum, default=(0, 0))


def _host_bytes(price: OptimizerStepPrice, facts: TrainingFacts) -> int:
    """Bytes of a parameter's state on the host: torch's allocator of pinned memory rounds up to powers of two."""
    if device_of(facts.hardware).is_host:
        return price.state_bytes
    rounded = sum(2 ** math.ceil(math.log2(array)) for array in price.arrays if array)
    return rounded + price.state_bytes - sum(price.arrays)


def _copy_seconds(elements: int, price: OptimizerStepPrice, facts: TrainingFacts) -> float:
    """Seconds that the copies of a parameter's state to the device and back take, one after the other."""
    bytes_moved, tensors = 2 * sum(price.arrays), 2 * len(price.arrays)
    if not bytes_moved:
        return 0.0
    copies = tensors * max(1, math.ceil(elements / PIECE_ELEMENTS))
    return copies * facts.hardware.link.transfer_seconds(math.ceil(bytes_moved / copies))


def _scalars(facts: TrainingFacts) -> int:
    """Bytes of the step numbers that fused kernels keep on the device, a block for each parameter."""
    if device_of(facts.hardware).is_host or not facts.fused:
        return 0
    return device_of(facts.hardware).block_bytes * len(facts.trained)


Wanted: TypeAlias = Callable[[Sequence[Lever]], bool]
"""Whether a combination of levers is worth the time that it takes to price it."""
Known: TypeAlias = dict[tuple[OptimizerChange, ...], _TrainingPrice]
"""The prices found so far of training with these changes, for the same `TrainingFacts`."""


@dataclass(frozen=True)
class PricedLevers:
    """A combination of levers on the optimizer, the innermost first, with bytes and seconds without and with them."""

    levers: tuple[Lever, ...]
    before: _TrainingPrice
    after: _TrainingPrice
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
        """The levers' effects besides memory and time, and how exact they are, as text for users."""
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
