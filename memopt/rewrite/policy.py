"""The option `precision`, and the plan of dtypes that is made from it.

The value of the option is called a policy: a name such as "auto" or "bf16", from which the 16-bit dtype for a device
follows, or a dict of rules that set the dtypes of operators, modules or nodes. The plan has a dtype and a reason for
each operator.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import fx

from memopt.device.devices import device_of
from memopt.device.hardware import Hardware
from passes.graphs.node_facts import module_path
from passes.graphs.op_kinds import op_name


@dataclass(frozen=True)
class Choice:
    """The dtype in which one operator computes, and the reason in a few words."""

    dtype: torch.dtype
    reason: str
    wished: bool = False
    """Whether the user, or a measurement on sample data, asks for it. Then none of its values is saved rounded."""


@dataclass(frozen=True)
class PrecisionPlan:
    """The dtype chosen for each operator, by name of its node; nodes without a choice follow their input. `low` is the
    16-bit dtype."""

    low: torch.dtype
    choices: Mapping[str, Choice] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def assignment(self) -> dict[str, torch.dtype]:
        """Name of a node → its dtype, as `passes.InsertCasts` takes them."""
        return {name: choice.dtype for name, choice in self.choices.items()}

    @property
    def reasons(self) -> dict[str, str]:
        """Name of a node → its dtype and the reason, for printing with a graph: `bf16: autocast's list`."""
        return {name: f"{dtype_name(choice.dtype)}: {choice.reason}" for name, choice in self.choices.items()}

    @property
    def exact(self) -> frozenset[str]:
        """The names of the nodes that are in fp32 because the user, or a measurement, requires it."""
        return frozenset(
            name for name, choice in self.choices.items() if choice.wished and choice.dtype == torch.float32
        )

    def summary(self) -> str:
        """The number of operators in each dtype, as in `220 ops in bf16, 31 in fp32`."""
        counts = Counter(dtype_name(choice.dtype) for choice in self.choices.values())
        (most, times), *others = counts.most_common() or [("fp32", 0)]
        return ", ".join([f"{times} ops in {most}", *(f"{number} in {name}" for name, number in others)])


NAMES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}


def dtype_name(dtype: torch.dtype) -> str:
    """The short name of a dtype: `bf16`, `fp16`, `fp32`, or torch's own for others."""
    return next((name for name, entry in NAMES.items() if entry == dtype), str(dtype).removeprefix("torch."))


def dtype_of(name: str) -> torch.dtype:
    """The dtype for a name that users give, such as "bf16". Raises `ValueError` for others."""
    if name not in NAMES:
        raise ValueError(f"unknown dtype {name!r} in precision; known are fp32, bf16, fp16")
    return NAMES[name]


DEFAULT = "default"


@dataclass(frozen=True)
class Rules:
    """Dtypes by pattern, in the user's order.

    A pattern is the name of a node, of an operator (`softmax`, `aten.softmax`), or of a module with all that is in it
    (`lm_head`, `layers.0`, `layers.*.mlp`). If several match, a node's name takes precedence over an operator's name,
    and that over module patterns, of which the longest counts."""

    dtypes: tuple[tuple[str, torch.dtype], ...] = ()

    @staticmethod
    def of(given: Mapping[str, str]) -> Rules:
        """Returns the rules of a user's dict, pattern → name of a dtype, without its entry "default". Raises ValueError
        for unknown dtypes."""
        return Rules(tuple((pattern, dtype_of(name)) for pattern, name in given.items() if pattern != DEFAULT))

    def choose(self, node: fx.Node) -> tuple[str, torch.dtype] | None:
        """Returns (pattern, dtype) of the rule that applies to a node, or None."""
        matching = [(_rank(pattern, node), pattern, dtype) for pattern, dtype in self.dtypes]
        rank, pattern, dtype = max(matching, key=lambda rule: rule[0], default=(0, "", torch.float32))
        return (pattern, dtype) if rank else None

    def unmatched(self, nodes: Iterable[fx.Node]) -> tuple[str, ...]:
        """Returns the patterns that match none of the nodes."""
        known = list(nodes)
        return tuple(pattern for pattern, _ in self.dtypes if not any(_rank(pattern, node) for node in known))


def _rank(pattern: str, node: fx.Node) -> int:
    """Returns how closely a pattern matches a node; 0 if it does not match."""
    if pattern == node.name:
        return 1_000_000
    if op_name(node) and pattern.removeprefix("aten.") == op_name(node):
        return 100_000
    path = module_path(node)
    parts = path.split(".")
    prefixes = (".".join(parts[: count + 1]) for count in range(len(parts)))
    return len(pattern) if path and any(fnmatch.fnmatchcase(prefix, pattern) for prefix in prefixes) else 0


PolicyName: TypeAlias = Literal["fp32", "bf16", "fp16", "search", "auto"]
Policy: TypeAlias = PolicyName | Mapping[str, str]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)


def check_policy(policy: Any) -> Policy:
    """Returns the policy unchanged. Raises `TypeError` or `ValueError` if it is neither a known name nor a dict whose
    values are known dtypes (for its entry "default" also "auto" or "search")."""
    if isinstance(policy, str):
        if policy not in POLICIES:
            known = ", ".join(map(repr, POLICIES))
            raise ValueError(f"precision must be one of {known}, or a dict of rules, not {policy!r}")
        return policy
    if not isinstance(policy, Mapping) or not all(isinstance(part, str) for pair in policy.items() for part in pair):
        raise TypeError(
            "precision must be a name, such as 'bf16', or a dict of dtypes by operator, module or node, such as "
            f"{{'default': 'bf16', 'lm_head': 'fp32'}}, not {policy!r}"
        )
    for pattern, name in policy.items():
        if not (pattern == DEFAULT and name in ("auto", "search")):
            dtype_of(name)
    return policy


def searches(policy: Policy) -> bool:
    """Returns whether a policy, or the default of a user's rules, is "search"."""
    return (policy if isinstance(policy, str) else policy.get(DEFAULT)) == "search"


def low_dtype(policy: Policy, hardware: Hardware) -> torch.dtype:
    """Returns the dtype that a policy, or the "default" of a user's rules, means on a device: for "auto" and "search"
    bf16 where the device computes in it, fp16 where it has only that, else fp32. "search" means bf16 also on a CPU that
    is no faster in it. Raises ValueError for fp16 where `hardware` has no rate for it."""
    name = policy if isinstance(policy, str) else policy.get(DEFAULT, "auto")
    if name in ("auto", "search"):
        device = device_of(hardware)
        if name == "search" and device.is_host:
            return torch.bfloat16
        known = (dtype for dtype in (torch.bfloat16, torch.float16) if device.computes_in(hardware, dtype))
        return next(known, torch.float32)
    dtype = dtype_of(name)
    if dtype == torch.float16 and str(dtype).removeprefix("torch.") not in hardware.flops:
        raise ValueError(f"precision={name!r}: {hardware.name} does not compute in {dtype_name(dtype)}; use 'auto'")
    return dtype
