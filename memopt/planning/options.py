"""The options of `optimize` and `plan`, each typed once, and checked once when they are given; gigabytes become bytes
here. Signatures list all options, and the error for an unknown one names the closest."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import numbers
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from functools import cached_property, partial
from typing import Any, ForwardRef, Literal, ParamSpec, TypeAlias, TypedDict, TypeVar, get_args

import torch
from torch import nn
from typing_extensions import Unpack

from memopt.account.optimizer_account import refuse, takes_singly
from memopt.account.optimizer_trial import GivenOptimizer, trial
from memopt.capture.tensor_parallel import meta_copy, part_of_one_card, styles_of
from memopt.compat.host import HOST
from memopt.compat.inductor import NO_CUDA_GRAPHS, cuda_graphs_wanted
from memopt.device.cluster import CARDS_PER_NODE, Cluster, check_cluster
from memopt.device.devices import device_of, hardware
from memopt.errors import GIB
from memopt.levers import DEFAULT_LEVERS, Lever
from memopt.levers.all import OFFLOAD_PARAMETERS, LeverName, check_allow, recompute_note
from memopt.progress import tell
from memopt.rewrite.dtypes import Policy, check_policy
from memopt.solver import Effort as EffortName
from memopt.solver import Solver
from passes import Pass

Backend: TypeAlias = Literal["auto", "aten", "inductor"]
Outputs: TypeAlias = Literal["loss", "all", "loss_only"]
"""The outputs to differentiate and hold; "loss_only" is an older name of "loss"."""
BACKENDS: tuple[Backend, ...] = get_args(Backend)
"""The values of `backend`: "auto" is inductor on CUDA, plain operators elsewhere and with "offload_parameters"."""
OUTPUTS: tuple[Outputs, ...] = get_args(Outputs)


class StepOptions(TypedDict, total=False):
    """The options that `optimize`, `plan`, `frontier`, `max_batch` and `max_length` share: see `memopt.optimize`."""

    loss_fn: Callable[..., Any] | None
    optimizer: Any
    precision: Policy
    allow: Collection[LeverName | Lever]
    backend: Backend
    outputs: Outputs
    dynamic: Any
    passes: Sequence[Pass]
    solvers: Sequence[Solver]
    elsewhere_gb: float | None
    host_gb: float | None
    forwards: int
    calibrate: bool
    effort: EffortName
    limit_seconds: float | None


class PlanOptions(StepOptions, total=False):
    """The options of `plan`, `frontier`, `max_batch` and `max_length`: of a step, and of the card or cluster."""

    device: str | None
    mesh: Mapping[str, int] | None
    interconnect: str | None
    tp_plan: Mapping[str, str] | None


@dataclass(frozen=True)
class Effort:
    """How long to look for a plan: the name of the effort, and for "best" the limit in seconds of each search."""

    name: EffortName = "default"
    limit_seconds: float = 60.0
    """Wall time that "best" may take beyond what "default" takes; the others ignore it."""


DEFAULT_EFFORT = Effort()


def _one_of(name: str, choices: tuple[str, ...]) -> Callable[[str], str]:
    def check(value: str) -> str:
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}")
        return value

    return check


def _real(name: str, value: Any, kind: str, bounds: str, *, positive: bool = False) -> float:
    """`value` as a finite number of 0 or more, above 0 if `positive`. Raises `TypeError` where it is not
    `kind`, `ValueError` where it is not within `bounds`; both texts continue "must be "."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be {kind}, not {value!r}")
    if not 0 <= float(value) < math.inf or (positive and not value):
        raise ValueError(f"{name} must be {bounds}, not {value!r}")
    return float(value)


def budget_bytes(budget_gb: float | None) -> int:
    """GB of 1024³ bytes in bytes. Raises `TypeError` for no number, `ValueError` where not positive and finite."""
    kind, bounds = "a number of gigabytes, such as 12 or 7.5", "a positive, finite number of gigabytes (of 1024³ bytes)"
    return int(_real("budget_gb", budget_gb, kind, bounds, positive=True) * GIB)


# The share of a card's memory that stays free where no budget is given: for other programs and the driver.
_MARGIN = 0.02
# Such a budget is a multiple of this, so that the next run most likely has the same one and finds its plan on disk.
_GRAIN = GIB // 16


