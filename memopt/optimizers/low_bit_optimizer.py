"""Adam with its two moments in 8 bits."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import optim

from memopt.optimizers.bf16_parameters import BF16ParametersOptimizer
from memopt.optimizers.block_quantization import BLOCK, blocks_of, dequantize, quantize
from memopt.optimizers.one_parameter import Piece, flat, is_dense
from memopt.optimizers.parameterwise import Parameterwise, Span
from memopt.optimizers.wrapped_optimizer import State

# Whether a moment has a sign: second moments are never negative.
_SIGNED = {"exp_avg": True, "exp_avg_sq": False, "max_exp_avg_sq": False}
# The moments of smaller parameters (biases, norms) stay in float32, as in bitsandbytes and torchao: they are few bytes.
LEAST_ELEMENTS = 4096


class LowBitOptimizer(Parameterwise):
    """Keeps the moments of Adam or AdamW as 8-bit codes with a scale for each 256 of them, and converts those of one
    piece of a parameter at a time to float32 to step it.

    Parameters of less than 4096 elements keep their moments in float32. In the state of the others, "exp_avg_codes" and
    "exp_avg_scales" take the place of "exp_avg", and so for the other moments.

    Raises:
        TypeError, ValueError: for another optimiser than these two, or `BF16ParametersOptimizer` around one of them.
    """

    title: ClassVar[str] = "low_bit_optimizer"

    def __init__(self, inner: optim.Optimizer) -> None:
        check_adam(inner.inner if isinstance(inner, BF16ParametersOptimizer) else inner)
        super().__init__(inner)
        for parameter, state in self.state.items():
            for key in _SIGNED.keys() & state.keys() if _is_kept_low(parameter) else ():
                whole = Piece(0, parameter.numel(), flat=True, first=True, last=True)
                value = flat(state.pop(key))
                self._close_state(parameter, state, key, whole, value.float().clone(), in_place=False)

    def span(self, key: str, parameter: torch.Tensor, piece: Piece) -> Span | None:
        elements = parameter.numel()
        if key.endswith("_codes"):
            return Span(piece.start, piece.stop, elements)
        if key.endswith("_scales"):
            return Span(piece.start // BLOCK, blocks_of(piece.stop), blocks_of(elements))
        return super().span(key, parameter, piece)

    def _take(self, parameter: torch.Tensor, state: State, piece: Piece) -> State:
        low = {key for key in _SIGNED if f"{key}_codes" in state}
        hidden = {f"{key}_{part}" for key in low for part in ("codes", "scales")}
        given = super()._take(parameter, {key: value for key, value in state.items() if key not in hidden}, piece)
        for key in low:
            codes, scales = _slices(state, key, piece)
            moment = dequantize(codes, scales, signed=_SIGNED[key])
            given[key] = moment if isinstance(self.inner, BF16ParametersOptimizer) else moment.to(parameter.dtype)
        return given

    def _close_state(
        self, parameter: torch.Tensor, state: State, key: str, piece: Piece, value: torch.Tensor, in_place: bool
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


def _slices(state: State, key: str, piece: Piece) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a piece's codes and scales; a piece begins where a block does."""
    assert piece.start % BLOCK == 0
    codes, scales = state[f"{key}_codes"], state[f"{key}_scales"]
    return codes[piece.start : piece.stop], scales[piece.start // BLOCK : blocks_of(piece.stop)]


def check_adam(optimizer: Any) -> None:
    """Raise `ValueError` for an optimiser whose state cannot be kept in 8 bits."""
    if isinstance(optimizer, optim.Optimizer) and type(optimizer) not in (optim.Adam, optim.AdamW):
        raise ValueError(
            "low_bit_optimizer keeps the moments of torch.optim's Adam and AdamW in 8 bits, not the state of "
            f"{type(optimizer).__name__}; use one of these, or leave this proposal out"
        )
