"""Free memory of the host: what Linux says, within the limit of the container."""

from __future__ import annotations

from pathlib import Path

import pytest

from memopt.compat.host import HOST
from memopt.device import CPU, cpu


def test_the_limit_of_the_container_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cpu, "_CGROUP", tmp_path)
    free = CPU.free_bytes(HOST)
    assert free is not None
    assert free > 2**20
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("3000\n")
    assert CPU.free_bytes(HOST) == 2000
    (tmp_path / "memory.current").write_text("6000\n")
    assert CPU.free_bytes(HOST) == 0


def test_no_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cpu, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("3000\n")
    free = CPU.free_bytes(HOST)
    assert free is not None
    assert free > 2**20


def test_nothing_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cpu, "_CGROUP", tmp_path)
    monkeypatch.setattr(cpu, "_available", lambda: None)
    assert CPU.free_bytes(HOST) is None
