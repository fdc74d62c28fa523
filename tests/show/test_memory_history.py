"""What filled a card, by snapshots in the format of `torch.cuda.memory._dump_snapshot`."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import memopt
from memopt.cli.main import main
from memopt.show.memory_history import _SnapshotError, read_history

MB = 1024**2
MODULE = "/env/lib/python3.12/site-packages/torch/nn/modules/module.py"


def frame(name: str, filename: str, line: int = 1) -> dict[str, Any]:
    return {"name": name, "filename": filename, "line": line}


CALL = frame("Module._call_impl", MODULE, 1790)
INIT = [frame("Module._apply", MODULE), frame("<module>", "/home/me/train.py", 5)]
FUNCTIONAL, OPTIM = "/env/site-packages/torch/nn/functional.py", "/env/site-packages/torch/optim/adam.py"
SOFTMAX = [frame("softmax", FUNCTIONAL), frame("Attention.forward", "/home/me/model.py", 31), CALL]
MLP = [frame("MLP.forward", "/home/me/model.py", 52), CALL, frame("<module>", "/home/me/train.py", 9)]
ENGINE = [frame("torch::autograd::Engine::evaluate_function(…)", "engine.cpp"), frame("clone", "??")]
ADAM = [frame("Adam._init_group", OPTIM), frame("<module>", "/home/me/train.py", 12)]
FOREACH = [frame("_multi_tensor_adam", OPTIM), frame("<module>", "/home/me/train.py", 12)]


class Recording:
    """A recording of events, and what torch's snapshot says of them."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.live: dict[int, dict[str, Any]] = {}
        self.next = 0x7F0000000000

    def alloc(self, mbytes: int, frames: list[dict[str, Any]], *, recorded: bool = True) -> int:
        address, self.next = self.next, self.next + mbytes * MB
        self.live[address] = {"address": address, "size": mbytes * MB, "requested_size": mbytes * MB - 8,
                              "state": "active_allocated", "frames": frames}  # fmt: skip
        if recorded:
            self._event("alloc", address, mbytes, frames)
        return address

    def free(self, address: int) -> None:
        mbytes = self.live.pop(address)["size"] // MB
        self._event("free_requested", address, mbytes, [])
        self._event("free_completed", address, mbytes, [])

    def _event(self, action: str, address: int, mbytes: int, frames: list[dict[str, Any]]) -> None:
        self.events.append({"action": action, "addr": address, "size": mbytes * MB, "stream": 0, "frames": frames,
                            "time_us": len(self.events), "compile_context": "N/A", "user_metadata": ""})  # fmt: skip

    def dies(self, mbytes: int) -> None:
        self.events.append({"action": "oom", "size": mbytes * MB, "device_free": 3 * MB, "stream": 0, "frames": MLP})

    def snapshot(self, gap: int = 0) -> dict[str, Any]:
        held = sum(block["size"] for block in self.live.values())
        hole = {"address": self.next, "size": gap * MB, "requested_size": 0, "state": "inactive", "frames": []}
        segment = {
            "device": 0, "address": 0x7F0000000000, "total_size": held + gap * MB, "stream": 0, "frames": [],
            "segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": False, "allocated_size": held,
            "active_size": held, "requested_size": held, "blocks": [*self.live.values(), *[hole] * bool(gap)],
        }  # fmt: skip
        settings = {"PYTORCH_CUDA_ALLOC_CONF": ""}
        return {"segments": [segment], "device_traces": [self.events], "allocator_settings": settings}


def died() -> dict[str, Any]:
    """A run whose second forward ran out of memory: its parameters were there before the recording began."""
    run = Recording()
    run.alloc(10, INIT, recorded=False)
    first = [run.alloc(40, SOFTMAX), run.alloc(60, MLP)]
    gradients = run.alloc(10, ENGINE)
    for address in first:
        run.free(address)
    run.alloc(20, ADAM)
    run.free(run.alloc(5, FOREACH))
    run.alloc(40, SOFTMAX)
    run.alloc(60, MLP)
    run.alloc(6, MLP)
    assert gradients in run.live
    run.dies(64)
    return run.snapshot(gap=30)


def written(values: Any, folder: Path) -> Path:
    path = folder / "snapshot.pickle"
    path.write_bytes(pickle.dumps(values))
    return path


