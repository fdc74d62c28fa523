"""Random generators that belong to an optimiser, one for each device, saved and copied with it."""

from __future__ import annotations

from typing import Any

import torch


class Generators:
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

    def __getstate__(self) -> dict[str, Any]:
        return self.states()

    def __setstate__(self, saved: dict[str, Any]) -> None:
        self.set_states(saved)
