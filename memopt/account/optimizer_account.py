"""The bytes that an optimizer holds: its state between steps, and the temporaries of a step."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch.optim import Optimizer

from memopt.account.eager_bytes import EagerBytes, MetaBytes
from memopt.account.optimizer_trial import (
    Layout,
    OptimizerLike,
    held_tensors,
    on_meta,
    optimizer_on_fakes,
    parameters_of,
    state_tensors,
    step,
)
from memopt.compat.fakes import FakeTensor
from memopt.compat.host import HOST
from memopt.compat.operators import plain_tensors, tree_leaves
from memopt.compat.tensors import shard_of
from memopt.device.devices import device_of
from memopt.device.workspace_rules import SCALARS

# The step number of a late step, which may differ from the first ones: RAdam's first steps are plain momentum.
_LATE_STEP = 1000
_MOST_CALLS = 5000
"""The operators that three steps run for each parameter at most."""
_COPIES, _LARGEST = 2, 4
"""Where no step can be tried: fp32 copies of each parameter as state, and of the largest one as temporaries."""

_SINGLY = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.SGD)


@dataclass(frozen=True)
class OptimizerAccount:
    """The bytes that an optimizer holds besides parameters and gradients: its state, and the temporaries of a step."""

    state_bytes: int
    """Held from the first step on, also between steps."""
    step_temporary_bytes: int
    """The most bytes alive at once that `step()` makes and frees again."""
    name: str
    """The optimizer's class and its implementation, as in "AdamW (foreach)"; "none" without an optimizer."""
    state_blocks: tuple[int, ...] = ()
    """The bytes of each tensor of the state on a GPU, in the order in which the first step makes them."""
    guess: str = ""
    """Why the bytes are a high estimate, where no step could be tried; empty where they are counted."""


def optimizer_account(
    optimizer: OptimizerLike,
    parameters: Iterable[torch.Tensor],
    device_type: str | None = None,
    idle: Collection[torch.Tensor] = (),
) -> OptimizerAccount:
    """Find the bytes that an optimizer holds by running three of its steps on fake tensors.

    Any optimizer written with torch's operators can be counted. Whether it loops over the parameters or takes all at
    once (foreach, fused) is torch's choice for the device. Where a step cannot be tried, the bytes are a high estimate,
    and the field `guess` says why: state as large per element as an instance that has stepped holds already, else two
    fp32 copies, as Adam has; temporaries as large as one fp32 copy of all parameters, and at least four copies of the
    largest.

    Args:
        optimizer: a class (its defaults), an instance (with its groups, options and state; it is not changed), a
            `functools.partial` or another callable that takes the parameters, the name of a class of `torch.optim` in
            any case ("adamw"), or None.
        parameters: the model's parameters, real, fake or on "meta"; those with `requires_grad=False` are left out. For
            an instance, the parameters in its groups are taken instead.
        idle: those of an instance's parameters that have no gradient when it steps; only state that exists counts.
        device_type: the type of device where the step will run; by default the device of the parameters (CPU for meta).

    Raises:
        ValueError: for an unknown name, for LBFGS, or one that cannot be made from the parameters alone.
    """
    if optimizer is None:
        return OptimizerAccount(0, 0, "none")
    given = parameters_of(optimizer) if isinstance(optimizer, Optimizer) else list(parameters)
    still = set(map(id, idle))
    trained = [parameter for parameter in given if parameter.requires_grad and id(parameter) not in still]
    device_type = device_type or next((p.device.type for p in trained if p.device.type != "meta"), HOST.type)
    if isinstance(optimizer, (str, type)):
        layouts = tuple(_kind(shard_of(one)) for one in trained)
        return _account_of_class(optimizer, layouts, device_type, torch.get_num_threads())
    return _account_of(optimizer, trained, device_type, [parameter for parameter in given if id(parameter) in still])


@lru_cache(maxsize=64)
def _account_of_class(
    optimizer: OptimizerLike, layouts: Sequence[Layout], device_type: str, threads: int
) -> OptimizerAccount:
    """The account of a class. Kernels of the CPU take a workspace for each of torch's `threads`."""
    return _account_of(optimizer, [on_meta(*layout) for layout in layouts], device_type)


