"""Measurements of a device, kept on disk: its rates, its context, and the seconds of operators timed on it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from memopt.device.calibrate import measure_hardware
from memopt.device.devices import device_of
from memopt.device.hardware import Hardware
from memopt.device.op_call import OpCall
from memopt.device.op_times import call_key, dominant_calls, time_calls
from memopt.disk_cache import cache_folder, read_json, warn_not_kept, write_json
from memopt.saved_values import as_json, opened, sealed, value_from

FORMAT = 5
"""Files of another format are ignored, and their measurements repeated; raised when what is measured, or how,
changes."""
MOST_CALLS = 2**14
"""Operators whose seconds a device's file keeps, the latest ones."""


def calibrated_hardware(device: torch.device) -> Hardware:
    """The rates of `device` as measured on this machine, now or before with the same card, driver and torch version.

    On a GPU they include the bytes that a process holds there beside torch's allocator. The first call takes a second
    or two.
    """
    known = _read(device)
    if known is None:
        measured = measure_hardware(device)
        context = device_of(device).measure_context_bytes(device)
        if context is not None:
            measured = replace(measured, context_bytes=context)
        known = _Measured(measured)
        _write(device, known)
    return known.hardware


def calibrated_seconds(expected: Mapping[OpCall, float], device: torch.device) -> dict[OpCall, float]:
    """Seconds of one run of each call that makes up most of a step, as timed on this machine, now or before.

    Args:
        expected: for each call, the seconds that all of its runs in a step together are expected to take.
    """
    known = _read(device) or _Measured(calibrated_hardware(device))
    seconds = dict(known.seconds)
    wanted = dominant_calls(expected)
    fresh = {call: expected[call] for call in wanted if call_key(call) not in seconds}
    if fresh:
        found = {call_key(call): value for call, value in time_calls(fresh, device).items()}
        seconds |= found
        if found:
            _write(device, replace(known, seconds=dict(list(seconds.items())[-MOST_CALLS:])))
    return {call: seconds[call_key(call)] for call in wanted if call_key(call) in seconds}


def card_key(device: torch.device) -> dict[str, Any]:
    """The properties that measurements depend on: card, driver and torch; on the CPU the number of threads."""
    return {"format": FORMAT, "torch": torch.__version__, **device_of(device).identity(device)}


def _path(device: torch.device) -> Path:
    digest = hashlib.sha256(repr(sorted(card_key(device).items())).encode()).hexdigest()[:16]
    return cache_folder() / "cards" / f"{digest}.json"


@dataclass(frozen=True)
class _Measured:
    """The measurements of a device."""

    hardware: Hardware
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds of one run of a call, by `call_key`."""


def _read(device: torch.device) -> _Measured | None:
    """The measurements in the device's file; None where there is none, or it is damaged or of another device or
    format."""
    try:
        values = opened(read_json(_path(device)))
        if values.pop("key", None) != card_key(device):
            return None
        known = value_from(_Measured, values)
    except (OSError, ValueError, RecursionError):
        return None
    hardware = known.hardware
    rates = (hardware.bytes_per_second, *hardware.flops.values(), *known.seconds.values())
    return known if all(rate > 0 for rate in rates) else None


def _write(device: torch.device, known: _Measured) -> None:
    """Replace the device's file, or warn where its folder cannot be written."""
    try:
        write_json(_path(device), sealed({"key": card_key(device), **as_json(known)}))
    except OSError as error:
        warn_not_kept("measurements of the device", str(error))
