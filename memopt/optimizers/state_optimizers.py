"""Optimizers that keep another's state in less of the device's memory: Adam's moments in 8 bits, or any in the host's.

In 8 bits, values are in blocks of 256, and each is a code for its share of the largest in the block: the block-wise
dynamic tree quantisation of Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization" (arXiv:2110.02861). Of
the 7 bits beside the sign, the leading zeros are a decimal exponent (none is 1, six are 1e-6), a one ends them, and the
remaining bits divide 0.1 to 1 evenly. Values that are never negative use the sign's bit too.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, ClassVar

import torch
from torch import optim

from memopt.compat.host import HOST, is_on_host
from memopt.optimizers.bf16_parameters import BF16ParametersOptimizer
from memopt.optimizers.parameterwise import Parameterwise, Slice, Span, State, flat, is_dense

BLOCK = 256
_EXPONENTS = 7


def blocks_of(elements: int) -> int:
    """The number of blocks of `BLOCK` values that `elements` values take; the last may be partly filled."""
    return -(-elements // BLOCK)


def quantize(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, *, signed: bool) -> None:
    """Write the codes (uint8, one for each value) and scales (float32, one for each block of `BLOCK` values) of
    1-dimensional float32 `values`, which are overwritten. Without `signed` values are from 0 on.

    Unsigned values other than 0 never become 0, since Adam divides by them. A block with infinity or NaN becomes
    NaN."""
    for part, its_codes, its_scales in _blocks(values, codes, scales):
        low, high = torch.aminmax(part, dim=1)
        its_scales.copy_(torch.maximum(low.neg_(), high))
        part.div_(its_scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None])
        its_codes.copy_(torch.bucketize(part, _boundaries(signed, values.device), out_int32=True))


def dequantize(codes: torch.Tensor, scales: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """The float32 values of 1-dimensional `codes` and `scales` that `quantize` wrote, in a new tensor."""
    values = torch.empty_like(codes, dtype=torch.float32)
    book = torch.tensor(code_values(signed), device=codes.device)
    for part, its_codes, its_scales in _blocks(values, codes, scales):
        torch.index_select(book, 0, its_codes.reshape(-1).int(), out=part.view(-1))
        part.mul_(its_scales[:, None])
    return values


def _blocks(
    values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Views of `values` and `codes` of shape (blocks, values of a block), and of their `scales`: first for all whole
    blocks, then for the rest, if there is one."""
    whole = values.numel() // BLOCK * BLOCK
    found = []
    if whole:
        found.append((values[:whole].view(-1, BLOCK), codes[:whole].view(-1, BLOCK), scales[: whole // BLOCK]))
    if whole < values.numel():
        found.append((values[whole:].view(1, -1), codes[whole:].view(1, -1), scales[whole // BLOCK :]))
    return found


@functools.lru_cache(maxsize=2)
def code_values(signed: bool) -> tuple[float, ...]:
    """The values of the 256 codes in ascending order, as fractions of their block's scale; 0 and 1 are among them."""
    found = [0.0, 1.0]
    for zeros in range(_EXPONENTS):
        steps = 2 ** (_EXPONENTS - 1 - zeros) * (1 if signed else 2)
        middles = (0.1 + 0.9 * (step + 0.5) / steps for step in range(steps))
        scaled = [10.0**-zeros * middle for middle in middles]
        found += scaled + ([-value for value in scaled] if signed else [])
    assert len(found) == 256
    return tuple(sorted(found))


def _boundaries(signed: bool, device: torch.device) -> torch.Tensor:
    """The limits between codes, half-way between their values; only an unsigned 0 gets the code of 0."""
    values = code_values(signed)
    middles = [(left + right) / 2 for left, right in itertools.pairwise(values)]
    return torch.tensor(middles if signed else [0.0, *middles[1:]], device=device)


# Whether a moment has a sign: second moments are never negative.
_SIGNED = {"exp_avg": True, "exp_avg_sq": False, "max_exp_avg_sq": False}
# The moments of smaller parameters (biases, norms) are not converted, as in bitsandbytes and torchao: they are few.
LEAST_ELEMENTS = 4096


class LowBitOptimizer(Parameterwise):
    """Keeps the moments of Adam or AdamW as 8-bit codes with a scale for each 256 of them, and converts those of one
    piece of a parameter at a time back to floating point to step it.

    Parameters with fewer than 4096 elements, or with gaps in memory, keep their moments as `inner` makes them. In the
    state of the others, "exp_avg_codes" and "exp_avg_scales" take the place of "exp_avg", and likewise for the other
    moments.

    Raises:
        TypeError: where `inner` is not an optimizer.
        ValueError: where `inner` is neither Adam nor AdamW, nor a `BF16ParametersOptimizer` around one of them.
    """

    title: ClassVar[str] = "low_bit_optimizer"

    def __init__(self, inner: optim.Optimizer) -> None:
        check_adam(inner.inner if isinstance(inner, BF16ParametersOptimizer) else inner)
        super().__init__(inner)
        for parameter, state in self.state.items():
            for key in _SIGNED.keys() & state.keys() if _is_kept_low(parameter) else ():
                whole = Slice(0, parameter.numel(), flat=True, first=True, last=True)
                value = flat(state.pop(key))
                self._close_state(parameter, state, key, whole, value.float().clone(), in_place=False)

    def span(self, key: str, parameter: torch.Tensor, piece: Slice) -> Span | None:
        elements = parameter.numel()
        if key.endswith("_codes"):
            return slice(piece.start, piece.stop), elements
        if key.endswith("_scales"):
            return slice(piece.start // BLOCK, blocks_of(piece.stop)), blocks_of(elements)
        return super().span(key, parameter, piece)

    def _take(self, parameter: torch.Tensor, state: State, piece: Slice) -> State:
        low = {key for key in _SIGNED if f"{key}_codes" in state}
        hidden = {f"{key}_{part}" for key in low for part in ("codes", "scales")}
        given = super()._take(parameter, {key: value for key, value in state.items() if key not in hidden}, piece)
        for key in low:
            codes, scales = _slices(state, key, piece)
            moment = dequantize(codes, scales, signed=_SIGNED[key])
            given[key] = moment if isinstance(self.inner, BF16ParametersOptimizer) else moment.to(parameter.dtype)
        return given

    def _close_state(
        self, parameter: torch.Tensor, state: State, key: str, piece: Slice, value: torch.Tensor, in_place: bool
    ) -> None:
        if key not in _SIGNED or not _is_kept_low(parameter):
            super()._close_state(parameter, state, key, piece, value, in_place)
            return
        if f"{key}_codes" not in state:
            elements = parameter.numel()
            state[f"{key}_codes"] = torch.empty(elements, dtype=torch.uint8, device=parameter.device)
            state[f"{key}_scales"] = torch.empty(blocks_of(elements), dtype=torch.float32, device=parameter.device)
        quantize(value.float(), *_slices(state, key, piece), signed=_SIGNED[key])


def _is_kept_low(parameter: torch.Tensor) -> bool:
    """Whether the moments of a parameter are kept in 8 bits."""
    return parameter.numel() >= LEAST_ELEMENTS and is_dense(parameter)


def _slices(state: State, key: str, piece: Slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a piece's codes and scales; a piece begins where a block does."""
    assert piece.start % BLOCK == 0
    codes, scales = state[f"{key}_codes"], state[f"{key}_scales"]
    return codes[piece.start : piece.stop], scales[piece.start // BLOCK : blocks_of(piece.stop)]


def check_adam(optimizer: Any) -> None:
    """Raise `ValueError` for an optimizer whose state cannot be kept in 8 bits: any but torch's own Adam and AdamW."""
    if isinstance(optimizer, optim.Optimizer) and type(optimizer) not in (optim.Adam, optim.AdamW):
        raise ValueError(
            "low_bit_optimizer keeps the moments of torch.optim's Adam and AdamW in 8 bits, not the state of "
            f"{type(optimizer).__name__}; use one of these, or leave 'low_bit_optimizer' out of allow"
        )


class OffloadedOptimizer(Parameterwise):
    """Keeps `inner`'s state in the host's memory, and steps one piece of a parameter at a time, whose state is copied
    to the device and back. The results are those of `inner` stepping parameters one by one.

    The state of parameters that are on the host themselves is copied too, without benefit. Copies do not overlap with
    compute. `state_dict` is that of `inner`; a state dict of a plain optimizer can be loaded, and goes to the host.

    Raises:
        TypeError: where `inner` is not an optimizer.
        ValueError: where `inner` needs a closure, or takes sparse gradients only.
    """

    title: ClassVar[str] = "offload_optimizer"
    keeps_form: ClassVar[bool] = True

    def __init__(self, inner: optim.Optimizer) -> None:
        super().__init__(inner)
        for parameter, state in self.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim():
                    state[key] = self.room_for(parameter, value, value.dtype).copy_(value)

    def room_for(self, parameter: torch.Tensor, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        made = torch.empty_like(tensor, dtype=dtype, device=HOST, requires_grad=False)
        return made.pin_memory() if parameter.is_cuda else made

    def _take(self, parameter: torch.Tensor, state: State, piece: Slice) -> State:
        given = super()._take(parameter, state, piece)
        for key, value in given.items():
            if isinstance(value, torch.Tensor) and value.dim():
                # Pinned memory is next written by the copy back, which is queued behind this one.
                pinned = is_on_host(value) and value.is_pinned()
                given[key] = value.to(parameter.device, copy=True, non_blocking=pinned)
        return given

    def _close_state(
        self, parameter: torch.Tensor, state: State, key: str, piece: Slice, value: torch.Tensor, in_place: bool
    ) -> None:
        if key not in state:
            state[key] = self.room_for(parameter, parameter, value.dtype)
        piece.of(state[key]).copy_(value)

    def _close_part(self, kept: torch.Tensor, value: torch.Tensor, in_place: bool) -> None:
        super()._close_part(kept, value, in_place=False)

    def _close_other(self, parameter: torch.Tensor, kept: Any, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.dim():
            return value
        same = isinstance(kept, torch.Tensor) and kept.shape == value.shape and kept.dtype == value.dtype
        return (kept if same else self.room_for(parameter, value, value.dtype)).copy_(value)
