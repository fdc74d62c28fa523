"""8-bit floating-point formats: scales, quantising and dequantising.

Formats and their use after Micikevicius et al. 2022 (arXiv:2209.05433): e4m3 (3 bits of mantissa, up to 448) for
values, e5m2 (2 bits, up to 57,344) for gradients. A tensor, or each tile of it, has one scale: values are divided by it
before they are rounded, which makes the largest magnitude the format's largest. Tiles after DeepSeek-V3 (2024,
arXiv:2412.19437): 128 values along what a product sums over, 128 by 128 of weights, scales in fp32; and after the OCP
Microscaling Formats (MX) specification 1.0 (2023): 32 values along what is summed over, scales that are powers of two,
rounded up (Mishra et al. 2025, arXiv:2506.08027) so that nothing lies beyond the format's largest.

Delayed scaling takes the scale of a tensor from the largest magnitudes that it had in earlier steps, after Transformer
Engine's `DelayedScaling` (NVIDIA, 2022): the largest of the last 16. Only `memopt::fp8_delayed_scale` has state. The
scale is all that it returns, and it is neither merged nor recomputed; quantising by a given scale is pure. The state
belongs to a model: `histories_of(model)` returns it, it dies with the model, and `histories_state` and `load_histories`
save and load it.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
PART_ELEMENTS = 2**22
"""Elements that are widened to fp32 at a time on the CPU: 16 MB."""


@dataclass(frozen=True)
class _Tile:
    """The size of the tiles that have one scale each, and the dtype of the scales."""

    rows: int
    columns: int
    scale_dtype: torch.dtype = torch.float32


LONGEST = 128
"""The longest side of any tile."""
WHOLE = ""
"""The tile that is the whole tensor, with one scale."""
TILES = {
    "1x128": _Tile(1, 128),
    "128x1": _Tile(128, 1),
    "128x128": _Tile(128, 128),
    "1x32": _Tile(1, 32, E8M0),
    "32x1": _Tile(32, 1, E8M0),
}
"""The tiles by name, which is rows "x" columns."""


def turned(tile: str) -> str:
    """Returns the tile of the transposed matrix: "128x1" for "1x128". A tile is the size, rows by columns, of the
    blocks of a matrix that have one scale each; "" is the whole matrix."""
    return "x".join(reversed(tile.split("x")))


def tile_of(values: Tensor, scale: Tensor) -> str:
    """Returns the tile by which a matrix was quantised ("1x128": one scale for each 128 values of a row; "": one for
    all), found from shape and dtype of its scales. Raises `ValueError` if no tile has such scales."""
    if not scale.dim():
        return WHOLE
    rows, columns = values.shape
    for name, tile in TILES.items():
        if tile.scale_dtype == scale.dtype and tuple(scale.shape) == scale_shape(rows, columns, name):
            return name
    raise ValueError(
        f"scales of {list(scale.shape)} in {scale.dtype} do not fit a matrix of {list(values.shape)}; pass those that "
        "quantize returned with it"
    )


def scale_shape(rows: int, columns: int, tile: str) -> tuple[int, ...]:
    """Returns the shape of a matrix's scales for a tile such as "1x128": [rows, columns / 128], rounded up; () for "",
    one scale for the whole matrix."""
    return (-(-rows // TILES[tile].rows), -(-columns // TILES[tile].columns)) if tile else ()


def quantize(x: Tensor, dtype: torch.dtype, tile: str = WHOLE) -> tuple[Tensor, Tensor]:
    """Returns a matrix divided by its scales, in the 8-bit `dtype` and contiguous, and the scales: in fp32, or in e8m0
    for tiles of 32. There is one scale for each block of the size `tile` ("1x128"), or one in all for "".

    A value that is not finite makes its whole block NaN, so that the check of a loss scale finds it."""
    scale = scale_of(_amax(x, tile), dtype)
    if tile and TILES[tile].scale_dtype == E8M0:
        scale = _power_of_two(scale)
    narrow = _by_parts(_round, x, scale, tile, dtype, torch.finfo(dtype).max)
    return narrow, scale.to(TILES[tile].scale_dtype) if tile else scale


def quantize_by(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a matrix divided by `scale`, clamped to the range of the 8-bit `dtype`, in that dtype."""
    return _by_parts(_round, x, scale, WHOLE, dtype, torch.finfo(dtype).max)