def free_budget(model: torch.nn.Module) -> tuple[float, str]:
    """The budget where the user gives none, in GB of 1024³ bytes, and a note about it: what this process can hold on
    the model's card now, less a margin. Raises `TypeError` for a CPU, whose memory other programs share, for "meta",
    and for a device that does not tell its free memory."""
    device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), HOST)
    kind = device_of(device)
    free = None if kind.is_host or device.type == "meta" else kind.free_bytes(device)
    if free is None:
        raise TypeError(
            f"for a model on {device.type!r} budget_gb must be a number of gigabytes, as in memopt.optimize(model, "
            "8), not None, since free memory is a budget only on a CUDA card"
        )
    card = kind.hardware(device) or kind.reported(device)
    margin = int(_MARGIN * card.memory_bytes)
    usable = free + kind.allocated_bytes(device) + card.context_bytes
    nbytes = max(_GRAIN, (usable - margin) // _GRAIN * _GRAIN)
    note = (
        f"no budget was given: {nbytes / GIB:.6g} GB is what this process can hold on {device} now, less a margin of "
        f"{margin / GIB:.2g} GB"
    )
    tell(note)
    return nbytes / GIB, note


def _bytes_or_none(name: str, gb: float | None) -> int | None:
    """As `budget_bytes`, for a number that may be 0; None as it is."""
    kind = "a number of gigabytes, such as 0 or 1.5, or None"
    return None if gb is None else int(_real(name, gb, kind, "a finite number of gigabytes of 0 or more") * GIB)


def check_effort(effort: EffortName = "default", limit_seconds: float | None = None) -> Effort:
    """The two arguments as an `Effort`; `limit_seconds` is for "best" only, 60 if None. Raises `ValueError` for an
    unknown effort, for a limit with an effort other than "best", and for a limit that is not positive and finite;
    `TypeError` for a limit that is no number."""
    _one_of("effort", get_args(EffortName))(effort)
    if limit_seconds is None:
        return Effort(effort)
    kind, bounds = "a number of seconds, such as 60", "a positive, finite number of seconds"
    seconds = _real("limit_seconds", limit_seconds, kind, bounds, positive=True)
    if effort != "best":
        raise ValueError(f"limit_seconds is for effort='best', not {effort!r}; give effort='best', or no limit_seconds")
    return Effort(effort, seconds)


def check_points(points: int) -> int:
    """The number of points of a frontier. Raises `TypeError` if it is no int, `ValueError` if it is below 2."""
    if isinstance(points, bool) or not isinstance(points, int):
        raise TypeError(f"points must be a number of budgets, such as 40, not {points!r}")
    if points < 2:
        raise ValueError(
            "points must be at least 2 (one for the smallest budget, one for the peak with nothing recomputed), not "
            f"{points!r}"
        )
    return points


def check_share(name: str, value: Any) -> float:
    """The argument `name` as a fraction of 0 or more. Raises `TypeError` for no number, else `ValueError`."""
    return _real(name, value, "a fraction, such as 0.3 for 30%", "a fraction of 0 or more")


def positive_int(name: str, value: Any) -> int:
    """The argument `name` as a whole number of 1 or more. Raises `TypeError` for no int, `ValueError` below 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, not {value}")
    return value


def _check_loss(loss_fn: Any) -> Any:
    if loss_fn is not None and not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function of (output, target) or of (model, batch), not {loss_fn!r}")
    return loss_fn


def _check_optimizer(optimizer: Any) -> GivenOptimizer:
    if isinstance(optimizer, torch.optim.Optimizer):
        refuse(optimizer)
    elif optimizer is not None and not takes_singly(optimizer):  # those need no check, and making one loads Dynamo
        refuse(trial(optimizer, {}, HOST))
    return GivenOptimizer.of(optimizer)


def _check_passes(given: Sequence[Pass]) -> tuple[Pass, ...]:
    found = _as_tuple("passes", given, "passes.Pass values, such as [MyPass()]")
    for number, one in enumerate(found):
        if not isinstance(one, Pass):
            called = f"; give {one.__name__}(), an instance" if isinstance(one, type) else ""
            raise TypeError(f"passes[{number}] must be a passes.Pass, a frozen dataclass, not {one!r}{called}")
        _check_repr(f"passes[{number}]", one)
    return found


def _check_solvers(given: Sequence[Solver]) -> tuple[Solver, ...]:
    found = _as_tuple("solvers", given, "solvers, such as [MySolver()]")
    for number, one in enumerate(found):
        if isinstance(one, type) or not callable(getattr(one, "candidates", None)):
            raise TypeError(
                f"solvers[{number}] must have a method candidates(problem, budget_bytes) that returns "
                f"schedules; {one!r} has none"
            )
        if not isinstance(getattr(one, "name", None), str):
            raise TypeError(f"solvers[{number}] must have a name, a string that the plan shows; {one!r} has none")
        _check_repr(f"solvers[{number}]", one)
    return found


def _as_tuple(name: str, given: Any, kind: str) -> tuple[Any, ...]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"{name} must be a list of {kind}, not {given!r}")
    return tuple(given)


def _check_repr(name: str, value: object) -> None:
    """Raise `ValueError` where the `repr` of a pass or solver has an address: plans are stored on disk under it."""
    if re.search(r" at 0x[0-9a-f]+", repr(value)):
        raise ValueError(
            f"{name} must have a repr that shows its options, as a frozen dataclass has, not {value!r}: plans are "
            "stored on disk under it"
        )


def _given(default: Any, check: Callable[[Any], Any] | None = None, name: str = "") -> dict[str, Any]:
    """The metadata of a field: the option's default, what checks an argument, and the option's name if another."""
    return {"default": default, "check": check, "name": name}


DTYPES = {"auto": torch.bfloat16, "bf16": torch.bfloat16, "fp32": torch.float32}
"""The dtype in which parameters are gathered and a step computes, by the option `precision`."""


@dataclass(frozen=True)
class _ClusterOptions:
    """The cluster to plan for, the dtype in which parameters are gathered, and how layers are split among cards."""

    cluster: Cluster
    dtype: torch.dtype
    tp_plan: Mapping[str, str] | None = None
    """The styles of layers by patterns of their paths; None for the model's own."""

    def one_card(self, model: nn.Module) -> nn.Module:
        """A copy of the model on "meta" as one card has it: parameters that tensor parallelism splits have their local
        shape, all others their full shape, as before `fully_shard`. Raises `ValueError` where tensor
        parallelism cannot split the model."""
        cards, copied = self.cluster.mesh.tp, meta_copy(model)
        return copied if cards == 1 else part_of_one_card(copied, cards, styles_of(model, cards, self.tp_plan))

    def notes(self) -> tuple[str, ...]:
        """A cluster plan's assumptions, in sentences."""
        mesh, joined = self.cluster.mesh, self.cluster.interconnect
        dtype = str(self.dtype).removeprefix("torch.")
        links = [joined.within] + ([joined.between] if joined.between else [])
        rates = "; ".join(
            f"{link.source}, of which {link.efficiency:.0%} is assumed to be reached, and "
            f"{1e6 * link.step_seconds:g} µs for each step of a ring collective"
            for link in links
        )
        notes = [
            f"planned for one of {mesh.cards:,} cards as FSDP2 runs: a block's parameters are gathered in {dtype} "
            "while the block before computes, and freed after it unless the plan keeps them; those outside of blocks "
            "are one group and stay gathered; gradients are reduced in float32 when a block's backward is done; shards "
            "keep the parameters' dtype",
            f"{joined.name}, {CARDS_PER_NODE} cards in a node: {rates}",
            "NCCL's buffers, which torch's allocator does not hold, are not counted",
        ]
        if mesh.tp > 1:
            notes.append(
                f"each of the {mesh.tp} cards of a 'tp' group has a part of the heads and of the widths of layers, "
                "and between layers a part of the sequence; compute waits for the exchanges"
            )
        return tuple(notes)


def _check_cluster(
    mesh: Mapping[str, int] | None,
    interconnect: str | None,
    tp_plan: Mapping[str, str] | None,
    *,
    device: str | None,
    precision: Any,
    optimizer: Any,
    allow: Collection[str],
) -> _ClusterOptions | None:
    """The cluster to plan for; None where no mesh is given, which means one card. The keyword arguments are checked for
    values that do not work on a cluster. Raises `TypeError` or `ValueError`."""
    cluster = check_cluster(mesh, interconnect)
    if cluster is None:
        if tp_plan is not None:
            raise ValueError("tp_plan needs mesh too, such as mesh={'dp_shard': 8, 'tp': 8}")
        return None
    if device in (None, HOST.type):
        raise ValueError(f"with mesh, device must name the card to plan for, such as device='h100', not {device!r}")
    if not isinstance(precision, str) or precision not in DTYPES:
        known = ", ".join(map(repr, DTYPES))
        raise ValueError(
            f"with mesh, precision must be one of {known}, the dtype of gathered parameters, not {precision!r}"
        )
    if isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"with mesh, optimizer must be a class or its name, since this {type(optimizer).__name__} holds whole "
            f"parameters; give {type(optimizer).__name__}, or functools.partial of it"
        )
    if further := sorted(set(allow) - DEFAULT_LEVERS):
        raise ValueError(f"{further[0]!r} in allow is not planned for a cluster; take it out of allow, or give no mesh")
    if tp_plan is not None and cluster.mesh.tp == 1:
        raise ValueError("tp_plan needs 'tp' in mesh, such as mesh={'dp_shard': 8, 'tp': 8}")
    return _ClusterOptions(cluster, DTYPES[precision], tp_plan)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of `memopt.optimize`, checked. To add an option, give it a type in `StepOptions` or `PlanOptions`,
    and a field here with default and check; `check_options` makes fields of several options."""

    budget_bytes: int
    loss_fn: Callable[..., Any] | None = field(metadata=_given(None, _check_loss))
    given_optimizer: GivenOptimizer = field(metadata=_given(torch.optim.AdamW, _check_optimizer, "optimizer"))
    precision: Policy = field(metadata=_given("auto", check_policy))
    levers: tuple[Lever, ...] = field(metadata=_given(DEFAULT_LEVERS, check_allow, "allow"))
    """The allowed levers, in the order in which they are tried."""
    backend: Backend = field(metadata=_given("auto", _one_of("backend", BACKENDS)))
    outputs: Outputs = field(metadata=_given("loss", _one_of("outputs", OUTPUTS)))
    dynamic: Any = field(metadata=_given(None))
    """The sizes that change between batches, as the user declares them: see `memopt.capture.inputs.declared_sizes`."""
    passes: tuple[Pass, ...] = field(metadata=_given((), _check_passes))
    """The user's own passes, in the order in which they run."""
    solvers: tuple[Solver, ...] = field(metadata=_given((), _check_solvers))
    """The user's own solvers, which are asked in addition to memopt's."""
    hardware: str | None = field(metadata=_given(None, None, "device"))
    """The name of the card to plan for; None: the device at hand."""
    elsewhere_bytes: int | None = field(metadata=_given(None, partial(_bytes_or_none, "elsewhere_gb"), "elsewhere_gb"))
    """The bytes on the device that are no part of the step; None: those that are found there."""
    host_bytes: int | None = field(metadata=_given(None, partial(_bytes_or_none, "host_gb"), "host_gb"))
    """The most bytes of the host's memory that a plan may use; None: what is free there, less a margin."""
    forwards: int = field(metadata=_given(1, partial(positive_int, "forwards")))
    """The number of forwards that run before the first backward, as the user says."""
    calibrate: bool = field(metadata=_given(False))
    effort: Effort
    cluster: _ClusterOptions | None
    """The cluster to plan for; None for one card."""
    budget_note: str = ""
    """A sentence on where the budget comes from, if the user gave none; else empty."""
    to_train: bool = False
    """Whether the model is trained by the plans, which are then stored on disk, as after `optimize`, not only shown."""
    one_by_one: bool = False
    """Whether each backward belongs to one forward although several forwards wait, as in a stage of a pipeline."""

    @property
    def optimizer(self) -> Any:
        """The optimizer that plans count: as it was given, or, once that instance is gone, one with its options."""
        return self.given_optimizer.now

    @cached_property
    def allow(self) -> frozenset[str]:
        """The names of the allowed levers."""
        return frozenset(lever.name for lever in self.levers)

    @property
    def optimizer_levers(self) -> frozenset[str]:
        """The names of the allowed levers that change the optimizer."""
        return frozenset(lever.name for lever in self.levers if lever.optimizer is not None)

    @property
    def planned_by(self) -> tuple[Any, ...]:
        """The options that plans depend on, as values whose text is equal in all processes, for keys of plans."""
        host = () if self.host_bytes is None else (self.host_bytes,)
        return self.budget_bytes, self.precision, sorted(self.allow), self.outputs, self.effort, self.dynamic, *host

    def backend_on(self, device_type: str) -> Literal["aten", "inductor"]:
        """The backend of plans for a device of that type, or for the card that the option `device` names. "auto" is
        "aten" where parameters may lie on the host, else "inductor" on CUDA and "aten" on other devices."""
        if self.backend != "auto":
            return self.backend
        if OFFLOAD_PARAMETERS.name in self.allow:
            return "aten"
        return (device_of(device_type) if self.hardware is None else device_of(hardware(self.hardware))).backend

    def notes(self, device_type: str) -> tuple[str, ...]:
        """The notes of every plan and `BudgetError` under these options, for a device of that type."""
        notes = recompute_note(self.allow) + (self.budget_note,) * bool(self.budget_note)
        absent = self.hardware is not None and hardware(self.hardware).device_type != device_type
        if absent and self.backend_on(device_type) == "inductor":
            notes += (
                f"planned for inductor on a machine without a {self.hardware}: on that card, inductor also pads "
                "matrices whose rows are no multiple of 16 bytes, and times kernels to choose among them; both may "
                "take more memory",
            )
        if self.backend_on(device_type) == "inductor" and cuda_graphs_wanted():
            notes += (NO_CUDA_GRAPHS,)
        if self.backend_on(device_type) == "inductor" and OFFLOAD_PARAMETERS.name in self.allow:
            notes += (
                f"{OFFLOAD_PARAMETERS.name!r} was not used: it is for plain operators; give backend='aten' to have "
                "frozen parameters in the host's memory",
            )
        return notes


