"""A block of a random module: a function with modules, parameters and buffers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor, nn

Draw: TypeAlias = random.Random


Function: TypeAlias = Callable[[Any, Tensor], Tensor]


class Block(nn.Module):
    """A block whose forward is a function of the block, which has parts as attributes, and its input."""

    def __init__(self, function: Function, **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, h: Tensor) -> Tensor:
        return self.function(self, h)
