"""The kinds of devices that memopt knows, and which of them is meant or at hand."""

from __future__ import annotations

import torch

from memopt.compat.host import HOST
from memopt.device.cpu import CPU
from memopt.device.cuda import CUDA
from memopt.device.device import Device
from memopt.device.hardware import Hardware

DEVICES: dict[str, Device] = {device.type: device for device in (CPU, CUDA)}
"""The kinds of devices by their torch types. Another kind is one entry more."""


def device_of(named: str | torch.device | Hardware) -> Device:
    """The kind of a torch device, of its type's name, or of an entry of the hardware table; for "meta" and types that
    are not among `DEVICES`, a `Device` of that type that knows nothing."""
    if isinstance(named, Hardware):
        named = named.device_type
    name = named.type if isinstance(named, torch.device) else named
    return DEVICES.get(name) or Device(name)


def device_here() -> torch.device:
    """The type of device on which this machine would train: of a card if it has one, else the host."""
    found = (torch.device(kind.type) for kind in DEVICES.values() if kind.available() and not kind.is_host)
    return next(found, HOST)


def device_in_use() -> torch.device:
    """The current device of the first kind other than the host that this process uses; the host if it uses none."""
    return next((kind.current() for kind in DEVICES.values() if kind.in_use() and not kind.is_host), HOST)
