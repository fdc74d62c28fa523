"""What is known of a training before it runs, as far as proposals about its optimiser are priced by it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from memopt.account.optimizer_account import optimizer_account
from memopt.account.optimizer_trial import OptimizerLike
from memopt.device.hardware_table import Hardware, hardware
from memopt.optimizers.bf16_parameters import kept_wide
from memopt.solver.link import Link

# PCIe 4.0 x16 as copies from pinned memory reach it, and the wait for one.
PCIE = Link(bytes_per_second=25e9, latency_seconds=10e-6)


@dataclass(frozen=True)
class TrainingFacts:
    """Shapes and rates; parameters may be on "meta"."""

    parameters: tuple[torch.Tensor, ...]
    """All of the model's, each once, frozen ones too."""
    optimizer: OptimizerLike
    """A class, an instance (over these parameters), a partial or a name, as for `memopt.optimize`; None for none."""
    hardware: Hardware
    """The device that trains."""
    link: Link = PCIE
    """The road to the host, for offloading."""
    host: Hardware | None = None
    """What steps on the host; by default the table's guess for this machine's CPU."""
    wide: tuple[torch.Tensor, ...] = ()
    """Parameters that stay in float32 (`kept_wide`)."""
    together: tuple[tuple[torch.Tensor, ...], ...] | None = None
    """Parameters whose gradients come at once in a backward, those of a module; each alone if None."""
    shared: tuple[torch.Tensor, ...] = ()
    """Parameters used at several places, whose gradient waits for the last use."""

    @classmethod
    def of(cls, model: nn.Module, optimizer: OptimizerLike, hardware: Hardware, link: Link = PCIE) -> TrainingFacts:
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
        return trained(self.parameters)

    @cached_property
    def fused(self) -> bool:
        """Whether the optimiser steps on the device by fused kernels."""
        device = "cpu" if self.hardware.name == "cpu" else "cuda"
        return optimizer_account(self.optimizer, self.trained, device).name.endswith("(fused)")

    @property
    def stepping_host(self) -> Hardware:
        return self.host or hardware("cpu")


def trained(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [parameter for parameter in parameters if parameter.requires_grad]


def _together(model: nn.Module) -> list[tuple[nn.Parameter, ...]]:
    """Module by module the parameters whose gradients one operator may make at once."""
    return [found for module in model.modules() if (found := tuple(module.parameters(recurse=False)))]


def _shared(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that stand at several places of the model, as tied embeddings do."""
    places = Counter(id(each) for module in model.modules() for each in module.parameters(recurse=False))
    return [each for each in model.parameters() if places[id(each)] > 1]