def _options() -> dict[str, Field[Any]]:
    """The fields of `Options` that are made from one option each, by the option's name."""
    return {one.metadata["name"] or one.name: one for one in fields(Options) if one.metadata}


DEFAULTS: Mapping[str, Any] = {
    **dict.fromkeys(PlanOptions.__annotations__),
    **{name: one.metadata["default"] for name, one in _options().items()},
    "effort": DEFAULT_EFFORT.name,
}
"""The default of each option."""


P = ParamSpec("P")
R = TypeVar("R")


def takes_options(kind: type, defaults: Mapping[str, object]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function whose keywords are those of a `TypedDict`, `kind`: it takes `**options: Unpack[kind]`.

    A keyword that neither the function nor `kind` has raises a `TypeError` that names the closest one. What `help` and
    notebooks show as the signature lists the options, with their `defaults`."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = _listed(inspect.signature(function), kind, defaults)

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name not in signature.parameters:
                    raise TypeError(_unknown(function.__name__, name, signature))
            return function(*args, **kwargs)

        checked.__signature__ = signature  # type: ignore[attr-defined]
        return checked

    return decorate


def _listed(signature: inspect.Signature, kind: type, defaults: Mapping[str, object]) -> inspect.Signature:
    """The signature with the options of `kind` in place of `**options`."""
    own = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=_written(annotation))
        for name, annotation in kind.__annotations__.items()
    ]
    return signature.replace(parameters=[*own, *options])


