from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from memopt.device.calibration import measure_hardware
from memopt.device.devices import hardware, hardware_of, known_hardware
from memopt.device.hardware import Chip


def test_every_entry_has_its_figures_and_a_source() -> None:
    for name in known_hardware():
        entry = hardware(name)
        assert entry.name == name
        assert entry.source
        assert entry.flops["float32"] > 1e9
        assert entry.memory_bytes > 1e9
        assert 1e10 < entry.bytes_per_second < 1e13
        assert 0 < entry.launch_seconds < 1e-4


def test_figures_are_dense_and_with_fp32_accumulation() -> None:
    assert hardware("h100").flops["bfloat16"] == pytest.approx(989.5e12)
    assert hardware("rtx-4090").flops["float16"] == pytest.approx(165.2e12)


def test_every_card_has_a_road_to_its_host() -> None:
    for name in known_hardware():
        entry = hardware(name)
        if name == "cpu":
            assert entry.link.bytes_per_second == 0
            continue
        assert 1e10 < entry.link.bytes_per_second < 0.8 * entry.link_bytes_per_second
        assert entry.link.host_bytes == 2 * entry.memory_bytes
    assert hardware("h100").link_bytes_per_second == 2 * hardware("a100-80").link_bytes_per_second


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"unknown hardware 'rtx-9999'; known are a100-40, .*rtx-4090.*, cpu"):
        hardware("rtx-9999")


def test_dtype_without_units_runs_at_the_rate_of_float32() -> None:
    t4 = hardware("t4")
    assert t4.peak_flops("bfloat16") == t4.flops["float32"]


def test_cpu_scales_with_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    one = hardware_of(torch.device("cpu")).flops["float32"]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert hardware_of(torch.device("cpu")).flops["float32"] == 8 * one


REPORTED = SimpleNamespace(total_memory=123, multi_processor_count=7, max_threads_per_multi_processor=1024)


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100 80GB PCIe", "a100-80"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA L4", "l4"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 3060", "rtx-3060"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
    ],
)
def test_cuda_device_is_found_by_what_it_reports(reported: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: reported)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: REPORTED)
    found = hardware_of(torch.device("cuda"))
    assert found.name == name
    assert found.memory_bytes == 123
    assert found.chip == Chip(7, 1024)


@pytest.mark.parametrize(
    "reported", ["NVIDIA L40S", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 3060 Ti"]
)
def test_a_relative_is_not_taken_for_a_listed_device(reported: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: reported)
    with pytest.raises(ValueError, match=f"no figures for {reported}; measure them"):
        hardware_of(torch.device("cuda"))


def test_device_without_a_table_is_refused() -> None:
    with pytest.raises(ValueError, match="no figures for device 'meta'"):
        hardware_of(torch.device("meta"))


def test_measuring_this_machine_finds_sensible_rates() -> None:
    measured = measure_hardware(torch.device("cpu"), dtypes=(torch.float32,))
    assert set(measured.flops) == {"float32"}
    assert 1e8 < measured.flops["float32"] < 1e14
    assert 1e8 < measured.bytes_per_second < 1e13
    assert 1e-8 < measured.launch_seconds < 1e-2
    assert measured.flops_efficiency == measured.bandwidth_efficiency == 1.0
    assert 0 < measured.between_seconds < 1e-2, "of a CPU, which runs its own Python"
    assert measured.cached_bytes == 0 or measured.cached_bytes_per_second > measured.bytes_per_second