def scale_of(largest_magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the scale for values up to `largest_magnitude`: that magnitude, divided by the scale, is the largest
    number of the 8-bit `dtype`. Never 0, also for a magnitude of 0."""
    return (largest_magnitude / torch.finfo(dtype).max).clamp_min_(torch.finfo(torch.float32).tiny)


def _power_of_two(scale: Tensor) -> Tensor:
    """Returns for every scale the least power of two that is not below it; NaN for one that is not finite."""
    mantissa, exponent = torch.frexp(scale)
    found = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).to(exponent.dtype))
    return torch.where(scale.isfinite(), found, torch.nan)


def dequantize(narrow: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the matrix `narrow` multiplied with its scales (see `quantize`), in `dtype`, contiguous."""
    return _by_parts(_widen, narrow, scale.float(), tile_of(narrow, scale), dtype)


def _by_parts(
    function: Callable[..., Tensor], x: Tensor, scale: Tensor, tile: str, dtype: torch.dtype, *options: Any
) -> Tensor:
    """Returns `function` of a matrix and its scales, contiguous. It is elementwise, and runs on some rows at a time."""
    kernel, parts = _kernel(function, x.device.type), list(_parts(x, tile))
    if len(parts) == 1:
        return kernel(x, scale, tile, dtype, *options).contiguous()
    result = torch.empty(x.shape, dtype=dtype, device=x.device)
    for part, tiles in parts:
        result[part] = kernel(x[part], scale[tiles] if tile else scale, tile, dtype, *options)
    return result


def amax(x: Tensor) -> Tensor:
    """Returns the largest magnitude of a tensor in fp32, without copying it; 0 for an empty one."""
    if not x.numel():
        return torch.zeros((), device=x.device)
    least, most = torch.aminmax(x)
    return torch.maximum(-least, most).float()


def _amax(x: Tensor, tile: str) -> Tensor:
    """Returns the largest magnitude of a matrix, or of each of its tiles."""
    if not tile:
        return amax(x)
    if not x.numel():
        return torch.zeros(scale_shape(x.shape[0], x.shape[1], tile), device=x.device)
    find = _kernel(_amax_of_tiles, x.device.type)
    return torch.cat([find(x[part], tile) for part, _ in _parts(x, tile)])


def _amax_of_tiles(x: Tensor, tile: str) -> Tensor:
    (rows, columns), (high, wide) = x.shape, (TILES[tile].rows, TILES[tile].columns)
    padded = torch.nn.functional.pad(x.abs(), (0, -columns % wide, 0, -rows % high))
    return padded.view(-(-rows // high), high, -(-columns // wide), wide).amax((1, 3)).float()


def _round(x: Tensor, scale: Tensor, tile: str, dtype: torch.dtype, largest: float) -> Tensor:
    return (x.float() / _spread(scale, tile, x)).clamp(-largest, largest).to(dtype)


def _widen(narrow: Tensor, scale: Tensor, tile: str, dtype: torch.dtype) -> Tensor:
    return (narrow.float() * _spread(scale, tile, narrow)).to(dtype)


def _spread(scale: Tensor, tile: str, like: Tensor) -> Tensor:
    """Returns the scales, one for each element or one for all."""
    if not tile:
        return scale
    rows, columns = (torch.arange(size, device=like.device) for size in like.shape)
    return scale[(rows // TILES[tile].rows)[:, None], (columns // TILES[tile].columns)[None]]


@functools.cache
def _kernel(function: Callable[..., Tensor], device_type: str) -> Callable[..., Tensor]:
    """Returns the function, on CUDA as one compiled kernel: separate operators would take longer than 8 bits save."""
    if device_type != "cuda":
        return function
    compiled: Any = torch.compile(function, dynamic=True)
    return compiled


def _parts(x: Tensor, tile: str) -> Iterator[tuple[slice, slice]]:
    """Yields slices of the rows that are widened at a time, each with the slice of their scales' rows. On CUDA, where
    nothing is widened in memory, there is one slice of all rows."""
    step = TILES[tile].rows if tile else 1
    rows = x.shape[0] if x.device.type == "cuda" else PART_ELEMENTS // max(1, x.shape[1])
    rows = max(1, -(-rows // step)) * step
    for start in range(0, x.shape[0], rows):
        yield slice(start, start + rows), slice(start // step, (start + rows) // step)


LENGTH = 16
"""How many of a tensor's latest magnitudes are stored."""
_numbers = itertools.count()


class Histories:
    """The largest magnitudes that tensors in one model's 8-bit layers had in the latest 16 steps: for each name that a
    layer gave a tensor, an fp32 tensor [16], latest step first.

    Operators refer to one by a string: `prefix`, which is unique in this process, followed by the tensor's name."""

    def __init__(self) -> None:
        self.prefix = f"{next(_numbers)}/"
        self.magnitudes: dict[str, Tensor] = {}
        """The stored magnitudes by name. The names are the same for another copy of the model, in any process."""
        _by_prefix[self.prefix] = self

    def scale(self, name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the scale of `x` for an 8-bit dtype, a scalar in fp32, from the largest of the magnitudes stored
        under `name`, and stores the largest magnitude of `x` with them.

        Where nothing but zeros is stored under that name yet, it is the scale for `x` itself. Where `x` is not finite,
        neither is the scale, and nothing is stored."""
        now = amax(x)
        finite = now.isfinite()
        known = self.magnitudes.get(name)
        if known is None:
            known = now.masked_fill(~finite, 0.0).repeat(LENGTH)
        known = known.to(x.device)
        stored = known.amax()
        largest = torch.where(finite & (stored > 0), stored, now)
        self.magnitudes[name] = torch.cat([torch.where(finite, now, known[:1].squeeze(0))[None], known[:-1]])
        return scale_of(largest, dtype)


_by_prefix: weakref.WeakValueDictionary[str, Histories] = weakref.WeakValueDictionary()
"""By prefix, the histories whose model is alive: operators find theirs here."""
_of_model: weakref.WeakKeyDictionary[object, Histories] = weakref.WeakKeyDictionary()
"""The histories of each model, which die with it."""


def histories_of(model: object) -> Histories:
    """Returns the histories that belong to a model, always the same object for the same model."""
    if model not in _of_model:
        _of_model[model] = Histories()
    return _of_model[model]


def histories_state(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Returns the largest magnitudes of the latest steps (see `Histories`) that are stored for a model and its
    submodules, by path of the module, then by name."""
    known = {path: _of_model[module] for path, module in model.named_modules() if module in _of_model}
    return {path: dict(histories.magnitudes) for path, histories in known.items() if histories.magnitudes}


def load_histories(model: nn.Module, state: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Replaces the magnitudes stored for a model and its submodules by those that `histories_state` returned.

    Raises `ValueError`, before anything is changed, for the path of a module that the model lacks."""
    modules = dict(model.named_modules())
    if unknown := sorted(state.keys() - modules.keys()):
        raise ValueError(
            f"the state has 8-bit scaling histories of {unknown[0]!r}, a module that this model lacks; "
            "build the model as it was at saving"
        )
    for path, module in modules.items():
        if path in state or module in _of_model:
            histories_of(module).magnitudes = dict(state.get(path, {}))


@torch.library.custom_op("memopt::fp8_delayed_scale", mutates_args=())
def fp8_delayed_scale(x: Tensor, dtype: torch.dtype, history: str) -> Tensor:
    """Returns the scale of `x` for an 8-bit dtype (see `Histories.scale`), and stores the largest magnitude of `x`.
    `history` is `Histories.prefix` followed by the name of the tensor.

    Where these histories were freed with their model, it is the scale for `x` itself, and nothing is stored."""
    prefix, separator, name = history.partition("/")
    owner = _by_prefix.get(prefix + separator)
    return scale_of(amax(x), dtype) if owner is None else owner.scale(name, x, dtype)


@fp8_delayed_scale.register_fake
def _(x: Tensor, dtype: torch.dtype, history: str) -> Tensor:
    return torch.empty((), dtype=torch.float32, device=x.device)


fp8_delayed_scale.register_autograd(lambda ctx, of_scale: (None, None, None))

DELAYED_SCALE: Any = torch.ops.memopt.fp8_delayed_scale.default
