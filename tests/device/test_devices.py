"""The kinds of devices: how they are found, what is asked of one that is not known, and a third kind in a file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import memopt
from memopt.account.account import BOOKKEEPING_BYTES
from memopt.device import CPU, CUDA, DEVICES, Device, device_here, device_of, hardware, known_hardware
from tests.device.xpu import LIBRARY_BYTES, MB, XPU

BATCH = {"input": torch.zeros(256, 64)}


@pytest.fixture
def xpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEVICES, XPU.type, XPU)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64)) for _ in "1234"))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.layers(input).square().mean()


def test_a_kind_is_found_by_a_type_a_device_or_a_card() -> None:
    assert device_of("cuda") is device_of(torch.device("cuda:1")) is device_of(hardware("h100")) is CUDA
    assert device_of("cpu") is device_of(torch.device("cpu")) is device_of(hardware("cpu")) is CPU
    assert device_of(device_here()) is (CUDA if torch.cuda.is_available() else CPU)


@pytest.mark.parametrize("name", ["meta", "mps"])
def test_nothing_is_done_on_a_kind_that_is_not_known(name: str) -> None:
    device, kind = torch.device(name), device_of(name)
    assert kind == Device(name)
    assert not any((kind.caching, kind.is_host, kind.available(), kind.in_use()))
    assert kind.cards() == {}
    assert (
        kind.hardware(device)
        is kind.generator_state(device)
        is kind.free_bytes(device)
        is kind.segments(device)
        is None
    )
    kind.synchronize(device)
    kind.empty_cache()


@pytest.mark.usefixtures("xpu")
def test_a_third_kind_has_its_cards_in_the_table() -> None:
    assert known_hardware()[-3:] == ("t4", "max-1100", "cpu")
    assert device_of(hardware("max-1100")) is XPU


@pytest.mark.usefixtures("xpu")
def test_a_step_is_planned_for_a_third_kind() -> None:
    roomy = memopt.plan(Layers(), 2, BATCH, device="max-1100", precision="fp32")
    assert (roomy.hardware, roomy.added_time) == ("max-1100", 0)
    account = roomy.account
    assert (account.context, account.reserve) == (200 * MB, 200 * MB + LIBRARY_BYTES + BOOKKEEPING_BYTES)
    assert account.caching
    assert account.fragmentation > 0
    assert account.state_blocks
    assert account.parameters % 512 == 0
    tight = roomy.at(roomy.smallest_gb())
    assert tight.added_time > 0
    assert tight.predicted_peak_bytes <= tight.budget_bytes < roomy.predicted_peak_bytes


@pytest.mark.usefixtures("xpu")
def test_a_third_kind_chooses_its_dtype_and_its_kernels_workspaces() -> None:
    plan = memopt.plan(Layers(), 2, BATCH, device="max-1100")
    assert any("bf16" in note for note in plan.notes)
    assert plan.joined is not None
    products = [op for op in plan.joined.problem.ops if op.name.startswith("mm")]
    assert products
    assert all(
        op.workspace_bytes >= sum(plan.joined.problem.storages[made].bytes for made in op.makes) for op in products
    )


BY_NAME = {
    "cli/early.py": "words of the command line for the card of this machine, and the names of all cards",
    "compat/host.py": "the host's own name, in the one place below memopt/device",
    "run/on_demand.py": "methods of tensors",
    "train/step_state.py": "names in saved states, which older versions wrote",
}


def test_no_other_file_asks_for_a_device_by_name() -> None:
    root = Path(memopt.__file__).parent
    files = {str(file.relative_to(root)): file.read_text() for file in root.rglob("*.py")}
    found = {name for name, text in files.items() if re.search(r"""["'](cuda|cpu)["']""", text)}
    assert {name for name in found if not name.startswith("device/")} == BY_NAME.keys()
