"""The attribute `data` of a tensor as an operator, `memopt::data`, so that a trace has a node for it.

Unlike `detach`, the attribute has a version counter of its own: what is written through it is not an error in the
backward of an operator that saved the tensor, which then computes with what was written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

torch.library.define("memopt::data", "(Tensor(a) value) -> Tensor(a)", tags=(torch.Tag.pt2_compliant_tag,))


@torch.library.impl("memopt::data", "CompositeImplicitAutograd")
def _data(value: Tensor) -> Tensor:
    """Falls apart where it is differentiated, into what torch's tracers make of the attribute."""
    return value.data


DATA: Any = torch.ops.memopt.data.default
