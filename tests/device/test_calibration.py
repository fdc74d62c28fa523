"""Measurements of a device are kept on disk, and repeated where the file is damaged or of another device."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from memopt.device import calibration, hardware
from memopt.device.calibration import calibrated_hardware, calibrated_seconds, card_key
from memopt.device.hardware import Hardware
from memopt.device.op_call import OpCall, describe
from memopt.device.op_times import call_key
from memopt.disk_cache import warn_not_kept

CPU = torch.device("cpu")


class Measurements:
    """Stands in for the measurements: counts them, and gives figures of its own."""

    def __init__(self) -> None:
        self.devices = 0
        self.calls: list[OpCall] = []

    def hardware(self, device: torch.device) -> Hardware:
        self.devices += 1
        return hardware("h100")

    def times(self, calls: Mapping[OpCall, float], device: torch.device) -> dict[OpCall, float]:
        self.calls += calls
        return {call: 0.25 for call in calls if call.inputs[0].size != (3,)}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Measurements:
    made = Measurements()
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(calibration, "measure_hardware", made.hardware)
    monkeypatch.setattr(calibration, "time_calls", made.times)
    return made


def the_file(tmp_path: Path) -> Path:
    (path,) = (tmp_path / "cards").iterdir()
    return path


def neg(size: int) -> OpCall:
    x = torch.empty(size, device="meta")
    return describe(torch.ops.aten.neg.default, (x,), {}, x)


def test_a_device_is_measured_once(made: Measurements) -> None:
    assert calibrated_hardware(CPU) == calibrated_hardware(CPU) == hardware("h100")
    assert made.devices == 1


def test_a_call_is_timed_once_and_what_cannot_be_is_left_out(made: Measurements) -> None:
    assert calibrated_seconds({neg(1): 1.0, neg(2): 1.0}, CPU) == {neg(1): 0.25, neg(2): 0.25}
    assert calibrated_seconds({neg(2): 5.0, neg(3): 5.0, neg(4): 0.1}, CPU) == {neg(2): 0.25}
    assert made.calls == [neg(1), neg(2), neg(3)], "the last makes up little"
    assert made.devices == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda values: "no JSON",
        lambda values: json.dumps([]),
        lambda values: json.dumps({**values, "key": {**values["key"], "torch": "1.0"}}),
        lambda values: json.dumps({**values, "key": {**values["key"], "format": 0}}),
        lambda values: json.dumps({**values, "hardware": {**values["hardware"], "unheard_of": 1}}),
        lambda values: json.dumps({**values, "hardware": {**values["hardware"], "bytes_per_second": 0}}),
        lambda values: json.dumps({**values, "hardware": {"name": "cpu"}}),
        lambda values: json.dumps({**values, "seconds": {"aten.neg.default": None}}),
    ],
)
def test_what_is_damaged_or_of_another_version_is_measured_anew(
    made: Measurements, damage: Any, tmp_path: Path
) -> None:
    calibrated_hardware(CPU)
    path = the_file(tmp_path)
    path.write_text(damage(json.loads(path.read_text())))
    assert calibrated_hardware(CPU) == hardware("h100")
    assert made.devices == 2
    calibrated_hardware(CPU)
    assert made.devices == 2, "and kept"


def test_another_number_of_threads_is_another_device(made: Measurements, monkeypatch: pytest.MonkeyPatch) -> None:
    calibrated_hardware(CPU)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 999)
    assert card_key(CPU)["threads"] == 999
    calibrated_hardware(CPU)
    assert made.devices == 2


def test_a_gpu_is_known_by_its_name_and_has_its_context_measured(
    made: Measurements, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr("memopt.device.cuda.measure_context_bytes", lambda device: 700)
    assert calibrated_hardware(torch.device("cuda")).context_bytes == 700
    assert card_key(torch.device("cuda"))["card"] == "NVIDIA H200"
    monkeypatch.setattr("memopt.device.cuda.measure_context_bytes", lambda device: None)
    assert calibrated_hardware(torch.device("cuda")).context_bytes == 700, "as it was kept"


def test_a_folder_that_cannot_be_written_is_said(
    made: Measurements, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    warn_not_kept.cache_clear()
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="measurements of the device are not stored on disk .* set MEMOPT_CACHE_DIR"):
        assert calibrated_hardware(CPU) == hardware("h100")


def test_the_file_keeps_the_latest_calls_only(
    made: Measurements, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(calibration, "MOST_CALLS", 2)
    assert calibrated_seconds({neg(1): 1.0, neg(2): 1.0}, CPU) == {neg(1): 0.25, neg(2): 0.25}
    assert calibrated_seconds({neg(5): 1.0}, CPU) == {neg(5): 0.25}
    kept = json.loads(the_file(tmp_path).read_text())
    assert list(kept["seconds"]) == [call_key(neg(2)), call_key(neg(5))]
