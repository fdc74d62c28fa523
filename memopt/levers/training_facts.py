"""The facts about a training by which levers on the optimiser are priced, before anything runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from memopt.account.optimizer_account import optimizer_account
from memopt.account.optimizer_trial import OptimizerLike
from memopt.compat.host import HOST
from memopt.device.devices import hardware
from memopt.device.hardware import Hardware
from memopt.optimizers.bf16_parameters import kept_wide
from memopt.solver.problem import Link

# PCIe 4.0 with 16 lanes: the rate that copies from pinned memory reach, and the latency of a copy.
PCIE = Link(bytes_per_second=25e9, latency_seconds=10e-6)


@dataclass(frozen=True)
class TrainingFacts:
    """Parameters, optimiser and hardware; the parameters may be on "meta"."""

    parameters: tuple[torch.Tensor, ...]
    """All parameters of the model, each once, frozen ones too."""
    optimizer: OptimizerLike
    """A class, an instance (over these parameters), a partial, a name or None, as for `memopt.optimize`."""
    hardware: Hardware
    """The device that trains."""
    link: Link = PCIE
    """The link to the host, for offloading."""
    host: Hardware | None = None
    """The host's hardware, for steps there; by default the table's guess for this machine's CPU."""
    wide: tuple[torch.Tensor, ...] = ()
    """Parameters that stay in float32 (`kept_wide`)."""
    together: tuple[tuple[torch.Tensor, ...], ...] | None = None
    """Groups of parameters whose gradients a backward makes at once, those of a module; None: each gradient alone."""
    shared: tuple[torch.Tensor, ...] = ()
    """Parameters used at several places, whose gradients are complete only after the last use."""

    @classmethod
    def of(cls, model: nn.Module, optimizer: OptimizerLike, hardware: Hardware, link: Link = PCIE) -> TrainingFacts:
        """The facts of training `model`."""
        return cls(
            tuple(model.parameters()),
            optimizer,
            hardware,
            link,
            wide=tuple(kept_wide(model)),
            together=tuple(_together(model)),
            shared=tuple(_shared(model)),
        )

    @property
    def trained(self) -> list[torch.Tensor]:
        """The parameters that are trained."""
        return trained(self.parameters)

    @cached_property
    def fused(self) -> bool:
        """Whether the optimiser uses fused kernels on the device."""
        return optimizer_account(self.optimizer, self.trained, self.hardware.device_type).name.endswith("(fused)")

    @property
    def stepping_host(self) -> Hardware:
        """The hardware that steps on the host."""
        return self.host or hardware(HOST.type)


def trained(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those of the parameters that require gradients."""
    return [parameter for parameter in parameters if parameter.requires_grad]


def _together(model: nn.Module) -> list[tuple[nn.Parameter, ...]]:
    """The parameters of each module by itself, whose gradients one operator may make at once."""
    return [found for module in model.modules() if (found := tuple(module.parameters(recurse=False)))]


def _shared(model: nn.Module) -> list[nn.Parameter]:
    """Parameters at several places of the model, like tied embeddings."""
    places = Counter(id(parameter) for group in _together(model) for parameter in group)
    return [parameter for parameter in model.parameters() if places[id(parameter)] > 1]
