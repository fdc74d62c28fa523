"""Cards by forgiving names, and the budget that a card has."""

from __future__ import annotations

import difflib
import re

from memopt.cli.failures import UsageError
from memopt.compat.host import HOST
from memopt.device import Hardware, device_here, hardware, hardware_of, known_hardware
from memopt.errors import GIB

HERE = ("cuda", "gpu")


def card_named(name: str | None) -> str | None:
    """The name of the card in the hardware table, as `memopt.plan(device=…)` takes it: for "RTX 4090", "4090" or
    "rtx4090" it is "rtx-4090". None for no name and for "cuda", which mean the device of this machine.

    Raises `UsageError` for an unknown name, for one that several cards have, and for "cuda" without such a device.
    """
    if name is None:
        return None
    if name.lower() in HERE:
        if device_here() == HOST:
            raise UsageError(f"--device {name}: this machine has no CUDA device; name a card, such as rtx-4090")
        return None
    wanted = _plain(name)
    plain = {_plain(known): known for known in known_hardware()}
    if wanted in plain:
        return plain[wanted]
    within = [known for short, known in plain.items() if wanted and wanted in short]
    if len(within) == 1:
        return within[0]
    if within:
        raise UsageError(f"--device {name} may be {' or '.join(within)}; name one of them")
    close = [plain[short] for short in difflib.get_close_matches(wanted, plain, n=1)]
    meant = f"; did you mean {close[0]}?" if close else ""
    raise UsageError(f"no card is named {name!r}{meant or '; known are ' + ', '.join(known_hardware())}")


def _plain(name: str) -> str:
    """The name in small letters and digits, without the words of the maker."""
    return re.sub(r"nvidia|geforce|tesla|[^a-z0-9]", "", name.lower())


def card(name: str | None) -> Hardware:
    """The rates and the memory of a card of the table; for None those of this machine's device."""
    if name is not None:
        return hardware(name)
    return hardware_of(device_here())


def budget_gb(written: str | None, name: str | None) -> float:
    """The budget in GB of 1024³ bytes as it is written, by default the memory of the card. Raises `UsageError`."""
    return card(name).memory_bytes / GIB if written is None else gigabytes("--budget-gb", written)


def gigabytes(option: str, written: str) -> float:
    """The number of gigabytes that is written for an option. Raises `UsageError`."""
    number = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(?:gi?b?)?\s*", written, re.IGNORECASE)
    if number is None or float(number[1]) == 0:
        raise UsageError(f"{option} takes a number of gigabytes, such as 8 or 7.5, not {written!r}")
    return float(number[1])
