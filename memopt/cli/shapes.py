"""Shapes and dtypes of a model's inputs as they are written on the command line: `input_ids=8x1024:int64`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from memopt.cli.failures import UsageError

_WRITTEN = re.compile(r"(?:(?P<name>\w+)=)?(?P<sizes>\d+(?:x\d+)*)(?::(?P<dtype>\w+))?")
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
# Inputs of these names hold whole numbers unless their dtype is given.
_WHOLE = re.compile(r"idx|y|targets?|tokens|.*(ids|labels?|mask|positions)")


@dataclass(frozen=True)
class Shape:
    """Sizes and dtype of one input."""

    sizes: tuple[int, ...]
    dtype: torch.dtype

    def meta(self) -> torch.Tensor:
        """A tensor without memory, for planning."""
        return torch.empty(self.sizes, dtype=self.dtype, device="meta")

    def random(self, device: torch.device, below: int = 2) -> torch.Tensor:
        """A random tensor: normally distributed, or for whole numbers evenly from 0 up to `below`, excluded."""
        if self.dtype.is_floating_point:
            return torch.randn(self.sizes, device=device).to(self.dtype)
        return torch.randint(0, 2 if self.dtype is torch.bool else below, self.sizes, device=device).to(self.dtype)

    def with_batch(self, size: int) -> Shape:
        """The same shape with another first size."""
        return Shape((size, *self.sizes[1:]), self.dtype)

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.sizes))}:{str(self.dtype).removeprefix('torch.')}"


Shapes = dict[str, Shape]
"""Shapes by the names of the forward's parameters, or by "0", "1" and so on where they are positional."""


def parse_shapes(written: Iterable[str]) -> Shapes:
    """The shapes as they are written, all with a name, or all without. Raises `UsageError`."""
    shapes: Shapes = {}
    for number, text in enumerate(written):
        found = _WRITTEN.fullmatch(text.strip())
        if found is None:
            raise UsageError(
                f"--shape takes NAME=SIZES:DTYPE, such as input_ids=8x1024:int64, not {text!r}; sizes are whole "
                "numbers with an x between them"
            )
        name = found["name"] or str(number)
        if name in shapes:
            raise UsageError(f"--shape is given twice for {name!r}; give one shape for each input")
        sizes = tuple(map(int, found["sizes"].split("x")))
        if 0 in sizes:
            raise UsageError(f"--shape {text} has a size of 0; sizes are 1 or more")
        shapes[name] = Shape(sizes, _dtype(found["dtype"], name))
    if len({name.isdigit() for name in shapes if name != "target"}) > 1:
        raise UsageError(f"name all shapes or none, not only {', '.join(n for n in shapes if not n.isdigit())}")
    return shapes


def _dtype(written: str | None, name: str) -> torch.dtype:
    """The dtype of that name; by default whole numbers for inputs that are called so, else float32."""
    if written is None:
        return torch.int64 if _WHOLE.fullmatch(name) else torch.float32
    found = getattr(torch, _SHORT.get(written, written), None)
    if not isinstance(found, torch.dtype):
        raise UsageError(f"--shape has no dtype {written!r}; int64, float32, bfloat16 and bool are some of torch's")
    return found