def _written(annotation: Any) -> Any:
    """The source text of an annotation that was not evaluated (a `ForwardRef`); any other annotation itself."""
    return annotation.__forward_arg__ if isinstance(annotation, ForwardRef) else annotation


def _unknown(function: str, name: str, signature: inspect.Signature) -> str:
    closest = difflib.get_close_matches(name, signature.parameters, n=1)
    if closest:
        return f"{function}() takes no option {name!r}; did you mean {closest[0]!r}?"
    return f"{function}() takes no option {name!r}; it takes {', '.join(signature.parameters)}"


@takes_options(PlanOptions, DEFAULTS)
def check_options(budget_gb: float | None, **options: Unpack[PlanOptions]) -> Options:
    """The arguments as `Options`. Raises `TypeError` or `ValueError` that names the value and what is expected."""
    given: dict[str, Any] = {**DEFAULTS, **options}
    values: dict[str, Any] = {"budget_bytes": budget_bytes(budget_gb)}
    for name, one in _options().items():
        check = one.metadata["check"]
        values[one.name] = check(given[name]) if check else given[name]
    device, precision, optimizer = given["device"], values["precision"], given["optimizer"]
    if given["calibrate"] and device is not None:
        raise ValueError(f"calibrate measures the device at hand, not {device!r}; give one of device and calibrate")
    names = [lever.name for lever in values["levers"]]
    of_cluster = [given[name] for name in ("mesh", "interconnect", "tp_plan")]
    cluster = None
    if any(one is not None for one in of_cluster):
        cluster = _check_cluster(*of_cluster, device=device, precision=precision, optimizer=optimizer, allow=names)
    # FSDP2 casts parameters when it gathers them, so that nothing is left for passes to decide.
    values["precision"] = precision if cluster is None else "fp32"
    return Options(**values, effort=check_effort(given["effort"], given["limit_seconds"]), cluster=cluster)