def test_a_run_that_died(tmp_path: Path) -> None:
    history = read_history(written(died(), tmp_path))
    assert history.missing_bytes == 64 * MB
    assert history.free_bytes == 3 * MB
    assert history.peak_bytes == history.allocated_bytes == 146 * MB
    assert history.rows == {
        "activations": 106 * MB,
        "gaps between blocks": 30 * MB,
        "optimizer state": 20 * MB,
        "parameters and buffers": 10 * MB,
        "gradients and backward": 10 * MB,
    }
    assert [(one.place, one.nbytes // MB, one.blocks) for one in history.held[:2]] == [
        ("MLP.forward, me/model.py:52", 66, 2),
        ("Attention.forward, me/model.py:31", 40, 1),
    ]
    assert list(history.advice) == list(history.rows)


def test_the_peak_of_a_run_that_goes_on(tmp_path: Path) -> None:
    """The largest moment is found among the events: at the end little is left."""
    run = Recording()
    run.alloc(10, INIT, recorded=False)
    old = run.alloc(50, MLP, recorded=False)
    run.free(old)
    saved = run.alloc(80, MLP)
    step = run.alloc(5, FOREACH)
    run.free(saved)
    run.free(step)
    history = read_history(written(run.snapshot(), tmp_path))
    assert history.missing_bytes is None
    assert (history.peak_bytes, history.allocated_bytes) == (95 * MB, 10 * MB)
    assert history.rows == {"activations": 80 * MB, "parameters and buffers": 10 * MB, "optimizer.step()": 5 * MB}


def test_gaps_are_those_of_the_moment_at_which_most_is_held(tmp_path: Path) -> None:
    """At the end of a run that goes on, most of what is reserved is free."""
    run = Recording()
    run.events.append({"action": "segment_alloc", "addr": run.next, "size": 100 * MB, "stream": 0, "frames": []})
    saved = run.alloc(80, MLP)
    run.free(saved)
    run.events.append({"action": "segment_alloc", "addr": run.next, "size": 40 * MB, "stream": 0, "frames": []})
    run.alloc(10, MLP)
    history = read_history(written(run.snapshot(gap=130), tmp_path))
    assert (history.reserved_bytes, history.allocated_bytes, history.peak_bytes) == (140 * MB, 10 * MB, 80 * MB)
    assert history.rows == {"activations": 80 * MB, "gaps between blocks": 20 * MB}


def test_what_was_there_before_the_recording_and_lines_behind_wrappers(tmp_path: Path) -> None:
    run = Recording()
    run.alloc(10, [], recorded=False)
    run.alloc(5, [])
    wrapper = frame("einsum", "/env/site-packages/einops/_backends.py")
    run.alloc(20, [frame("einsum", FUNCTIONAL), wrapper, *MLP])
    history = read_history(written(run.snapshot(), tmp_path))
    assert history.rows == {
        "activations": 20 * MB,
        "held before the recording began": 10 * MB,
        "no stack was recorded": 5 * MB,
    }
    assert history.held[0].place == "MLP.forward, me/model.py:52"
    assert "held before the recording began" in history.advice


def test_what_the_command_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(written(died(), tmp_path))
    assert main(["explain", path]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "an allocation of 64 MB failed, with 3 MB free" in printed
    assert "MLP.forward, me/model.py:52" in printed
    assert "activations: memopt recomputes" in printed
    assert "expandable_segments:True" in printed
    assert main(["explain", path, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["rows"]["activations"] == 106 * MB
    assert figures["held"][0]["place"] == "MLP.forward, me/model.py:52"
    assert main(["explain", path, "--op", "addmm"]) == 2
    assert "leave out all options but --json" in capsys.readouterr().err


class Evil:
    def __reduce__(self) -> Any:
        return print, ("run by the pickle",)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (Evil(), "the file refers to builtins.print, not only plain containers, strings and numbers"),
        ({"segments": [torch.float32], "device_traces": []}, "the file refers to torch"),
        ({"segments": [], "device_traces": [[{"action": Evil}]]}, "refers to tests.show.test_memory_history.Evil"),
        ({"segments": [], "device_traces": [[], []]}, "the file has no blocks and no events"),
        ({"device_traces": []}, "KeyError: 'segments'"),
        ([1, 2], "TypeError"),
        ({"segments": [{"device": 0}], "device_traces": []}, "KeyError: 'blocks'"),
        ({"segments": [], "device_traces": [[{"action": "alloc", "addr": 1, "size": "much"}]]}, "TypeError"),
    ],
)
def test_other_files(values: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(values, tmp_path)
    with pytest.raises(_SnapshotError, match="is no snapshot of torch") as raised:
        read_history(path)
    assert said in str(raised.value)
    assert main(["explain", str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "run by the pickle" not in printed.err
    assert "Traceback" not in printed.err


@pytest.mark.parametrize(
    "content", [b"", b"no pickle", pickle.dumps(died())[:-40], b"\x80\x04P0\n.", b"\x80\x02cos\nsystem\n."]
)
def test_files_that_are_no_pickles(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "snapshot.pickle").write_bytes(content)
    with pytest.raises(_SnapshotError):
        read_history(tmp_path / "snapshot.pickle")


def test_a_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(tmp_path / "none.pickle")]) == 2
    assert "there is no file" in capsys.readouterr().err


def test_a_plan_that_was_exported_and_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
        batch = torch.empty(512, 64), torch.empty(512, 8)
    plan = memopt.plan(model.train(), 1, batch, loss_fn=torch.nn.functional.mse_loss, device="cpu", precision="fp32")
    plan.export("step.pickle")
    history = read_history("step.pickle")
    assert history.peak_bytes >= plan.predicted_peak_bytes - 512 * len(history.held)
    assert "saved activations" in history.rows
    plan.save("plan.json")
    assert main(["explain", "plan.json"]) == 0
    printed = capsys.readouterr().out
    assert "Where every byte goes at the peak" in printed
    assert main(["explain", "plan.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["peak_gb"] == plan.predicted_peak_gb
    assert main(["explain", "plan.json", "--budget-gb", "3"]) == 2
    text = Path("plan.json").read_text()
    Path("plan.json").write_text(text.replace('"model": "Sequential"', '"model": "Other"'))
    assert main(["explain", "plan.json"]) == 2
    assert "plan.json is not a memopt plan" in capsys.readouterr().err
