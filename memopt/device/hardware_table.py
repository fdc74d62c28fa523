"""Looks rates of devices up, by the name of a card or by torch device."""

from __future__ import annotations

import torch

from memopt.device.devices import DEVICES, device_of
from memopt.device.hardware import Hardware


def hardware(name: str) -> Hardware:
    """Look a device up by its name in the table. Raises ValueError for a name that is not there."""
    for device in DEVICES.values():
        if name in (cards := device.cards()):
            return cards[name]
    raise ValueError(f"unknown hardware {name!r}; known are {', '.join(known_hardware())}")


def known_hardware() -> tuple[str, ...]:
    """The names that `hardware` takes, the host's last."""
    kinds = sorted(DEVICES.values(), key=lambda kind: kind.is_host)
    return tuple(name for kind in kinds for name in sorted(kind.cards()))


def hardware_of(device: torch.device) -> Hardware:
    """The table's entry for a torch device, with the memory that the device reports; half of this machine's memory is
    the room on the host.

    Raises ValueError for a device that the table does not list: `measure_hardware` serves any.
    """
    kind, names = device_of(device), ", ".join(known_hardware())
    found = kind.hardware(device)
    if found is not None:
        return found
    if not kind.cards():
        raise ValueError(f"no hardware table for device {str(device)!r}; name one of {names}")
    raise ValueError(
        f"{kind.name(device)} is not in the hardware table; measure it with memopt.device.measure_hardware, "
        f"or name the nearest of {names}"
    )