def _account_of(
    optimizer: OptimizerLike, trained: list[torch.Tensor], device_type: str, idle: Sequence[torch.Tensor] = ()
) -> OptimizerAccount:
    if device_of(device_type).is_host and trained and takes_singly(optimizer):
        found = _one_by_one(optimizer, trained)
        if found is not None:
            return found
    # A build of torch for the CPU alone cannot run all operators on fakes of other devices: some need the driver.
    for home in dict.fromkeys((device_type, HOST.type)):
        try:
            return _tried(optimizer, trained, device_type, home, idle)
        except _TrialError as error:
            name, why = error.args
    # The high estimate for an optimizer whose steps cannot be tried, as `optimizer_account` says.
    state = dict(optimizer.state) if isinstance(optimizer, Optimizer) else {}
    groups = [group["params"] for group in (optimizer.param_groups if isinstance(optimizer, Optimizer) else ())]
    used = [one for group in groups if any(one in state for one in group) for one in group]
    held = sum(leaf.nbytes for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor))
    singles = [4 * shard_of(one).numel() for one in trained]
    further = [single for one, single in zip(trained, singles, strict=True) if one not in state]
    copies = held / max(1, sum(4 * shard_of(one).numel() for one in used)) if held else _COPIES
    temporaries = max(sum(singles), _LARGEST * max(singles, default=0))
    return OptimizerAccount(
        held + math.ceil(copies * sum(further)),
        temporaries + SCALARS,
        f"{name} (guessed)",
        guess=(
            f"memopt could not run a step of {name} on tensors without memory ({why}), and estimates the memory that "
            "the optimizer takes, rather too much than too little; if you know how much it is, give optimizer=None and "
            "a budget smaller by that much"
        ),
    )


def takes_singly(optimizer: OptimizerLike) -> bool:
    """Whether it is, or names, a class of torch that steps each parameter whatever the others are."""
    names = [single.__name__.lower() for single in _SINGLY]
    return optimizer.lower() in names if isinstance(optimizer, str) else optimizer in _SINGLY


def _one_by_one(optimizer: OptimizerLike, trained: list[torch.Tensor]) -> OptimizerAccount | None:
    """The account from trials on one parameter of each layout. A parameter's last temporary is freed in the step of the
    next one, so two layouts that follow each other are tried together where that may be the peak. None where one trial
    on all parameters takes no longer, or where the implementation steps them all at once."""
    kinds = [_kind(parameter) for parameter in trained]
    first = dict(zip(reversed(kinds), reversed(trained), strict=True))
    pairs = dict.fromkeys(pairwise(kinds))
    if len(first) + 2 * len(pairs) >= len(trained):
        return None
    singly = _singly(optimizer, first.values())
    if any(not account.name.endswith("(for-loop)") for account in singly.values()):
        return None
    temporaries = max(account.step_temporary_bytes for account in singly.values())
    most = {pair: sum(singly[kind].step_temporary_bytes for kind in pair) for pair in pairs}
    for one, following in sorted(pairs, key=most.__getitem__, reverse=True):
        if most[one, following] <= temporaries:
            break
        both = _tried(optimizer, [on_meta(*one), on_meta(*following)], HOST.type, home="meta")  # also if alike
        temporaries = max(temporaries, both.step_temporary_bytes)
    return OptimizerAccount(sum(singly[kind].state_bytes for kind in kinds), temporaries, singly[kinds[0]].name)


def _kind(parameter: torch.Tensor) -> Layout:
    return parameter.shape, parameter.stride(), parameter.dtype


