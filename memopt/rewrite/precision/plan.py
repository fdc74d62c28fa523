"""The decision on precision: a dtype and a reason for each operator that computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Choice:
    """The dtype in which one operator computes, and the reason in a few words."""

    dtype: torch.dtype
    reason: str
    wished: bool = False
    """Whether the user, or a measurement on sample data, asks for it: then nothing of it is saved rounded."""


@dataclass(frozen=True)
class PrecisionPlan:
    """The choices by node name; nodes without one follow their input. `low` is None where everything stays in fp32."""

    low: torch.dtype | None
    choices: Mapping[str, Choice] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def assignment(self) -> dict[str, torch.dtype]:
        """The dtypes by node name, as `passes.InsertCasts` takes them."""
        return {name: choice.dtype for name, choice in self.choices.items()}

    @property
    def reasons(self) -> dict[str, str]:
        """By node name, for printing beside the lines of a graph: `bf16: autocast's list`."""
        return {name: f"{dtype_name(choice.dtype)}: {choice.reason}" for name, choice in self.choices.items()}

    @property
    def exact(self) -> frozenset[str]:
        """The nodes that the user, or a measurement, wants in fp32."""
        return frozenset(
            name for name, choice in self.choices.items() if choice.wished and choice.dtype == torch.float32
        )

    def summary(self) -> str:
        """`220 ops in bf16, 31 in fp32`."""
        counts = Counter(dtype_name(choice.dtype) for choice in self.choices.values())
        (most, times), *others = counts.most_common() or [("fp32", 0)]
        return ", ".join([f"{times} ops in {most}", *(f"{number} in {name}" for name, number in others)])

    def __str__(self) -> str:
        if self.low is None:
            return "precision: fp32"
        counts = Counter((dtype_name(choice.dtype), choice.reason) for choice in self.choices.values())
        rows = [f"  {count:5} ops in {dtype}: {reason}" for (dtype, reason), count in counts.most_common()]
        return "\n".join([f"precision: {dtype_name(self.low)}", *rows, *(f"  {note}" for note in self.notes)])


NAMES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}


def dtype_name(dtype: torch.dtype) -> str:
    """`bf16`, `fp16`, `fp32`."""
    return next((name for name, entry in NAMES.items() if entry == dtype), str(dtype).removeprefix("torch."))


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name that users give. Raises ValueError for others."""
    if name not in NAMES:
        raise ValueError(f"unknown dtype {name!r} in precision; known are fp32, bf16, fp16")
    return NAMES[name]
