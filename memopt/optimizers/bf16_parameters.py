"""Parameters and gradients in bfloat16, stepped so that updates far below bfloat16's resolution are not lost. A
bfloat16 is the upper half of a float32; stochastic rounding works on the bits, with one int32 for each element."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn, optim

from memopt.optimizers.parameterwise import Parameterwise, Slice, is_per_element

_HALF = 0x8000


def round_stochastically(value: torch.Tensor, out: torch.Tensor, generator: torch.Generator) -> None:
    """Round float32 `value`, which is overwritten, to one of the two nearest bfloat16 values, into `out`; the nearer
    one is more likely, so that the result is right on average. Infinities and NaN stay. (Gupta et al. 2015,
    arXiv:1502.02551, section 3.)"""
    # All NaNs get the same bits, since rounding up the bits of other NaNs could overflow into a number.
    nan, infinity = float("nan"), float("inf")
    bits = value.nan_to_num_(nan=nan, posinf=infinity, neginf=-infinity).view(torch.int32)
    bits.add_(torch.empty_like(bits).random_(0, 2 * _HALF, generator=generator)).bitwise_right_shift_(16)
    out.view(torch.int16).copy_(bits)


class _Generators:
    """A generator for each device, made at its first use, all with the same seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._made: dict[str, torch.Generator] = {}

    def on(self, device: torch.device) -> torch.Generator:
        """The generator of a device."""
        name = str(device)
        if name not in self._made:
            self._made[name] = torch.Generator(device).manual_seed(self.seed)
        return self._made[name]

    def states(self) -> dict[str, Any]:
        """The seed, and for each device name the generator's state, a tensor of bytes in the host's memory."""
        return {"seed": self.seed, "devices": {name: made.get_state() for name, made in self._made.items()}}

    def set_states(self, saved: dict[str, Any]) -> None:
        """Set the seed and the generators back to what `states` returned."""
        self.seed = saved["seed"]
        self._made = {}
        for name, state in saved["devices"].items():
            self.on(torch.device(name)).set_state(state.cpu())

    __getstate__, __setstate__ = states, set_states  # copies and pickles


# The kernels of these modules take parameters in the dtype of their statistics, which are buffers in float32.
_KEPT_WIDE = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class BF16ParametersOptimizer(Parameterwise):
    """Steps bfloat16 parameters in float32, one piece of a parameter at a time; others as `inner` would.

    An update of 1e-4 to a weight just below 1 is 40 times smaller than the distance between neighbouring bfloat16
    values there, so rounding to the nearest would never change the weight. The new value is therefore rounded up or
    down at random, so that it is right on average.

    Args:
        inner: any optimizer that steps each parameter independently of the others.
        seed: the seed of the random roundings; their generators are in `state_dict`, so that a resumed run is bitwise
            the same.

    Raises:
        TypeError: where `inner` is not an optimizer.
        ValueError: where `inner` needs a closure, or takes sparse gradients only.
    """

    title: ClassVar[str] = "bf16_parameters"
    fields: ClassVar[tuple[str, ...]] = ("inner", "generators")

    def __init__(self, inner: optim.Optimizer, seed: int = 0) -> None:
        super().__init__(inner)
        self.generators = _Generators(seed)
        for parameter in filter(_is_narrow, self.state):  # made by Adagrad's constructor, in the parameter's dtype
            self._widen_state(parameter)

    def _widen_state(self, parameter: torch.Tensor) -> None:
        """Convert the state of a parameter to float32."""
        state = self.state[parameter]
        for key, value in state.items():
            if is_per_element(value, parameter) and value.is_floating_point():
                state[key] = value.float()

    def _open(self, kept: torch.Tensor, piece: Slice) -> torch.Tensor:
        part = piece.of(kept)
        return part.detach().to(torch.float32, copy=True) if _is_narrow(kept) else part

    def _close(self, parameter: torch.Tensor, piece: Slice, tensor: torch.Tensor) -> None:
        if _is_narrow(parameter):
            round_stochastically(tensor, piece.of(parameter), self.generators.on(parameter.device))

    def extra_state(self) -> dict[str, Any]:
        return {**super().extra_state(), "generators": self.generators.states()}

    def load_extra_state(self, saved: dict[str, Any] | None) -> None:
        super().load_extra_state(saved)
        assert saved is not None
        self.generators.set_states(saved["generators"])


def use_bf16_parameters(model: nn.Module, optimizer: optim.Optimizer, seed: int = 0) -> BF16ParametersOptimizer:
    """Convert the float32 parameters of `model` to bfloat16, in place, frozen ones too, and wrap their optimizer.

    Parameters of BatchNorm and all buffers keep their dtype; present gradients are converted as well. A forward that
    mixes dtypes (float32 inputs or buffers) must run under `torch.autocast` or `memopt.optimize`.
    For the arguments and errors see `BF16ParametersOptimizer`.
    """
    wrapped = BF16ParametersOptimizer(optimizer, seed)
    wide = {id(parameter) for parameter in kept_wide(model)}
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for parameter in model.parameters():
        if parameter.dtype is torch.float32 and id(parameter) not in wide:
            _narrow(parameter, wrapped if id(parameter) in trained else None)
    return wrapped


def kept_wide(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of `model` that stay in float32: those of batch norms, whose kernels take no others."""
    wide = (module for module in model.modules() if isinstance(module, _KEPT_WIDE))
    return [parameter for module in wide for parameter in module.parameters()]


def _narrow(parameter: nn.Parameter, wrapped: BF16ParametersOptimizer | None) -> None:
    """Convert one parameter and its gradient to bfloat16, and its state in the optimizer `wrapped` to float32."""
    gradient, parameter.grad = parameter.grad, None
    parameter.data = parameter.data.to(torch.bfloat16)
    parameter.grad = None if gradient is None else gradient.to(torch.bfloat16)
    if wrapped is not None:
        wrapped._widen_state(parameter)


def _is_narrow(tensor: torch.Tensor) -> bool:
    return tensor.dtype is torch.bfloat16
