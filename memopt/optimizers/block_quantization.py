"""Tensors in 8 bits: in blocks of 256 values, each value is a code for its share of the largest in the block.

Block-wise dynamic tree quantisation of Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization"
(arXiv:2110.02861). Of the 7 bits beside the sign, the leading zeros are a decimal exponent (none is 1, six are 1e-6), a
one ends them, and the remaining bits divide 0.1 to 1 evenly. Values that are never negative use the sign's bit too.
"""

from __future__ import annotations

import functools
import itertools

import torch

BLOCK = 256
_EXPONENTS = 7


def blocks_of(elements: int) -> int:
    """The number of blocks that `elements` values take; the last may be partly filled."""
    return -(-elements // BLOCK)


def quantize(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, *, signed: bool) -> None:
    """Write the codes (uint8, one for each value) and scales (float32, one for each block) of 1-dimensional float32
    `values`, which are overwritten.

    Unsigned values other than 0 never become 0, since Adam divides by them. A block with infinity or NaN is NaN when it
    is dequantised.
    """
    for part, its_codes, its_scales in _blocks(values, codes, scales):
        low, high = torch.aminmax(part, dim=1)
        its_scales.copy_(torch.maximum(low.neg_(), high))
        part.div_(its_scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None])
        its_codes.copy_(torch.bucketize(part, _boundaries(signed, values.device), out_int32=True))


def dequantize(codes: torch.Tensor, scales: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """The float32 values of 1-dimensional codes, in a new tensor."""
    values = torch.empty_like(codes, dtype=torch.float32)
    book = _codebook(signed, codes.device)
    for part, its_codes, its_scales in _blocks(values, codes, scales):
        torch.index_select(book, 0, its_codes.reshape(-1).int(), out=part.view(-1))
        part.mul_(its_scales[:, None])
    return values


def _blocks(
    values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Views of shape (blocks, values of a block): the whole blocks, and the rest where there is one."""
    whole = values.numel() // BLOCK * BLOCK
    found = []
    if whole:
        found.append((values[:whole].view(-1, BLOCK), codes[:whole].view(-1, BLOCK), scales[: whole // BLOCK]))
    if whole < values.numel():
        found.append((values[whole:].view(1, -1), codes[whole:].view(1, -1), scales[whole // BLOCK :]))
    return found


@functools.lru_cache(maxsize=2)
def code_values(signed: bool) -> tuple[float, ...]:
    """The values of the 256 codes in ascending order; 0 and 1 are among them."""
    found = [0.0, 1.0]
    for zeros in range(_EXPONENTS):
        steps = 2 ** (_EXPONENTS - 1 - zeros) * (1 if signed else 2)
        middles = (0.1 + 0.9 * (step + 0.5) / steps for step in range(steps))
        scaled = [10.0**-zeros * middle for middle in middles]
        found += scaled + ([-value for value in scaled] if signed else [])
    assert len(found) == 256
    return tuple(sorted(found))


def _codebook(signed: bool, device: torch.device) -> torch.Tensor:
    return torch.tensor(code_values(signed), device=device)


def _boundaries(signed: bool, device: torch.device) -> torch.Tensor:
    """The limits between codes, half-way between their values; an unsigned value gets the code of 0 only where it is
    0."""
    values = code_values(signed)
    middles = [(left + right) / 2 for left, right in itertools.pairwise(values)]
    return torch.tensor(middles if signed else [0.0, *middles[1:]], device=device)
