"""The kinds of devices that memopt knows: which one a name means, which this machine has, and rates by card name."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from memopt.compat.host import HOST
from memopt.device.cpu import CPU
from memopt.device.cuda import CUDA
from memopt.device.device import Device
from memopt.device.hardware import Hardware

DEVICES: dict[str, Device] = {device.type: device for device in (CPU, CUDA)}
"""The kinds of devices by their torch types. To support another kind, add an entry."""


def device_of(named: str | torch.device | Hardware) -> Device:
    """The `Device` for a torch device, the name of its type, or a hardware entry. For "meta" and unknown types, a
    `Device` of that type with the defaults of the base class."""
    if isinstance(named, Hardware):
        named = named.device_type
    name = named.type if isinstance(named, torch.device) else named
    return DEVICES.get(name) or Device(name)


def device_here() -> torch.device:
    """The device on which this machine would train: the type of its card if it has one, else the host."""
    found = (torch.device(kind.type) for kind in DEVICES.values() if kind.available() and not kind.is_host)
    return next(found, HOST)


def device_in_use() -> torch.device:
    """The current device of the first kind in `DEVICES`, the host left out, that this process has used, or the host."""
    return next((kind.current() for kind in DEVICES.values() if kind.in_use() and not kind.is_host), HOST)


def hardware(name: str) -> Hardware:
    """The hardware entry with this name ("rtx-4090"). Raises `ValueError` for a name that is not known."""
    for device in DEVICES.values():
        if name in (cards := device.cards()):
            return cards[name]
    raise ValueError(f"unknown hardware {name!r}; known are {', '.join(known_hardware())}")


def kernels_of(name: str) -> AbstractContextManager[None]:
    """A context in which operators on tensors of another device, such as "meta", choose the kernels of the card called
    `name`, where that changes what a step holds; "" changes nothing. Raises `ValueError` for an unknown name."""
    card = hardware(name) if name else None
    return nullcontext() if card is None else device_of(card).kernels(card)


def known_hardware() -> tuple[str, ...]:
    """The names that `hardware` takes, the host's last."""
    kinds = sorted(DEVICES.values(), key=lambda kind: kind.is_host)
    return tuple(name for kind in kinds for name in sorted(kind.cards()))


def hardware_of(device: torch.device) -> Hardware:
    """The hardware entry for a torch device of this machine, with the memory that the device reports; for a GPU, with
    half of this machine's memory as the room for offloads on the host.

    Raises `ValueError` for a device that is not listed: `measure_hardware` works for any."""
    kind = device_of(device)
    found = kind.hardware(device)
    if found is not None:
        return found
    names = ", ".join(known_hardware())
    if not kind.cards():
        raise ValueError(f"memopt has no figures for device {str(device)!r}; give device=, one of {names}")
    raise ValueError(
        f"memopt has no figures for {kind.name(device)}; measure them with memopt.device.measure_hardware, or give "
        f"device= the name that is nearest to it, of {names}"
    )
