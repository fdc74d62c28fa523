"""Delayed scaling: the scale of a tensor from the largest magnitudes that it had in earlier steps.

After Transformer Engine's `DelayedScaling` (NVIDIA, 2022): the largest of the last 16. Only `memopt::fp8_delayed_scale`
has state. The scale is all that it returns, and it is neither merged nor recomputed; quantising by a given scale is
pure. The state belongs to a model: `histories_of(model)` returns it, it dies with the model, and `histories_state` and
`load_histories` save and load it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from passes.ops.fp8_formats import amax, scale_of

LENGTH = 16
"""Evaluations whose magnitudes are remembered."""
_numbers = itertools.count()


class Histories:
    """The magnitudes that the 8-bit layers of one model remember, by name: for each an fp32 tensor [16], latest first.

    Operators refer to them by strings that begin with `prefix`, which no other object of this process shares.
    """

    def __init__(self) -> None:
        self.prefix = f"{next(_numbers)}/"
        self._magnitudes: dict[str, Tensor] = {}
        _by_prefix[self.prefix] = self

    def scale(self, name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the scale of `x` for an 8-bit dtype, a scalar in fp32, and remembers the magnitude of `x`.

        Where nothing is remembered under that name, it is the scale for `x` itself. Where `x` is not finite, the scale
        is not a number and nothing is remembered.
        """
        now = amax(x)
        finite = now.isfinite()
        known = self._magnitudes.get(name)
        if known is None:
            known = now.masked_fill(~finite, 0.0).repeat(LENGTH)
        known = known.to(x.device)
        largest = torch.where(finite, known.amax(), now)
        self._magnitudes[name] = torch.cat([torch.where(finite, now, known[:1].squeeze(0))[None], known[:-1]])
        return scale_of(largest, dtype)

    @property
    def magnitudes(self) -> dict[str, Tensor]:
        """A copy of the histories by name. The names are the same for another copy of the model, in any process."""
        return dict(self._magnitudes)

    @magnitudes.setter
    def magnitudes(self, magnitudes: Mapping[str, Tensor]) -> None:
        self._magnitudes = dict(magnitudes)


_by_prefix: weakref.WeakValueDictionary[str, Histories] = weakref.WeakValueDictionary()
"""Those whose owner is alive: operators find theirs here."""
_of_model: weakref.WeakKeyDictionary[object, Histories] = weakref.WeakKeyDictionary()
"""At most one for each model that is alive, its owner."""


def histories_of(model: object) -> Histories:
    """Returns the histories that belong to a model, always the same object for the same model."""
    if model not in _of_model:
        _of_model[model] = Histories()
    return _of_model[model]


def histories_state(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Returns the magnitudes that a model and its submodules remember, by path of the module, then by name."""
    known = {path: _of_model[module] for path, module in model.named_modules() if module in _of_model}
    return {path: histories.magnitudes for path, histories in known.items() if histories.magnitudes}


def load_histories(model: nn.Module, state: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Has a model and its submodules remember what `histories_state` returned, and nothing else.

    Raises `ValueError`, before anything is changed, for the path of a module that the model lacks.
    """
    modules = dict(model.named_modules())
    if unknown := sorted(state.keys() - modules.keys()):
        raise ValueError(f"the 8-bit histories are of {unknown[0]!r}, which this model has not; build it as it was")
    for path, module in modules.items():
        if path in state or module in _of_model:
            histories_of(module).magnitudes = state.get(path, {})


@torch.library.custom_op("memopt::fp8_delayed_scale", mutates_args=())
def fp8_delayed_scale(x: Tensor, dtype: torch.dtype, history: str) -> Tensor:
    """See `Histories.scale`; `history` is the prefix of the histories and a name.

    Where those histories are gone with their model, the scale is that of `x` itself, and nothing is remembered.
    """
    prefix, separator, name = history.partition("/")
    owner = _by_prefix.get(prefix + separator)
    return scale_of(amax(x), dtype) if owner is None else owner.scale(name, x, dtype)


@fp8_delayed_scale.register_fake
def _(x: Tensor, dtype: torch.dtype, history: str) -> Tensor:
    return torch.empty((), dtype=torch.float32, device=x.device)


def _no_gradient(ctx: Any, of_scale: Tensor | None) -> tuple[None, None, None]:
    return None, None, None


fp8_delayed_scale.register_autograd(_no_gradient)

DELAYED_SCALE: Any = torch.ops.memopt.fp8_delayed_scale.default