def _singly(optimizer: OptimizerLike, parameters: Iterable[torch.Tensor]) -> dict[Layout, OptimizerAccount]:
    """The accounts of single parameters by their layout. Contiguous ones of one dtype differ by their number of
    elements alone, in which state and temporaries are linear: those with the fewest and the most elements are tried,
    and the others interpolated."""
    found: dict[Layout, OptimizerAccount] = {}
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.is_contiguous() and parameter.numel() > 1:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        else:
            found[_kind(parameter)] = _tried(optimizer, [parameter], HOST.type, home="meta")
    for alike in by_dtype.values():
        fewest, most = (end(alike, key=torch.Tensor.numel) for end in (min, max))
        ends = [_tried(optimizer, [parameter], HOST.type, home="meta") for parameter in dict.fromkeys((fewest, most))]
        low, high = ends[0], ends[-1]
        for parameter in alike:
            part = (parameter.numel() - fewest.numel()) / max(1, most.numel() - fewest.numel())
            state = round(low.state_bytes + part * (high.state_bytes - low.state_bytes))
            more = high.step_temporary_bytes - low.step_temporary_bytes
            temporaries = round(low.step_temporary_bytes + part * more)
            found[_kind(parameter)] = OptimizerAccount(state, temporaries, low.name)
    return found


class _TrialError(ValueError):
    """Raised where a step does not run on fake tensors, with the name of the optimizer, and why."""


def _tried(
    optimizer: OptimizerLike,
    trained: list[torch.Tensor],
    device_type: str,
    home: str,
    idle: Sequence[torch.Tensor] = (),
) -> OptimizerAccount:
    """The account from steps on fakes on the device `home`, with the implementation and kernels of `device_type`.
    `idle` parameters have no gradient in these steps. Raises `_TrialError` where a step does not run on fakes."""
    device, most_calls = device_of(device_type), _MOST_CALLS * (1 + len(trained))
    count = MetaBytes() if home == "meta" else EagerBytes(device_type, home, most_calls=most_calls)
    with optimizer_on_fakes(optimizer, trained, count, home, foreach=device.foreach, idle=idle) as on_fakes:
        name = type(on_fakes).__name__
        refuse(on_fakes)
        if not trained:
            return OptimizerAccount(count.live_bytes if isinstance(optimizer, Optimizer) else 0, 0, name)
        _run_steps(on_fakes, count, name)
        stepped = parameters_of(on_fakes)
        moved = count.bytes_among([parameter.data for parameter in stepped])  # replaces their old memory
        made = count.bytes_among([parameter.grad for parameter in stepped])  # gradients that it made
        temporaries = max(0, count.peak_bytes - count.live_bytes) + made + SCALARS
        ways = {"::_fused_": "fused", "::_foreach_": "foreach"}  # known from the kernels that it called
        way = next((way for mark, way in ways.items() if any(mark in kernel for kernel in count.kernels)), "for-loop")
        name = f"{name} ({way})"
        held = dict.fromkeys([*state_tensors(on_fakes), *held_tensors(on_fakes)])
        blocks = tuple(tensor.nbytes for tensor in held if count.has_counted(tensor))
        state = count.live_bytes - moved - made
        return OptimizerAccount(state, temporaries, name, blocks if device.caching else ())


def refuse(optimizer: Optimizer) -> None:
    """Raise `ValueError` for LBFGS, whose step evaluates the model."""
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            f"{name} evaluates the model inside its step (a closure), which cannot be planned; use another optimizer, "
            "or plan with optimizer=None and a budget less the memory that it holds"
        )


def _run_steps(on_fakes: Optimizer, count: EagerBytes, name: str) -> None:
    """Run three steps: a first, a second, and a late one. Raises `_TrialError` where one does not run."""
    try:
        for number in (None, None, _LATE_STEP):
            if number is not None:
                _set_step(on_fakes, number)
            with count:
                step(on_fakes)
    except Exception as error:  # whatever an optimizer of the user's raises
        why = str(error).strip().partition("\n")[0] or type(error).__name__
        raise _TrialError(name, why) from error


def _set_step(on_fakes: Optimizer, number: int) -> None:
    """Set the optimizer's step numbers, which all of torch's name "step"."""
    for state in on_fakes.state.values():
        step = state.get("step") if isinstance(state, dict) else None
        if isinstance(step, torch.Tensor) and not isinstance(step, FakeTensor):
            with plain_tensors():
                step.fill_(number)
        elif isinstance(step, (int, float)):
            state["step"] = number
