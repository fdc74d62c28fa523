"""CUDA cards: the settings of torch's caching allocator; and attention by a card's kernels on tensors of another
device, for plans for a card that is not there. `scaled_dot_product_attention` chooses its kernel by the device of its
tensors: on a CPU attention with dropout is written out as products and a softmax, on "meta" all attention is. A card's
kernels keep neither the probabilities nor a mask of the dropout, but the state of the random generator."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from passes.compat import private

PRIVATE_NAMES = private("""
    torch._C: _accelerator_setAllocatorSettings?
    torch: _scaled_dot_product_attention_math(query, key, value, mask, dropout, is_causal, scale=, enable_gqa=)
""")

# `torch._C` is the extension module: this part has no stubs.
_set_settings: Any = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
_turned_on: list[bool] = []


def expandable_segments() -> bool:
    """Whether torch's allocator uses expandable segments in this process: by the environment, or since
    `turn_on_expandable_segments` was called."""
    return bool(_turned_on) or _in_environment() is True


def may_turn_on_expandable_segments() -> bool:
    """Whether `turn_on_expandable_segments` would change anything: on Linux, since torch has these segments nowhere
    else, if they are not in use yet and the environment neither turns them off nor names another allocator."""
    asked = _in_environment() is not None or "cudaMallocAsync" in _settings()
    return sys.platform == "linux" and _set_settings is not None and not _turned_on and not asked


def turn_on_expandable_segments() -> None:
    """Have torch's allocator use expandable segments from now on, with the other settings of the environment. Segments
    that it holds already stay in use unchanged."""
    if may_turn_on_expandable_segments():
        _set_settings(",".join(filter(None, (_settings(), "expandable_segments:True"))))
        _turned_on.append(True)


def _settings() -> str:
    return os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF") or ""


def _in_environment() -> bool | None:
    """The setting of expandable segments in the environment; None where it is not set."""
    found = re.search(r"expandable_segments\s*:\s*(True|False)", _settings())
    return None if found is None else found[1] == "True"


aten = torch.ops.aten

_ATTENTION = (
    F.scaled_dot_product_attention,
    aten.scaled_dot_product_attention,
    aten.scaled_dot_product_attention.default,
)
_WIDEST_FLASH = 256
_HALVES = (torch.float16, torch.bfloat16)
_MASK_COLUMNS = 16
"""Each row of a mask begins at a multiple of this number of elements, as the memory-efficient kernel requires."""


class CardAttention(TorchFunctionMode):
    """Context in which attention is computed as on a CUDA card of compute capability `major`: by flash attention where
    its kernel takes the arguments, else by the memory-efficient kernel, else written out. cuDNN's attention, which
    torch tries first on some cards, saves as many bytes as flash attention. Cards of one major capability are treated
    alike, though on those from 8.6 to 8.9 and from 12.0 on torch trains heads wider than 224, and with dropout those
    wider than 192, by the memory-efficient kernel. Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp."""

    def __init__(self, major: int) -> None:
        super().__init__()
        self.major = major

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ATTENTION:
            return self._attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        query, key, value = _as_autocast(query, key, value)
        tensors = query, key, value
        if attn_mask is None and self._takes_flash(*tensors, is_causal=is_causal, grouped=enable_gqa):
            return _flash(tensors, dropout_p, is_causal, scale)
        if self._takes_efficient(*tensors, grouped=enable_gqa):
            return _efficient(tensors, attn_mask, dropout_p, is_causal, scale)
        return torch._scaled_dot_product_attention_math(
            *tensors, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]

    def _takes_flash(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_causal: bool, grouped: bool
    ) -> bool:
        square = not is_causal or query.shape[-2] == key.shape[-2]
        alike = query.dtype in _HALVES and query.shape[-1] == key.shape[-1] == value.shape[-1] <= _WIDEST_FLASH
        return self.major >= 8 and square and alike and _is_dense(query, key, value, grouped=grouped)

    def _takes_efficient(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, grouped: bool) -> bool:
        dtypes = (torch.float32, torch.float16, *((torch.bfloat16,) if self.major >= 8 else ()))
        tensor_cores = self.major >= 8 or (self.major == 7 and query.dtype in _HALVES)
        aligned = 16 // query.dtype.itemsize if tensor_cores else 1
        widths = query.shape[-1] % aligned == 0 and value.shape[-1] % aligned == 0
        return query.dtype in dtypes and widths and not grouped and _is_dense(query, key, value, grouped=False)


def _is_dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, grouped: bool) -> bool:
    """Whether query, key and value are [batch, heads, rows, width] of one dtype, as the fused kernels require. With
    `grouped`, several query heads may share one of key and value."""
    tensors = query, key, value
    if any(tensor.dim() != 4 or tensor.dtype is not query.dtype or tensor.stride(-1) != 1 for tensor in tensors):
        return False
    heads = [tensor.shape[1] for tensor in tensors]
    same = query.shape[0] == key.shape[0] == value.shape[0] and (grouped or heads[0] == heads[1] == heads[2])
    return same and query.shape[2] > 0 and key.shape[2] > 0


def _as_autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors as they are; where autocast is on, in the dtype to which it casts the operands of attention."""
    kind = tensors[0].device.type
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return tensors
    low = torch.get_autocast_dtype(kind)
    return tuple(tensor.to(low) if tensor.dtype is not torch.float64 else tensor for tensor in tensors)


def _flash(tensors: Sequence[torch.Tensor], dropout: float, is_causal: bool, scale: float | None) -> torch.Tensor:
    """Attention by the flash kernel. Heads are padded to a width that is a multiple of 8."""
    width = tensors[0].shape[-1]
    scale = width**-0.5 if scale is None else scale
    if further := -width % 8:
        tensors = [F.pad(tensor, (0, further)) for tensor in tensors]
    result = aten._scaled_dot_product_flash_attention(*tensors, dropout, is_causal, scale=scale)[0]
    return result[..., :width] if further else result


def _efficient(
    tensors: Sequence[torch.Tensor], mask: torch.Tensor | None, dropout: float, is_causal: bool, scale: float | None
) -> torch.Tensor:
    """Attention by the memory-efficient kernel, with the mask as numbers in the query's dtype."""
    query, key, value = tensors
    if mask is not None:
        if mask.dtype is torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
        columns = key.shape[-2]
        if further := -columns % _MASK_COLUMNS:
            mask = F.pad(mask, (0, further))[..., :columns]
        mask = mask.expand(*query.shape[:3], columns)
    differentiated = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, differentiated, dropout, is_causal, scale=scale
    )[0]
